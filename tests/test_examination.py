import json

import gymnasium
import numpy as np
import pytest

from forethought import agent, cli, examine, run, settings
from forethought.settings import Settings
from tiny_runs import compiling_once


@pytest.fixture(scope="module", autouse=True)
def stub():
    with pytest.MonkeyPatch.context() as patch, compiling_once():
        patch.setitem(settings.ALGORITHMS, "stub", "stub_learner")
        yield


def trained(directory, env="CartPole-v1", **given):
    asked = {"algorithm": "stub", "env": env, "steps": 1200, "eval_episodes": 1, "audit_episodes": 0, "snapshots": 3}
    run.train(Settings(**asked | given), directory)
    return directory


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "cartpole")


def test_the_agents_of_earlier_steps_are_kept_evenly_spaced(cartpole):
    # Snapshots come after 1/4, 2/4 and 3/4 of 1200 steps, at the end of the chunk under way (at most 256 rows).
    found = agent.snapshots(cartpole)
    assert len(found) == 3 and all(300 * (i + 1) <= step < 300 * (i + 1) + 256 for i, step in enumerate(sorted(found)))
    last = agent.load(cartpole)
    weights = [one.model.weight for one in (*found.values(), last)]
    assert all(not np.array_equal(a, b) for a, b in zip(weights, weights[1:], strict=False))  # the stub always learns


def test_replay_is_read_as_whole_episodes_in_the_order_of_their_ends(cartpole):
    episodes = agent.replayed(cartpole)
    assert len(episodes) > 8
    for episode in episodes:
        step = episode.time_step
        assert step.first[0] and step.last[-1] and not step.first[1:].any() and not step.last[:-1].any()
        assert (episode.depth == 0).all() and step.reward[0] == 0 and (step.reward[1:] == 1).all()
    assert [len(e.depth) for e in agent.replayed(cartpole, 2)] == [len(e.depth) for e in episodes[-2:]]


def test_a_run_is_audited_with_all_that_it_kept(cartpole, capsys, tmp_path):
    status = cli.main(["audit", str(cartpole), "--episodes", "6", "--horizon", "5", "--json", str(tmp_path / "a.json")])
    assert status == 1  # what this model learns in 1200 steps is next to nothing
    said, written = json.loads((tmp_path / "a.json").read_text()), json.loads((cartpole / "audit.json").read_text())
    assert said.pop("seconds") > 0 and said == written
    assert "planning" in capsys.readouterr().out
    first = sorted(agent.snapshots(cartpole))[0]
    assert written["about"]["policies"] == ["agent", f"step {first:,}", "random", "zero action"]
    assert written["about"]["reality"] == "snapshots" and written["about"]["horizon"] == 5
    names = "error_by_depth calibration diagnosis exploitation ranking support mismatch drift provenance"
    assert set(written["sections"]) == set(names.split())
    assert len(written["sections"]["mismatch"]["checkpoints"]["names"]) == 4
    assert written["sections"]["provenance"]["real/steps"]["value"] > 1150
    reward = written["sections"]["error_by_depth"]["policies"]["random"]["parts"]["reward"]["excess"]["mean"]
    # The stub promises 0.5 where 1 comes, and the reward of CartPole never varies: its scale is then a hundredth of it.
    assert reward[0] == pytest.approx((0.5 / 0.01) ** 2, rel=1e-3)
    assert "reward" in {f["kind"] for f in written["verdict"]["findings"]}
    page = (cartpole / "report.html").read_text()
    assert "Exploitation" in page and "Not measured: audit.json" not in page


def test_tolerances_decide_the_exit_status(cartpole, tmp_path):
    loose = tmp_path / "loose.toml"
    names = (
        "error reward termination missed time_limit region exploitation false_plans spread regret value support drift"
    )
    loose.write_text("".join(f"{name} = 1e12\n" for name in names.split()))
    arguments = ["audit", str(cartpole), "--episodes", "6", "--horizon", "3", "--tolerances", str(loose), "--quiet"]
    assert cli.main([*arguments, "--uses", "planning", "imagination"]) == 0


def test_recorded_episodes_stand_in_for_the_environment(cartpole):
    from forethought import data

    env = gymnasium.make("CartPole-v1")
    made = []
    for seed in range(10):
        obs, rows, ended = [env.reset(seed=seed)[0]], [], False
        while not ended:
            rows.append((seed + len(rows)) % 2)
            now, _, ended, _, _ = env.step(rows[-1])
            obs.append(now)
        ends = np.arange(len(rows)) == len(rows) - 1
        made.append(
            {
                "observations": obs,
                "actions": np.array(rows),
                "rewards": np.ones(len(rows)),
                "terminations": ends,
                "truncations": 0 * ends,
            }
        )
    episodes, _ = data.from_gymnasium(env.observation_space, env.action_space, made)
    found = examine(cartpole, data=episodes, horizon=3, episodes=6)
    assert found.about["reality"] == "recorded" and "exploitation" in found.missing


def test_a_pure_environment_is_gone_back_to_with_fresh_noise(tmp_path):
    trained(tmp_path / "hover", env="jax/hover")
    found = examine(tmp_path / "hover", horizon=3, episodes=6)
    assert found.about["reality"] == "fresh replays" and not found.passed


def test_what_does_not_fit_is_refused(cartpole, tmp_path):
    trained(tmp_path / "hover", env="jax/hover")
    with pytest.raises(ValueError, match="was trained with other observations or actions than the audited run"):
        examine(cartpole, policies=[tmp_path / "hover"])
    with pytest.raises(ValueError, match=r"jax/hover: 'obs' is absent, but .* in CartPole-v1"):
        examine(cartpole, env="jax/hover")
    broken = sorted((cartpole / agent.SNAPSHOTS).iterdir())[0]
    content = broken.read_bytes()
    try:
        broken.write_bytes(content[:100])
        with pytest.raises(ValueError, match=broken.name):
            examine(cartpole)
    finally:
        broken.write_bytes(content)


def test_training_ends_with_an_audit_unless_asked_not_to(tmp_path):
    run.train(Settings("stub", "CartPole-v1", 200, eval_episodes=1, audit_episodes=6, snapshots=0), tmp_path / "run")
    written = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert written["about"]["episodes"] == 6 and not (tmp_path / "run" / agent.SNAPSHOTS).exists()
    with pytest.raises(ValueError, match="audit_episodes is 1"):
        Settings("stub", "CartPole-v1", 200, audit_episodes=1)
