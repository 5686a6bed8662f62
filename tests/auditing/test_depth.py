import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.auditing.depth import CONTEXT, as_lists, error_by_depth
from forethought.protocols import AbstractWorldModel
from forethought.types import Box, Discrete, MultiDiscrete, Outcome, Spec, Step, TimeStep

SPEC = Spec(
    "ramp",
    {"x": Box((2,)), "n": Discrete(7), "pair": MultiDiscrete((9, 9))},
    Box((1,), low=-1.0, high=1.0),
    unit="decision",
)
SLOPE = np.array([1.0, -2.0], np.float32)


class Ramp(AbstractWorldModel):
    """The exact model of `episode` below, but for a bias that every imagined step adds to x, and so on."""

    bias: float = 0.0
    reward_bias: float = 0.0
    stuck: bool = False
    """Predicts that n and the pair stay."""
    breaks_at: float = 1e9
    """x beyond which it predicts infinity."""

    def initial(self):
        return jnp.zeros(2), jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.int32)

    def observe(self, latent, action, obs, first, *, key):
        return obs["x"], obs["n"], obs["pair"]

    def imagine(self, latent, action, *, key):
        x, n, pair = latent
        x = x + SLOPE * action + self.bias
        n, pair = (n, pair) if self.stuck else ((n + 1) % 7, (pair + jnp.array([1, 0])) % 9)
        one = jnp.ones(())
        shown = jnp.where(jnp.abs(x) > self.breaks_at, jnp.inf, x)
        return (x, n, pair), Outcome({"x": shown, "n": n, "pair": pair}, x[0] + self.reward_bias, one, one, 0 * one)


def episode(decisions: int, *, start: float = 0.0, action: float = 0.5, terminates: bool = False) -> Step:
    """x' = x + SLOPE a, n' = n + 1 mod 7, pair' = pair + [1, 0] mod 9, reward x'[0]."""
    t = np.arange(decisions + 1)
    x = (np.float32(start) + SLOPE * action * t[:, None]).astype(np.float32)
    pair = np.stack([t % 9, np.full_like(t, 4)], -1).astype(np.int32)
    zero, last = np.zeros(decisions + 1, np.float32), t == decisions
    step = TimeStep(
        {"x": x, "n": (t % 7).astype(np.int32), "pair": pair},
        np.where(t == 0, 0, x[:, 0]).astype(np.float32),
        np.where(last & terminates, 0, 1).astype(np.float32), t == 0, last, zero + 1, zero,
    )  # fmt: skip
    actions = np.where(last, 0, action).astype(np.float32)[:, None]
    count = np.zeros(decisions + 1, np.int32)
    return Step(step, actions, None, count, count)


def measure(model, episodes, horizon, **given):
    return error_by_depth(model, SPEC, episodes, horizon, key=jax.random.key(0), **given)


def test_an_exact_model_has_no_error_at_any_depth():
    found = measure(Ramp(), [episode(40), episode(25, start=3, action=-0.25)], 12)
    assert found["depth"] == list(range(1, 13)) and found["episodes"] == 2 and found["context"] == CONTEXT == 5
    for table in (*found["keys"].values(), found["reward"], found["discount"]):
        assert table["model"] == table["model_sem"] == [0.0] * 12


def test_a_constant_bias_per_step_grows_as_it_has_to():
    found = measure(Ramp(bias=0.25, reward_bias=0.5), [episode(40), episode(30)], 8)
    # After k steps x is off by 0.25 k in both elements; the reward, x[0], by 0.25 k + 0.5.
    np.testing.assert_allclose(found["keys"]["x"]["model"], [(0.25 * k) ** 2 for k in range(1, 9)], rtol=1e-5)
    np.testing.assert_allclose(found["reward"]["model"], [(0.25 * k + 0.5) ** 2 for k in range(1, 9)], rtol=1e-5)


def test_baselines_by_hand():
    # 8 decisions, 9 rows, horizon 4: one window at most from row 0 (context rows 0..4, imagined 5..8).
    found = measure(Ramp(), [episode(8)], 4, windows=1)
    assert found["windows"] == 1
    # Copying row 4 is off by k a SLOPE: ((0.5 k)^2 + (1.0 k)^2) / 2 = 0.625 k^2.
    np.testing.assert_allclose(found["keys"]["x"]["copy last"], [0.625 * k**2 for k in (1, 2, 3, 4)], rtol=1e-6)
    # Rows 1..8 have x[0] = 0.5 t, mean 2.25 (without row 0), and x[1] = -t, mean -4.5. Row 5: (0.25^2 + 0.5^2) / 2.
    np.testing.assert_allclose(
        found["keys"]["x"]["mean"], [((0.5 * t - 2.25) ** 2 + (t - 4.5) ** 2) / 2 for t in (5, 6, 7, 8)], rtol=1e-6
    )
    # Rewards are x[0] of rows 1..8; the void reward of row 0 is no reward and not in the mean.
    np.testing.assert_allclose(found["reward"]["mean"], [(0.5 * t - 2.25) ** 2 for t in (5, 6, 7, 8)], rtol=1e-6)
    np.testing.assert_allclose(found["reward"]["copy last"], [(0.5 * k) ** 2 for k in (1, 2, 3, 4)], rtol=1e-6)
    # n is never what it was 1..4 steps ago; rows 1..8 hold 1 twice (t = 1, 8), so 1 is predicted: right at t = 8 only.
    assert found["keys"]["n"]["copy last"] == [1.0] * 4
    assert found["keys"]["n"]["mean"] == [1.0, 1.0, 1.0, 0.0]
    # The pair's second element stays: half of it is right. First elements 1..8 once each, so 1 is predicted: wrong.
    assert found["keys"]["pair"]["copy last"] == [0.5] * 4 == found["keys"]["pair"]["mean"]
    # One episode has no standard error.
    assert found["keys"]["x"]["model_sem"] == [None] * 4


