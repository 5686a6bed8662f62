"""Action bounds by hand, discount rules by hand and by quadrature, and descriptions that come back as they were."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

from forethought.ops.returns import smdp_return
from forethought.types import (
    Box,
    Discrete,
    MultiDiscrete,
    PerStep,
    PerTime,
    Spec,
    TimeStep,
    check_unit,
    describe,
    spec_from,
)


def happened(reward=0.0, discount=1.0, duration=1.0, reward_delay=0.0):
    values = np.broadcast_arrays(reward, discount, duration, reward_delay)
    values = [jnp.asarray(x, jnp.float32) for x in values]
    no = jnp.zeros(values[0].shape, bool)
    return TimeStep({}, values[0], values[1], no, no, values[2], values[3])


def test_each_dimension_has_its_own_bounds():
    """F32: Box([-2, 0], [2, 10])."""
    box = Box((2,), low=np.array([-2, 0], np.float32), high=np.array([2, 10], np.float32))
    for action, native in (([-1, -1], [-2, 0]), ([0, 0], [0, 5]), ([0.5, -0.5], [1, 2.5]), ([1, 1], [2, 10])):
        np.testing.assert_allclose(box.native(np.array(action, np.float32)), native)
        np.testing.assert_allclose(jax.jit(box.native)(jnp.array(action, jnp.float32)), native)
    assert box.bounded


def test_a_dimension_without_bounds_passes_through():
    box = Box((3,), low=np.array([-np.inf, -4, 0]), high=np.array([np.inf, 2, np.inf]))
    np.testing.assert_array_equal(
        box.native(np.array([1e9, 0.5, -7], np.float32)), np.array([1e9, 0.5, -7], np.float32)
    )
    np.testing.assert_array_equal(Box((2,)).native(np.array([-3.5, 0.25], np.float32)), [-3.5, 0.25])
    assert not box.bounded and not Box((2,)).bounded


def test_scalar_bounds_hold_for_every_element():
    box = Box((2, 2), low=-3.0, high=1.0)
    np.testing.assert_allclose(box.native(np.array([[-1, 0], [0.5, 1]], np.float32)), [[-3, -1], [0, 1]])
    # Leading axes are a batch.
    assert box.native(np.zeros((5, 2, 2), np.float32)).shape == (5, 2, 2)


def test_per_step_by_hand():
    reward, factor = PerStep(0.9)(happened([5, 1, 2, 3], [1, 0, -1, 0.5], [3, 1, 2, 1], [2, 0, 0, 1]))
    np.testing.assert_allclose(reward, [5 * 0.81, 1, 2, 2.7], rtol=1e-6)
    np.testing.assert_allclose(factor, [0.729, 0, -0.81, 0.45], rtol=1e-6)


def test_per_time_by_hand():
    """rate ln 2: a unit of time halves."""
    reward, factor = PerTime(float(np.log(2)))(happened([8, 1], [1, -1], [3, 0.5], [2, 0]))
    np.testing.assert_allclose(reward, [2, 1], rtol=1e-6)
    np.testing.assert_allclose(factor, [1 / 8, -np.sqrt(0.5)], rtol=1e-6)


def test_a_rule_may_be_given_per_any_span():
    """gamma .9 per quarter second is .6561 per second; at whole durations PerTime is PerStep."""
    rule = PerTime.of(0.9, 0.25)
    np.testing.assert_allclose(rule(happened(duration=[0.25, 1.0]))[1], [0.9, 0.6561], rtol=1e-6)
    steps = happened([1, 2], [1, 0.5], [1, 4], [0, 3])
    pairs = zip(PerTime.of(0.8, 1.0)(steps), PerStep(0.8)(steps), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("delayed", [False, True])
def test_continuous_time_by_quadrature(delayed):
    """A reward that flows at sin(t)^2 for 6 s, discounted at .3 per s, cut into decisions of uneven length.

    What a decision earns is either discounted within it by the environment (delay 0), or paid at once at the
    moment that is worth the same."""
    rate, cuts = 0.3, np.array([0, 0.4, 1.7, 2.0, 4.5, 6.0])
    discounted = lambda a, b: scipy.integrate.quad(lambda t: np.exp(-rate * (t - a)) * np.sin(t) ** 2, a, b)[0]  # noqa: E731
    paid = np.array([discounted(a, b) for a, b in zip(cuts, cuts[1:], strict=False)])
    delay = np.zeros(5)
    if delayed:
        whole = np.array([scipy.integrate.quad(lambda t: np.sin(t) ** 2, a, b)[0] for a, b in zip(cuts, cuts[1:])])  # noqa: B905
        paid, delay = whole, np.log(whole / paid) / rate
        assert (delay > 0).all() and (delay < np.diff(cuts)).all()
    reward, factor = PerTime(rate)(happened(paid, np.ones(5), np.diff(cuts), delay))
    value, total = smdp_return(reward, factor, jnp.array(5))
    assert value == pytest.approx(discounted(0, 6), rel=1e-5)
    assert total == pytest.approx(1 - scipy.integrate.quad(lambda t: rate * np.exp(-rate * t), 0, 6)[0], rel=1e-5)


def spec(unit="decision"):
    obs = {
        "image": Box((2, 2), "uint8", np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8)),
        "free": Box((3,)),
        "third": Box((), "float32", -1 / 3, np.inf),
        "digit": Discrete(7),
        "digits": MultiDiscrete((2, 5)),
    }
    low = np.array([-0.1, -np.inf], np.float32)
    return Spec("some/env", obs, Box((2,), low=low, high=-low), unit, duration=None, time_limit=50)


@pytest.mark.parametrize("rule", [PerStep(0.9), PerTime(0.1, "decision")])
def test_a_rule_in_another_unit_is_refused(rule):
    check_unit(rule, spec())
    with pytest.raises(ValueError, match="some/env: .*'decision'.*'simulator step'"):
        check_unit(rule, spec("simulator step"))


def test_a_description_passes_through_json():
    back = spec_from(json.loads(json.dumps(describe(spec()), allow_nan=False)))
    assert (back.name, back.unit, back.duration, back.time_limit) == ("some/env", "decision", None, 50)
    assert list(back.obs) == list(spec().obs)
    for found, given in zip([*back.obs.values(), back.action], [*spec().obs.values(), spec().action], strict=True):
        assert type(found) is type(given) and found.shape == given.shape and found.dtype == given.dtype
        if isinstance(given, Box):
            for bound in ("low", "high"):
                expected = np.broadcast_to(np.asarray(getattr(given, bound), given.dtype), given.shape)
                np.testing.assert_array_equal(getattr(found, bound), expected)
        else:
            assert found == given
    assert describe(back) == describe(spec_from(describe(back)))


def test_a_description_without_a_field_is_refused():
    with pytest.raises(KeyError, match="action"):
        spec_from({key: value for key, value in describe(spec()).items() if key != "action"})


@pytest.mark.parametrize("space", [Box((2, 3)), Discrete(4), Box((), "float32", -1.0, 1.0)])
def test_void_actions_are_zeros(space):
    void = space.void()
    assert void.shape == space.shape and void.dtype == space.dtype and not void.any()


def test_rest_is_what_the_environment_takes_for_zero():
    """(0 - middle) / half: -(5 - 2) / 7 = -3/7 in [-2, 5]; the nearest bound where 0 is outside; 0 where unbounded."""
    box = Box((4,), low=np.array([-2, 1, -4, -np.inf]), high=np.array([5, 3, -2, np.inf]))
    np.testing.assert_allclose(box.rest(), [-3 / 7, -1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(box.native(box.rest())[:1], [0], atol=1e-6)
