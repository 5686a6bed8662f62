import dataclasses
import io
import json
import os
import re
import shutil
import signal

import gymnasium
import jax
import numpy as np
import pytest
from rich.console import Console

import forethought as ft
from forethought import checkpoint, run, settings
from forethought.envs import EnvironmentFault, make
from forethought.logs import MetricsLog
from forethought.settings import Settings
from tiny_runs import compiling_once, metrics, rows, same_run, state

STEPS = 600


class Brittle(gymnasium.Env):
    """Counts its steps; what it shows at step 60 of an episode is NaN."""

    observation_space = gymnasium.spaces.Box(-9, 999, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.t, np.nan if self.t == 60 else 1], np.float32), 1.0, False, False, {}


gymnasium.register("BrittleForTests-v0", Brittle, max_episode_steps=100)
gymnasium.register("ShortForTests-v0", Brittle, max_episode_steps=5)


@pytest.fixture(scope="module", autouse=True)
def stub():
    with pytest.MonkeyPatch.context() as patch, compiling_once():
        patch.setitem(settings.ALGORITHMS, "stub", "stub_learner")
        yield


def asked(env="Pendulum-v1", **given):
    return Settings(
        **{"algorithm": "stub", "env": env, "steps": STEPS, "checkpoint_every": 150, "eval_episodes": 3}
        | {"audit_episodes": 0}
        | given
    )


def train(what, directory, **given):
    """What was said, and how it ended."""
    said = io.StringIO()
    done = run.train(what, directory, console=Console(file=said, width=200, markup=False), **given)
    return done, said.getvalue()