def test_discrete_keys_count_wrong_elements():
    found = measure(Ramp(stuck=True), [episode(20)], 8)
    # n is right again after 7 steps; of the pair one of two elements moves, and is back after 9.
    assert found["keys"]["n"]["model"] == [1.0] * 6 + [0.0, 1.0]
    assert found["keys"]["pair"]["model"] == [0.5] * 8


def test_depths_beyond_an_episode_do_not_count():
    # 7 decisions, 8 rows: 3 imagined rows. The long one is exact too, the short one is off by 0.5 in its reward.
    found = measure(Ramp(bias=0.25), [episode(7)], 6)
    np.testing.assert_allclose(found["keys"]["x"]["model"][:3], [(0.25 * k) ** 2 for k in (1, 2, 3)], rtol=1e-5)
    assert found["keys"]["x"]["model"][3:] == found["reward"]["mean"][3:] == [None] * 3
    # Beside a long one, deep rows are the long one's alone.
    both = measure(Ramp(bias=0.25), [episode(7), episode(30)], 6)
    assert both["keys"]["x"]["model_sem"][3:] == [None] * 3 and None not in both["keys"]["x"]["model"]
    assert both["keys"]["x"]["model_sem"][:3] == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_standard_error_is_over_episodes():
    # Discount 1 is predicted; the first episode terminates at its row 6, the second (and longer) at its row 8.
    found = measure(Ramp(), [episode(6, terminates=True), episode(8, terminates=True)], 4, windows=1)
    # Depth k is row 4 + k: depth 2 is wrong in the first only: mean 1/2, sd of {1, 0} = sqrt(1/2), over sqrt(2): 1/2.
    assert found["discount"]["model"] == [0.0, 0.5, 0.0, 1.0]
    assert found["discount"]["model_sem"] == [0.0, 0.5, None, None]


def test_every_episode_weighs_the_same_however_many_windows_it_has():
    episodes = [episode(200), episode(9, action=1.0)]
    found = measure(Ramp(), episodes, 4)
    assert found["windows"] > 6
    # Copying is off by 0.625 k^2 with action 0.5 and by 2.5 k^2 with action 1: their mean is 1.5625 k^2.
    np.testing.assert_allclose(found["keys"]["x"]["copy last"], [1.5625 * k**2 for k in (1, 2, 3, 4)], rtol=1e-4)


def test_windows_are_spread_over_the_episode_and_reach_its_end():
    # x[1] is -t, so this model is wrong only in the last rows of 100 decisions: seen if windows reach there.
    found = measure(Ramp(breaks_at=96.5), [episode(100)], 4)
    assert None in found["keys"]["x"]["model"]
    assert None not in measure(Ramp(breaks_at=200), [episode(100)], 4)["keys"]["x"]["model"]


def test_a_prediction_that_is_not_finite_makes_no_error_look_smaller():
    # The second episode's x leaves 30 at once; dropping it would leave the first one's zeros.
    found = measure(Ramp(breaks_at=30), [episode(12), episode(12, start=40)], 4, windows=1)
    assert found["keys"]["x"]["model"] == found["keys"]["x"]["model_sem"] == [None] * 4
    json.dumps(found, allow_nan=False)


def test_short_episodes_are_left_out_and_alone_refused():
    assert measure(Ramp(), [episode(4), episode(20)], 3)["episodes"] == 1  # 5 rows: nothing to imagine
    with pytest.raises(ValueError, match="no episode is longer than the context of 5 rows"):
        measure(Ramp(), [episode(4), episode(2)], 3)


def test_lists_hold_no_number_that_json_has_not():
    tree = {"a": np.array([1.5, np.inf, np.nan], np.float32), "b": [np.array([[1, 2]]), np.array(True)]}
    assert as_lists(tree) == {"a": [1.5, None, None], "b": [[[1, 2]], True]}
    assert type(as_lists(np.array([np.nan, 2], np.float32))[1]) is float
