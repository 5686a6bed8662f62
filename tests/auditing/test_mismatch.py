import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from forethought.auditing.asked import Asked, rows
from forethought.auditing.depth import split
from forethought.auditing.mismatch import agreement, correlations, measure, metrics, relevance
from forethought.auditing.reality import PureReality
from forethought.auditing.subject import ModelSubject
from forethought.auditing.trial import attempt, quantities
from forethought.collect import RandomPolicy
from forethought.envs.trial import Controller, Hover
from forethought.models.oracle import Oracle
from forethought.protocols import ValuedModel

ENV = Hover()
RANDOM = RandomPolicy(ENV.spec.action)


class Valued(Oracle, ValuedModel):
    """Knows what a state is worth: 3 for each unit of position[0], -1 for each of velocity[1], nothing for the rest."""

    def value(self, latent):
        return 3.0 * latent.position[0] - latent.velocity[1]


class Worthless(Oracle, ValuedModel):
    def value(self, latent):
        return jnp.zeros(())


class Displaced(Valued):
    """Wrong by 1 about position[1], of which the value knows nothing."""

    def imagine(self, latent, action, *, key):
        latent, outcome = super().imagine(latent, action, key=key)
        moved = outcome.obs["position"] + jnp.array([0.0, 1.0])
        return latent, outcome.__class__(**(vars(outcome) | {"obs": {**outcome.obs, "position": moved}}))


def compared(model):
    reality, subject = PureReality(ENV), ModelSubject(model)
    played = reality.play(RANDOM, 6, seed=3)
    one = attempt(subject, subject.filter(played.rows, seed=4), reality, played, 4, count=24, samples=16, seed=5)
    return one, quantities(ENV.spec, one, rows([played]))


def test_the_value_says_which_elements_matter():
    one, found = compared(Valued(ENV))
    table = relevance(Valued(ENV), ENV.spec, one, found)
    assert table is not None and table["by"] == "value"
    scale = {q.name: q.scale for q in found}
    first, second = 3 * scale["position"][0], scale["velocity"][1]
    assert table["weight"] == pytest.approx(
        {"position[0]": first / (first + second), "velocity[1]": second / (first + second),
         "position[1]": 0, "velocity[0]": 0}
    )  # fmt: skip
    assert relevance(Worthless(ENV), ENV.spec, one, found) is None


def test_errors_on_what_matters_are_told_apart_from_the_others():
    one, found = compared(Displaced(ENV))
    table = relevance(Displaced(ENV), ENV.spec, one, found)
    assert table is not None
    (position,) = (q for q in found if q.name == "position")
    # Of the two others one is wrong by 1.
    assert table["others"][0] == pytest.approx(1 / position.scale[1] ** 2 / 2, rel=0.15)
    assert abs(table["relevant"][0]) < table["others"][0] / 10


def test_without_a_value_the_reward_of_the_next_steps_says_it():
    one, found = compared(Oracle(ENV))
    table = relevance(Oracle(ENV), ENV.spec, one, found)
    assert table is not None and table["by"] == "reward of 5 steps"
    assert sum(table["weight"].values()) == pytest.approx(1)
    # The reward is exp(-|x|^2): in five steps of 0.25 the velocity moves it by less than the position does.
    assert {name.split("[")[0] for name in list(table["weight"])[:2]} == {"position"}


def test_metrics_keep_one_step_and_many_apart():
    one, found = compared(Displaced(ENV))
    told = metrics(found, one)
    assert set(told) == {f"error of {what}, {when}" for what in ("obs", "reward") for when in ("one step", "4 steps")}
    each = [split(q, np.arange(2))["excess"][one.valid[:, 0], 0].mean() for q in found if q.name != "reward"]
    assert told["error of obs, one step"] == pytest.approx(np.mean(each))
    assert abs(told["error of reward, one step"]) < 0.2 < told["error of obs, one step"]


def test_correlations_over_checkpoints_against_scipy():
    errors, returns = [0.5, 0.2, 0.3, 0.1], [10.0, 20.0, 40.0, 30.0]
    told = {
        str(i): {"error": e, "same": 1.0, "return": r} for i, (e, r) in enumerate(zip(errors, returns, strict=True))
    }
    found = correlations(told)
    assert found["names"] == ["0", "1", "2", "3"] and found["return"] == returns and found["metrics"]["error"] == errors
    assert found["rank_correlation"]["error"] == pytest.approx(scipy.stats.spearmanr(errors, returns).statistic)
    assert found["rank_correlation"]["same"] is None


def test_codes_that_are_turned_agree_by_cka_and_not_by_cosine():
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(400, 3))
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    same, turned = agreement(codes, codes), agreement(codes, codes @ turn)
    assert same["cosine"] == pytest.approx(1) and same["cka"] == pytest.approx(1)
    assert turned["cka"] == pytest.approx(1, abs=1e-5) and turned["cosine"] < 0.9
    np.testing.assert_allclose(turned["angles"], 0, atol=1e-3)


def test_checkpoints_are_measured_from_three_on_and_codes_where_they_are():
    reality = PureReality(ENV)
    asked = Asked(ModelSubject(Valued(ENV)), reality, 4, 24, 4, 7)
    played, latents = asked.play(RANDOM, 6)
    one = asked.attempt(played, latents)
    found = quantities(ENV.spec, one, rows([played]))
    pair = (Controller(ENV.spec.name), Valued(ENV))
    worse = (RANDOM, Displaced(ENV))
    ask = lambda checkpoints, codes: measure(  # noqa: E731
        asked, played, one, found, checkpoints=checkpoints, codes=codes, episodes=4
    )
    few = ask({"a": worse, "b": pair}, None)
    assert few["relevance"] is not None and few["checkpoints"] is None and few["codes"] is None
    seen = lambda step: (step.obs["position"], step.obs["position"])  # noqa: E731
    all_ = ask({"a": worse, "b": worse, "c": pair}, seen)
    assert all_["codes"]["cka"] == pytest.approx(1)
    errors = all_["checkpoints"]["metrics"]["error of obs, one step"]
    assert errors[0] == errors[1] > 10 * abs(errors[2])
    assert all_["checkpoints"]["return"][2] > all_["checkpoints"]["return"][0]