def train_stopped_at(step, number, what, directory):
    """Trains, and sends this very process a signal when `step` is logged."""
    write = MetricsLog.write

    def writing(log, at, values):
        write(log, at, values)
        if at >= step:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "write", writing)
        return train(what, directory)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run; tests that change it take a copy."""
    root = tmp_path_factory.mktemp("finished") / "run"
    done, said = train(asked(), root)
    assert done == run.Finished(root, done.steps, None)
    return root


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_writes_what_it_says(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["fields"]["horizon"] == 3 and config["steps"] == STEPS and config["overrides"] == []
    assert {"jax", "numpy", "forethought"} <= config["versions"].keys()
    assert config["metrics"]["real/loss/obs"] == ["units^2", "squared error of the next observation"]
    for name in ("metrics.jsonl", "tensorboard", "evaluation.json", "report.html"):
        assert (finished / name).exists(), name
    result = json.loads((finished / "evaluation.json").read_text())
    assert {name: len(values) for name, values in result["returns"].items()} == {
        "agent": 3,
        "zero action": 3,
        "random": 3,
    }
    assert result["rule"] == "greedy" and result["seeds"] == [1_000_000] and result["env"] == "Pendulum-v1"


def test_steps_stay_within_the_budget_and_counts_agree(finished):
    lines = metrics(finished)
    last = lines[-1]
    # 8 rows an iteration, of which at most 2 are resets: the budget is left unused by less than an iteration.
    assert STEPS - 8 < last["step"] <= STEPS
    assert last["step"] == last["real/steps"]
    # Pendulum's episodes have 200 steps: 600 / 2 environments are 300 steps and one reset row after the first.
    (count,) = {int(len(x)) for x in rows(finished).values()}
    assert 2 * count == last["step"] + 2 * 2
    assert last["update/count"] == (count - 16) / 4
    assert last["real/rows_replayed"] == last["update/count"] * 2 * 8
    assert last["imagined/steps"] == last["update/count"] * 2 * 1 * 3
    assert checkpoint.latest(finished).step == last["step"]
    returns = [line["real/episode_return"] for line in lines if "real/episode_return" in line]
    assert returns and all(-2000 < x < 0 for x in returns)
    assert {line["real/episode_length"] for line in lines if "real/episode_length" in line} == {200.0}


def test_a_step_is_a_simulator_step_when_actions_repeat(tmp_path):
    train(asked(fields={"action_repeat": 2}), tmp_path / "run")
    last = metrics(tmp_path / "run")[-1]
    assert last["step"] == 2 * last["real/steps"] and STEPS - 16 < last["step"] <= STEPS
    lengths = {line["real/episode_length"] for line in metrics(tmp_path / "run") if "real/episode_length" in line}
    assert lengths == {200.0}  # 100 decisions


@pytest.mark.parametrize("env", ["jax/pendulum", "Pendulum-v1"])
def test_fewer_steps_than_the_prefill_and_an_iteration_are_refused(env, tmp_path):
    # 2 x 16 rows at random, then 2 x 4.
    with pytest.raises(ValueError, match="steps is 39, but the random prefill and the first iteration take 40"):
        train(asked(env, steps=39), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(asked(env, steps=40), tmp_path / "run")
    (line,) = metrics(tmp_path / "run")
    assert line["step"] == 38 and line["update/count"] == 1  # 40 rows, of which 2 are first


@pytest.mark.parametrize(("env", "number"), [("Pendulum-v1", signal.SIGTERM), ("jax/pendulum", signal.SIGINT)])
def test_signals_checkpoint_and_the_same_call_goes_on_to_equal_results(env, number, tmp_path):
    # On the pure environment 1024 steps are a chunk of 32 iterations, so a longer run is stopped.
    what = asked(env, steps=STEPS if env == "Pendulum-v1" else 1200)
    handler = signal.getsignal(number)
    train(what, tmp_path / "whole")
    done, said = train_stopped_at(300, number, what, tmp_path / "stopped")
    assert done.stopped_by == number and 300 <= done.steps < what.steps - 8
    assert (
        checkpoint.latest(tmp_path / "stopped").step == done.steps
        and not (tmp_path / "stopped" / "evaluation.json").exists()
    )
    assert f"stopped at step {done.steps:,}; the same command goes on" in said
    assert signal.getsignal(number) == handler
    again, _ = train_stopped_at(
        done.steps + 100, number, what, tmp_path / "stopped"
    )  # twice: what is restored is saved
    assert again.steps > done.steps
    done, said = train(what, tmp_path / "stopped")
    assert done.stopped_by is None and "going on from step" in said
    same_run(tmp_path / "whole", tmp_path / "stopped")
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("whole", "stopped")]
    assert results[0] == results[1]


def test_a_finished_run_does_nothing_again_and_says_so(copied):
    def made():
        return {
            path.name: path.stat().st_mtime_ns
            for path in copied.rglob("*")
            if path.suffix in (".safetensors", ".json", ".jsonl")
        }

    before = made()
    done, said = train(asked(), copied)
    assert f"complete at step {done.steps:,}; nothing is left to train" in said
    assert made() == before


def test_a_changed_setting_or_field_is_refused_with_both_values(copied):
    for name, given in {
        "seed": {"seed": 7},
        "rate": {"fields": {"rate": 0.5}},
        "width": {"preset": "wide", "fields": {}},
    }.items():
        before = (copied / "config.json").read_bytes()
        changed = asked(**given)
        old, new = {"seed": (0, 7), "rate": (0.01, 0.5), "width": (3, 5)}[name]
        override = ["preset"] if name == "width" else []
        with pytest.raises(ValueError, match=rf"began with {name} {old}, not {new}; .*--override {name}"):
            train(changed, copied, override=override)
        assert (copied / "config.json").read_bytes() == before


def test_an_override_is_recorded_and_goes_on(copied):
    before = checkpoint.latest(copied).step
    done, _ = train(asked(steps=700, fields={"rate": 0.02}), copied, override=["steps", "rate"])
    assert done.steps > before + 80
    config = json.loads((copied / "config.json").read_text())
    (entry,) = config["overrides"]
    assert entry["changed"] == {"steps": [STEPS, 700], "rate": [0.01, 0.02]}
    assert (config["steps"], config["fields"]["rate"]) == (700, 0.02)
    assert settings.read(copied)[0].steps == 700


def test_an_override_that_the_checkpoint_does_not_fit_leaves_the_run_as_it_was(copied):
    with pytest.raises(checkpoint.CheckpointError, match="idle.*float32"):
        train(asked(fields={"width": 4}), copied, override=["width"])
    assert ft.load(copied).step == checkpoint.latest(copied).step
    train(asked(), copied)


def test_an_override_of_nothing_is_refused(copied):
    with pytest.raises(ValueError, match="override: there is no setting or field 'horizen'"):
        train(asked(), copied, override=["horizen"])


def test_what_could_not_begin_is_not_what_the_run_began_with(tmp_path):
    with pytest.raises(ValueError, match="8 rows at once do not fit into a capacity of 6"):
        train(asked("jax/pendulum", fields={"capacity": 12, "prefill": 4, "length": 8}), tmp_path / "run")
    train(asked("jax/pendulum", steps=40), tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"seed": -1}, "must not be negative"),
        ({"seed": 2**32}, "seed is 4294967296; it must be below 2^32"),
        ({"algorithm": "dremer"}, "algorithm is 'dremer'; there are: dreamer"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        asked(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "huge"}, "preset is 'huge'; stub has: cpu, wide"),
        ({"fields": {"depth": 3}}, "stub has no field 'depth'; it has: action_repeat, batch"),
        ({"fields": {"horizon": 2.5}}, "horizon is 2.5; it must be of type int"),
        ({"fields": {"flavour": "sweet"}}, "flavour is 'sweet'; it must be one of plain, sour"),
        ({"fields": {"loud": 1}}, "loud is 1; it must be of type bool"),
    ],
)
def test_fields_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        asked(**given).config()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("steps", "100", "int"),
        ("steps", True, "int"),
        ("seed", 1.0, "int"),
        ("eval_env", 3, "str | None"),
        ("env", None, "str"),
    ],
)
def test_settings_of_another_type_are_refused(name, value, kind):
    # Not through the constructor, which beartype guards in tests and only there.
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; it must be of type {kind}")):
        settings._check_types({name: value}, Settings)


def test_a_whole_number_may_stand_for_a_float():
    assert asked(fields={"rate": 1}).config().rate == 1


def test_processes_that_a_pure_environment_would_ignore_are_refused(tmp_path):
    with pytest.raises(ValueError, match="processes is 2, but a pure environment takes 0"):
        train(asked("jax/pendulum", processes=2), tmp_path)


@pytest.mark.parametrize(
    ("env", "said"),
    [("Pendulum-v9", "Pendulum-v9"), ("CartPole-v1", r"'obs' is .*\(4,\).* but .*\(3,\).* in Pendulum-v1")],
)
def test_an_evaluation_that_could_not_be_is_refused_before_the_training(env, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        train(asked(eval_env=env), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluation_in_another_environment_with_the_same_spaces(copied):
    result = run.evaluate(copied, episodes=2, env="jax/pendulum", greedy=False, seed=11)
    assert (result["env"], result["rule"], result["seeds"]) == ("jax/pendulum", "sampled", [11])
    assert len(result["returns"]["agent"]) == 2
    with pytest.raises(ValueError, match="CartPole-v1: 'obs'"):
        run.evaluate(copied, episodes=2, env="CartPole-v1")


def test_two_processes_cannot_train_into_one_directory(copied):
    with run._locked(copied), pytest.raises(ValueError, match="another process is training into it"):
        train(asked(), copied)
    train(asked(), copied)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "replay"])
def test_a_foreign_directory_is_left_alone(name, tmp_path):
    (tmp_path / name).mkdir() if name != "metrics.jsonl" else (tmp_path / name).write_text("theirs\n")
    with pytest.raises(ValueError, match=f"holds '{name}' but no config.json, so it is not a run"):
        train(asked(), tmp_path)
    assert name != "metrics.jsonl" or (tmp_path / name).read_text() == "theirs\n"


@pytest.mark.parametrize("content", ["{", "[1, 2]", "{}", '{"algorithm": "stub"}', "\x00"])
def test_a_broken_config_is_named(content, copied):
    (copied / "config.json").write_text(content)
    for call in (lambda: train(asked(), copied), lambda: ft.load(copied), lambda: run.evaluate(copied, episodes=1)):
        with pytest.raises(ValueError, match=r"config.json: is not a run's config"):
            call()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_broken_newest_checkpoint_is_passed_over(damage, copied):
    older, newest = sorted((copied / "checkpoints").iterdir())
    path = newest / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:100] if damage == "truncate" else content)
    assert ft.load(copied).step == int(older.name)


def test_a_run_goes_on_from_an_older_checkpoint_to_the_same_end(copied, finished):
    newest = sorted((copied / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").write_text("{}")
    older = checkpoint.latest(copied)
    said = io.StringIO()
    run.evaluate(copied, episodes=1, console=Console(file=said, width=300))
    assert "passed over a broken checkpoint" in said.getvalue() and newest.name in said.getvalue()
    _, said = train(asked(), copied)
    assert f"passed over a broken checkpoint: {newest}" in said and f"going on from step {older.step:,}" in said
    same_run(finished, copied)


def test_nan_from_the_environment_stops_the_run_and_its_last_checkpoint_is_good(tmp_path):
    what = asked("BrittleForTests-v0", steps=400, checkpoint_every=40)
    # The prefill and 32 iterations would pass step 60; chunks of 4 rows checkpoint before it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CHUNK", 4)
        with pytest.raises(EnvironmentFault) as caught:
            train(what, tmp_path / "run")
        assert re.fullmatch(
            r"BrittleForTests-v0: environment 0, episode 0, step 60: observation 'obs' .*", str(caught.value)
        )
        assert ft.load(tmp_path / "run").step == checkpoint.latest(tmp_path / "run").step > 32
        assert all(np.isfinite(x).all() for x in rows(tmp_path / "run").values())
        with pytest.raises(EnvironmentFault, match="step 60"):  # the same again, from the checkpoint
            train(what, tmp_path / "run")


def test_a_loaded_agent_acts_greedily_and_carries(finished):
    agent = ft.load(finished)
    env = make("Pendulum-v1", num=1)
    frame = jax.tree.map(lambda x: x[0], env.reset(seed=5))
    carry = agent.initial()
    for n in range(3):
        before, (carry, decision) = carry, agent(carry, frame, key=jax.random.key(n))
        # Greedy: the key does not matter; the carry does.
        again = agent(before, frame, key=jax.random.key(n + 100))[1]
        assert np.array_equal(decision.action, again.action) and decision.action.shape == (1,)
        # The stub's rule, written out: tanh(W carry), carry = 0.7 carry + tanh(obs), nothing carried at a first row.
        want = np.tanh(
            np.asarray(agent.policy.weight) @ (0.7 * np.asarray(before) * (n > 0) + np.tanh(frame.obs["obs"]))
        )
        np.testing.assert_allclose(decision.action, want, rtol=1e-5, atol=1e-6)
        env.send(np.asarray(decision.action)[None])
        frame = jax.tree.map(lambda x: x[0], env.recv())
    sampled = ft.load(finished, greedy=False)
    actions = [np.asarray(sampled(carry, frame, key=jax.random.key(n))[1].action) for n in range(2)]
    assert not np.array_equal(*actions)
    assert (agent.step, agent.spec.name) == (checkpoint.latest(finished).step, "Pendulum-v1")


def test_rollout_equals_stepping_the_model(finished):
    model = ft.load(finished).model
    obs = {"obs": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
    actions = np.random.default_rng(1).uniform(-1, 1, (4 - 1 + 6, 1)).astype(np.float32)
    outcome = ft.rollout(model, obs, actions)
    assert outcome.obs["obs"].shape == (6, 3) and outcome.reward.shape == outcome.discount.shape == (6,)
    key, latent = jax.random.key(3), model.initial()
    for t in range(4):
        latent = model.observe(
            latent, actions[t - 1] if t else np.zeros(1, np.float32), {"obs": obs["obs"][t]}, t == 0, key=key
        )
    for h in range(6):
        latent, expected = model.imagine(latent, actions[3 + h], key=key)
        np.testing.assert_allclose(outcome.obs["obs"][h], expected.obs["obs"], rtol=1e-5)
    with pytest.raises(ValueError, match="4 observations need at least 4 actions, got 3"):
        ft.rollout(model, obs, actions[:3])


def test_load_refuses_what_is_no_run(tmp_path, copied):
    with pytest.raises(ValueError, match="is not a run"):
        ft.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a run"):
        ft.load(tmp_path / "file")
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        ft.load(copied)


def test_a_step_has_one_line_where_an_iteration_is_resets_only(tmp_path):
    # Episodes end after 5 steps in all environments at once: every sixth iteration of one tick is resets only.
    what = asked("ShortForTests-v0", steps=120, fields={"ticks": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CHUNK", 1)
        train(what, tmp_path / "run")
    lines = metrics(tmp_path / "run")  # which asserts that steps increase
    assert {b["step"] - a["step"] for a, b in zip(lines, lines[1:], strict=False)} == {2}


def test_seeds_differ_and_agree(tmp_path, finished):
    train(asked(seed=1), tmp_path / "other")
    assert state(tmp_path / "other")["state.safetensors"] != state(finished)["state.safetensors"]
    what = dataclasses.replace(asked(), checkpoint_every=10**6)
    np.random.seed(3)
    train(what, tmp_path / "same")
    same_run(finished, tmp_path / "same")
