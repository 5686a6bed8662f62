import json

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import data
from forethought.auditing.audit import audit
from forethought.auditing.exploitation import Budget
from forethought.auditing.findings import IMAGINATION, PLANNING, RANKING
from forethought.auditing.subject import HostModel
from forethought.collect import RandomPolicy
from forethought.envs import make
from forethought.envs.trial import Controller, Hover
from forethought.models.members import ensemble
from forethought.models.oracle import Oracle
from forethought.models.planted import planted
from forethought.protocols import AbstractPolicy
from forethought.types import Decision

SMALL = {
    "episodes": 6,
    "starts": 48,
    "samples": 8,
    "horizon": 6,
    "budget": Budget(starts=8, candidates=8, iterations=3),
}


def test_an_exact_model_passes_every_use_and_the_audit_is_json():
    env = Hover()
    enough = SMALL | {
        "episodes": 12,
        "starts": 96,
        "samples": 64,
    }  # to show that it holds, not only that nothing is wrong
    found = audit(Oracle(env), env, policies={"controller": Controller(env.spec.name)}, **enough)
    assert found.verdict["status"] == "pass" and not found.kinds
    assert set(found.missing) == {"drift", "provenance"}
    assert list(found.sections["error_by_depth"]["policies"]) == ["controller", "random"]
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == found.as_dict()
    again = audit(Oracle(env), env, policies={"controller": Controller(env.spec.name)}, **enough)
    assert again.as_dict() == found.as_dict()


@pytest.mark.parametrize(
    "fault, kind",
    [("action_sign", "action_sign"), ("overconfident", "no_spread"), ("identical_members", "identical_members")],
)
def test_planted_faults_are_named(fault, kind):
    env = Hover()
    magnitude = 5.0 if fault == "identical_members" else 1.0
    found = audit(planted(env, fault, magnitude), env, policies={"controller": Controller(env.spec.name)}, **SMALL)
    assert kind in found.kinds and found.verdict["status"] == "fail" and not found.passed


def test_an_ensemble_is_asked_member_by_member_and_one_model_is_not():
    env = Hover()
    table = audit(ensemble(env), env, **SMALL).sections["calibration"]["members"]
    assert table is not None and (table["members"], table["copies"]) == (5, 0)
    assert audit(Oracle(env), env, **SMALL).sections["calibration"]["members"] is None


# CartPole's equations of motion (Barto, Sutton & Anderson 1983), as Gymnasium integrates them.
def cartpole(state, force, sin, cos):
    x, v, angle, rate = (state[..., i] for i in range(4))
    push = (force + 0.05 * rate**2 * sin(angle)) / 1.1
    turn = (9.8 * sin(angle) - cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * cos(angle) ** 2 / 1.1))
    slide = push - 0.05 * turn * cos(angle) / 1.1
    return x + 0.02 * v, v + 0.02 * slide, angle + 0.02 * rate, rate + 0.02 * turn


def numpy_model():
    def step(latent, action, rng):
        after = np.stack(cartpole(latent, np.where(action == 1, 10.0, -10.0), np.sin, np.cos), -1)
        going = (np.abs(after[:, 0]) <= 2.4) & (np.abs(after[:, 2]) <= 12 * np.pi / 180)
        seen = {
            "obs": after.astype(np.float32),
        }
        return after, {"obs": seen, "reward": np.ones(len(after)), "discount": going.astype(float)}

    return HostModel(
        initial=lambda n: np.zeros((n, 4)),
        observe=lambda latent, action, obs, first: obs["obs"].astype(np.float64),
        next=step,
    )


def torch_model(scale=1.0):
    torch = pytest.importorskip("torch")

    def step(latent, action, rng):
        force = torch.where(torch.as_tensor(action) == 1, 10.0, -10.0) * scale
        after = torch.stack(cartpole(torch.as_tensor(latent), force, torch.sin, torch.cos), -1)
        going = (after[:, 0].abs() <= 2.4) & (after[:, 2].abs() <= 12 * torch.pi / 180)
        return after.numpy(), {
            "obs": {"obs": after.float().numpy()},
            "reward": np.ones(len(after)),
            "discount": going.double().numpy(),
        }

    return HostModel(
        initial=lambda n: np.zeros((n, 4)),
        observe=lambda latent, action, obs, first: obs["obs"].astype(np.float64),
        next=step,
    )


@pytest.mark.parametrize("model", [numpy_model, torch_model])
def test_somebody_elses_exact_model_passes_against_a_host_environment(model):
    env = lambda num: make("CartPole-v1", num=num)  # noqa: E731
    found = audit(model(), env, **SMALL)
    assert found.about["reality"] == "snapshots"
    assert (
        not found.kinds
        and found.verdict["uses"][PLANNING]["status"] == found.verdict["uses"][IMAGINATION]["status"] == "pass"
    )
    assert max(abs(gap) for gap in found.sections["exploitation"]["gap"]) == 0.0
    assert found.sections["mismatch"]["relevance"] is None  # it has no gradient that the audit could take


