import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import SLOPE, SPEC, episode, line

from forethought.auditing.reality import PureReality, padded
from forethought.auditing.subject import HostModel, ModelSubject
from forethought.auditing.values import Dream, LinearPolicy, dream, ranking, real_returns, sought, start, taken
from forethought.envs import make
from forethought.envs.tabular import Tabular
from forethought.models.oracle import Oracle
from forethought.types import TimeStep


def by_state(spec, actions):
    """The linear policy that does actions[s] in state s of one discrete key."""
    weight = np.zeros((spec.action.n, len(actions) + 1))
    weight[np.asarray(actions), np.arange(len(actions))] = 1
    size = len(actions)
    return LinearPolicy(jnp.asarray(weight, jnp.float32), jnp.zeros(size), jnp.ones(size), spec)


def promised_and_real(env, policy, horizon, episodes=3):
    reality, subject = PureReality(env), ModelSubject(Oracle(env))
    played = reality.play(policy, episodes, seed=0)
    latent = jax.tree.map(lambda x: x[:, 0], subject.filter(played.rows, seed=0))
    dreamt = dream(subject, latent, start(played), policy, horizon, seed=0)
    return dreamt.returns(taken(played, horizon)), real_returns(played, horizon), dreamt


@pytest.mark.parametrize("horizon, total", [(6, 0.0), (7, 1.0), (12, 1.0)])
def test_a_dream_of_the_corridor_brings_what_the_corridor_does(horizon, total):
    # From the first of 8 states the last is seven steps to the right; nothing is paid after it.
    env = make("jax/corridor")
    promised, real, dreamt = promised_and_real(env, by_state(env.spec, [1] * 8), horizon)
    assert promised.tolist() == real.tolist() == [total] * 3
    assert dreamt.obs["state"][0].tolist() == [min(t, 7) for t in range(1, horizon + 1)]
    assert dreamt.going[1].tolist() == [1.0 if t < 7 else 0.0 for t in range(horizon)]


def test_a_dream_stops_where_the_episode_was_only_cut():
    # Seven states in a ring, from which the action leads 1 or 3 on; the reward is the state arrived at. Cut after 5.
    arrives = np.array([[(s + 1) % 7, (s + 3) % 7] for s in range(7)])
    transition = np.eye(7)[arrives]
    env = Tabular(transition, transition * np.arange(7.0), start=np.eye(7)[2], terminal=np.zeros(7, bool), time_limit=5)
    actions = [0, 1, 1, 0, 1, 1, 0]
    # 2 -1-> 5 -1-> 1 -1-> 4 -1-> 0 -0-> 1, and 4 again if it went on.
    for horizon, total in ((2, 5 + 1), (5, 5 + 1 + 4 + 0 + 1), (9, 5 + 1 + 4 + 0 + 1)):
        promised, real, _ = promised_and_real(env, by_state(env.spec, actions), horizon)
        assert promised.tolist() == real.tolist() == [total] * 3


def test_a_dream_weighs_by_the_chance_of_getting_there_and_needs_what_the_policy_sees():
    played = padded([episode([0.5, 0.5], start=(0.25, -1.0))])
    policy = LinearPolicy(jnp.array([[0.5, 0.0, 0.25]]), jnp.array([0.25, 0.0]), jnp.array([2.0, 1.0]), SPEC)
    model = line(reward_bias=1.0, discount=0.75)
    latent = model.filter(played.rows, seed=0)[:, 0]
    dreamt = dream(model, latent, start(played), policy, 2, seed=0)
    # tanh(0.5 (x[0] - 0.25) / 2 + 0.25), at x[0] = 0.25 first.
    first = 0.25 + np.tanh(0.25)
    second = first + np.tanh(0.25 * (first - 0.25) + 0.25)
    seen = [[x, -1 - 2 * (x - 0.25)] for x in (first, second)]
    np.testing.assert_allclose(dreamt.obs["x"][0], seen, rtol=1e-6)
    returns = dreamt.returns(np.ones((1, 2), bool))
    np.testing.assert_allclose(returns, first + 1 + 0.75 * (second + 1), rtol=1e-6)
    partial = line()
    half = HostModel(partial.initial, partial.observe, lambda *asked: (asked[0], {"obs": {}, "reward": np.zeros(1)}))
    for model in (line(says=("obs",)), line(says=("reward",)), half):
        with pytest.raises(ValueError, match="needs a model that predicts them, and rewards"):
            dream(model, latent, start(played), policy, 2, seed=0)


def test_returns_and_steps_taken_of_recorded_episodes():
    # Rewards x[0]: 1, 0.5, 0.25 cut; 0.5, -0.25 terminated.
    cut, ended = episode([1.0, -0.5, -0.25]), episode([0.5, -0.75], terminates=True)
    played = padded([cut, ended])
    assert start(played).obs["x"].tolist() == [[0, 0], [0, 0]] and start(played).first.all()
    for horizon, totals in ((1, [1, 0.5]), (2, [1.5, 0.25]), (3, [1.75, 0.25]), (7, [1.75, 0.25])):
        assert real_returns(played, horizon).tolist() == totals
    assert taken(played, 5).tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    dreamt = Dream({}, np.ones((2, 5)), np.array([[1, 0.5, 0.25, 1, 1], [1, 1, 0, 0, 0]]))
    assert dreamt.returns(taken(played, 5)).tolist() == [1.75, 2]


def ranked(**pairs):
    return ranking({k: np.array(p) for k, (p, _) in pairs.items()}, {k: np.array(r) for k, (_, r) in pairs.items()})


def test_ranking_by_hand():
    found = ranked(
        a=([1.0, 3.0], [0.0, 2.0]), b=([5.0, 7.0], [3.0, 4.0]),
        c=([4.0, 4.5], [5.0, 11.0]), d=([2.5, 3.5], [6.0, 6.5]),
    )  # fmt: skip
    # Means promised 2, 6, 4.25, 3, real 1, 3.5, 8, 6.25. Of six pairs ab, ac, ad and cd are told right, bc and bd not.
    assert found["tau"] == pytest.approx((4 - 2) / 6)
    assert (found["chosen"], found["best"], found["range"]) == ("b", "c", 7.0)
    assert found["regret"] == pytest.approx((8 - 3.5) / 7)
    # Variances of real returns: of b 0.5^2 + 0.5^2, of c 3^2 + 3^2, over two episodes; of a 2, promised and real.
    assert found["regret_error"] == pytest.approx((0.5 / 2 + 18 / 2) ** 0.5 / 7)
    assert found["policies"]["a"] == pytest.approx({"promised": 2, "real": 1, "error": (2 / 2 + 2 / 2) ** 0.5})


def test_ties_are_taken_off_and_a_right_choice_has_no_regret():
    values = {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [2.0, 2.0], "d": [0.5, 0.5], "e": [7.0, 7.0]}
    real = {"a": [3.0, 3.0], "b": [2.0, 2.0], "c": [4.0, 4.0], "d": [2.0, 2.0], "e": [9.0, 9.0]}
    found = ranked(**{name: (values[name], real[name]) for name in values})
    # Of ten pairs ab is told wrongly, bc tied in the model, bd in reality: (7 - 1) / sqrt((10 - 1) (10 - 1)).
    assert found["tau"] == pytest.approx(6 / 9) and found["regret"] == found["regret_error"] == 0


def test_one_policy_or_equal_ones_are_not_ranked():
    for found in (ranked(a=([1.0, 2.0], [1.0, 3.0])), ranked(a=([1.0, 2.0], [1.0, 3.0]), b=([3.0, 4.0], [2.0, 2.0]))):
        assert found["tau"] is found["regret"] is found["regret_error"] is None and found["policies"]["a"]["real"] == 2


def one_row(x):
    zero, no = jnp.zeros(()), jnp.zeros((), bool)
    return TimeStep({"x": jnp.asarray(x)}, zero, zero + 1, no, no, zero, zero)


def test_a_linear_policy_scales_what_it_sees_and_keeps_within_bounds():
    policy = LinearPolicy(jnp.array([[1.0, -3.0, 0.5]]), jnp.array([1.0, 2.0]), jnp.array([2.0, 4.0]), SPEC)
    _, decision = policy(None, one_row([2.0, 3.0]), key=jax.random.key(0))
    # 1 (2 - 1) / 2 - 3 (3 - 2) / 4 + 0.5 = 0.25
    np.testing.assert_allclose(decision.action, [np.tanh(0.25)], rtol=1e-6)
    spec = make("jax/corridor", length=3).spec
    policy = by_state(spec, [1, 0, 1])
    for state, action in ((0, 1), (1, 0), (2, 1)):
        step = one_row([0.0])
        step = TimeStep({"state": jnp.array(state)}, *jax.tree.leaves(step)[1:])
        chosen = policy(None, step, key=jax.random.key(0))[1].action
        assert chosen == action and chosen.dtype == jnp.int32


def test_the_policy_that_is_sought_earns_the_most_there_is():
    # The reward is x[0], moved by at most 1 per step: 1 + 2 + 3 + 4 from 0, and 4 more from 1.
    obs = {"x": np.array([[0.0, 0.0], [1.0, -1.0]])}
    model = line(discount=1.0)
    found = sought(model, SPEC, obs["x"], obs, (np.zeros(2), np.ones(2)), 4, seed=0)
    played = padded([episode([0.0], start=x) for x in obs["x"]])
    dreamt = dream(model, obs["x"], start(played), found, 4, seed=0)
    # tanh comes near 1 without reaching it.
    np.testing.assert_allclose(dreamt.returns(np.ones((2, 4), bool)), [10, 14], rtol=0.05)
    assert dreamt.obs["x"][0, -1, 1] == pytest.approx(4 * SLOPE[1], rel=0.05)


def test_plans_of_discrete_actions_and_ends_are_sought_too():
    env = make("jax/corridor", length=4)
    subject = ModelSubject(Oracle(env))
    played = PureReality(env).play(by_state(env.spec, [0] * 4), 2, seed=0)
    latent = jax.tree.map(lambda x: x[:, 0], subject.filter(played.rows, seed=0))
    found = sought(subject, env.spec, latent, start(played).obs, (np.zeros(4), np.ones(4)), 5, seed=0)
    promised, real, _ = promised_and_real(env, found, 5)
    assert promised.tolist() == real.tolist() == [1.0] * 3