def recorded(episodes=12):
    """Episodes of random actions in Gymnasium's terms."""
    env, made = gymnasium.make("CartPole-v1"), []
    env.action_space.seed(5)
    for seed in range(episodes):
        rows = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
        rows["observations"].append(env.reset(seed=seed)[0])
        while not (rows["terminations"] and (rows["terminations"][-1] or rows["truncations"][-1])):
            action = env.action_space.sample()
            obs, reward, ended, cut, _ = env.step(action)
            for name, value in zip(rows, (obs, action, reward, ended, cut), strict=True):
                rows[name].append(value)
        made.append(
            rows | {name: np.array(rows[name]) for name in ("actions", "rewards", "terminations", "truncations")}
        )
    return env, made


def test_recorded_episodes_alone_say_what_they_can_and_nothing_is_guessed():
    env, made = recorded()
    episodes, spec = data.from_gymnasium(env.observation_space, env.action_space, made)
    good = audit(torch_model(), data=episodes, spec=spec, **SMALL)
    assert good.about["reality"] == "recorded" and not good.kinds
    assert set(good.missing) == {"exploitation", "ranking", "support", "provenance"}
    status = {use: v["status"] for use, v in good.verdict["uses"].items()}
    assert (status[IMAGINATION], status[PLANNING], status[RANKING]) == ("pass", "not measured", "not measured")
    weak = audit(torch_model(-1.0), data=episodes, spec=spec, **SMALL | {"episodes": 12, "starts": 96})
    assert "action_sign" in weak.kinds and weak.verdict["status"] == "fail"


def test_a_minari_dataset_is_audited(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    _, made = recorded(10)
    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=i, seed=i, observations=list(e["observations"]), actions=list(e["actions"]), rewards=list(e["rewards"]),
            terminations=list(e["terminations"]), truncations=list(e["truncations"]), infos={},
        )
        for i, e in enumerate(made)
    ]  # fmt: skip
    env = gymnasium.make("CartPole-v1")
    with pytest.warns(UserWarning):  # that nobody is named as its author
        minari.create_dataset_from_buffers("test/cartpole-v0", buffers, env=env)
    episodes, spec = data.from_minari("test/cartpole-v0")
    ours, _ = data.from_gymnasium(env.observation_space, env.action_space, made)
    assert len(episodes) == 10 and spec.obs["obs"].shape == (4,)
    for a, b in zip(episodes, ours, strict=True):
        jax.tree.map(
            np.testing.assert_array_equal,
            (a.time_step.obs, a.action, a.time_step.discount),
            (b.time_step.obs, b.action, b.time_step.discount),
        )
    assert not audit(numpy_model(), data=episodes, spec=spec, **SMALL).kinds
    with pytest.raises(ValueError, match="is no Minari dataset on this machine"):
        data.from_minari("test/nothing-v0")


def test_bad_input_is_refused_in_one_line():
    env = Hover()
    for arguments, match in (
        (dict(env=None), "give an environment, or recorded episodes"),
        (dict(env=env, uses=("flying",)), "'flying' is no use; there are planning"),
        (dict(env=env, episodes=1), "episodes 1"),
    ):
        with pytest.raises(ValueError, match=match):
            audit(Oracle(env), **arguments)
    with pytest.raises(ValueError, match="'rewards' is none of obs, reward, discount"):
        wrong = HostModel(
            lambda n: np.zeros(n), lambda *a: a[0], lambda latent, action, rng: (latent, {"rewards": latent})
        )
        audit(wrong, env, policies={"random": RandomPolicy(env.spec.action)}, **SMALL)


class Cliff(Hover):
    """Hover that ends at once where it is pushed hard to the right."""

    def step(self, state, action, *, key):
        state, step = super().step(state, action, key=key)
        hard = action[0] > 0.99
        ended = jnp.where(hard, 0.0, step.discount), step.last | hard
        return state, eqx.tree_at(lambda s: (s.discount, s.last), step, ended)


class Right(AbstractPolicy):
    def initial(self):
        return None

    def __call__(self, carry, time_step, *, key):
        return None, Decision(jnp.ones(2), jnp.zeros(()))


def test_a_policy_whose_episodes_have_one_step_is_ranked_but_not_imagined_from():
    env = Cliff()
    found = audit(Oracle(env), env, policies={"controller": Controller("jax/hover"), "right": Right()}, **SMALL)
    assert list(found.sections["error_by_depth"]["policies"]) == ["controller", "random"]
    assert "right" in found.sections["ranking"]["policies"]
    with pytest.raises(ValueError, match="jax/hover: no episode of 'right' has more than one step"):
        audit(Oracle(env), env, policies={"right": Right()}, **SMALL)
