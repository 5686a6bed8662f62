import numpy as np
import pytest
import scipy.optimize

from forethought.ops.dynamic import (
    Tables,
    action_values,
    constrained,
    ending,
    option_model,
    policy_evaluation,
    policy_iteration,
    primitive,
    sweep,
    value_iteration,
)  # fmt: skip
from taxi import taxi

TERMINAL = np.array([False, False, True])


def chain(gamma=0.9):
    """0 -> 1 -> 2 by action 1 with rewards 2 and 3; action 0 stays, for 0.5."""
    transition = np.zeros((3, 2, 3))
    transition[[0, 1, 2], 0, [0, 1, 2]] = transition[[0, 1, 2], 1, [1, 2, 2]] = 1
    reward = np.zeros((3, 2, 3))
    reward[:, 0], reward[0, 1, 1], reward[1, 1, 2] = 0.5, 2, 3
    return primitive(transition, reward, TERMINAL, gamma)


def test_values_by_hand():
    model = chain(0.5)
    # Going: 2 + 0.5 * 3 = 3.5. Staying for ever: 0.5 / (1 - 0.5) = 1.
    assert value_iteration(model).tolist() == pytest.approx([3.5, 3, 0])
    stay = np.array([[1.0, 0], [1, 0], [1, 0]])
    assert policy_evaluation(model, stay).tolist() == pytest.approx([1, 1, 0])
    value, greedy = policy_iteration(model)
    assert value.tolist() == pytest.approx([3.5, 3, 0]) and greedy[:2].tolist() == [1, 1]
    assert sweep(model, np.zeros(3)).tolist() == [2, 3, 0]
    assert action_values(model, value)[0].tolist() == pytest.approx([0.5 + 0.5 * 3.5, 3.5])


def test_what_is_terminal_keeps_the_value_that_it_is_given():
    model, given = chain(0.9), np.array([0, 0, 10.0])
    # 2 + 0.9 * (3 + 0.9 * 10) = 12.8
    for value in (value_iteration(model, given), policy_iteration(model, given)[0]):
        assert value.tolist() == pytest.approx([12.8, 12, 10])


def test_choices_that_may_not_be_made_are_not_made():
    model = chain(0.5)._replace(legal=np.array([[True, False], [True, True], [True, True]]))
    assert value_iteration(model)[0] == pytest.approx(1)  # to stay is all there is
    with pytest.raises(ValueError, match="may not be made"):
        policy_evaluation(model, np.array([[0, 1.0], [0, 1], [0, 1]]))


def test_choices_of_longer_duration_stand_beside_actions():
    model = chain(0.5)
    # From 0 straight to 2 in two steps: 2 + 0.5 * 3, discount 0.25 on arrival.
    reward, arrival = np.zeros((3, 1)), np.zeros((3, 1, 3))
    reward[0], arrival[0, 0, 2] = 3.5, 0.25
    legal = np.array([[True], [False], [False]])
    both = model.beside(Tables(reward, arrival, legal, TERMINAL))
    assert both.reward.shape == (3, 3) and both.arrival.shape == (3, 3, 3)
    assert sweep(both, np.zeros(3)).tolist() == [3.5, 3, 0]  # right after one sweep
    assert sweep(both, np.array([0, 0, 8.0])).tolist() == [5.5, 7, 8]


def test_value_iteration_says_that_there_is_no_value():
    with pytest.raises(ValueError, match="still moves"):
        value_iteration(chain(1.0), sweeps=100)
    with pytest.raises(ValueError, match="gamma is 1.5"):
        chain(1.5)


def test_taxi_undiscounted_is_worth_7_93():
    """Over its 300 starts, from 3 to 15 (docs/options.md); 20 at the end and -1 for every other step, so an optimal
    return of v takes 21 - v steps."""
    env = taxi()
    model, starts = env.tables(1.0), env.start > 0
    value = value_iteration(model)
    np.testing.assert_array_equal(env.start[starts], 1 / 300)
    assert (value[starts].mean(), value[starts].min(), value[starts].max()) == (pytest.approx(7.93), 3, 15)
    best = np.eye(6)[action_values(model, value).argmax(1)]
    steps = policy_evaluation(model._replace(reward=np.where(model.terminal, 0.0, 1.0)[:, None] * np.ones(6)), best)
    np.testing.assert_allclose(steps[starts], 21 - value[starts], atol=1e-9)
    assert steps[starts].mean() == pytest.approx(13.07)


def semi_markov(seed, states=7, actions=3, pays="anywhere"):
    """A random undiscounted problem with durations, in which states 0 and 1 are terminal.

    Arriving in 0 pays 5 and all else costs something, or it pays 1 and all else 0: then waiting costs nothing."""
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
    terminal = np.arange(states) < 2
    reward = np.zeros((states, actions, states))
    if pays == "anywhere":
        reward = rng.normal(-1.0, 0.4, size=reward.shape)
        reward = np.minimum(reward, 0.0) + 5 * (np.arange(states) == 0)
    else:
        reward[..., 0] = 1.0
    model = primitive(transition, reward, terminal, 1.0)
    legal = rng.random((states, actions)) < 0.8
    legal[:, 0] = True
    start = rng.dirichlet(np.ones(states)) * ~terminal
    return model._replace(legal=legal), rng.gamma(2.0, 0.7, (states, actions)), start / start.sum()


def by_occupancy(model, duration, start, budget):
    """The same by linear programming over how often each choice is made: value, multiplier."""
    made = np.argwhere(model.legal & ~model.terminal[:, None])
    s, a = made.T
    inner = ~model.terminal
    flow = (np.eye(len(start))[s] - model.arrival[s, a])[:, inner].T
    found = scipy.optimize.linprog(-model.reward[s, a], duration[s, a][None], [budget], flow, start[inner])
    assert found.success, found.message
    return -found.fun, -found.ineqlin.marginals[0]


@pytest.mark.parametrize("pays", ["anywhere", "success"])
def test_a_budget_of_expected_time_by_linear_programming(pays):
    bound = 0
    for seed in range(30):
        model, duration, start = semi_markov(seed, pays=pays)
        times = model._replace(reward=duration * ~model.terminal[:, None])
        least = -float(start @ value_iteration(times._replace(reward=-times.reward)))
        for slack in (1.0001, 1.2, 1.7, 40.0):
            found = constrained(model, duration, start, slack * least)
            value, price = by_occupancy(model, duration, start, slack * least)
            assert found.value == pytest.approx(value, abs=1e-8)
            assert found.multiplier == pytest.approx(price, abs=1e-7)
            assert found.time <= slack * least * (1 + 1e-9)
            # What is said of the mixture is true of its policies.
            share = np.array([1 - found.slow, found.slow])
            each = [np.eye(3)[policy] for policy in found.policies]
            for table, said in ((model, found.value), (times, found.time)):
                got = [float(start @ policy_evaluation(table, policy)) for policy in each]
                assert share @ got == pytest.approx(said, abs=1e-9)
            bound += found.multiplier > 0
        with pytest.raises(ValueError, match="the quickest policy takes"):
            constrained(model, duration, start, 0.999 * least)
    assert bound > 30  # of 120


def test_a_budget_by_hand():
    """From 0, choice 0 takes 1 and succeeds with 0.5, choice 1 takes 4 and succeeds for sure, for a reward of 2."""
    transition = np.array([[[0, 0.5, 0.5], [0, 1, 0]], [[0, 1, 0]] * 2, [[0, 0, 1]] * 2])
    reward = np.zeros((3, 2, 3)) + 2.0 * (np.arange(3) == 1)
    model = primitive(transition, reward, np.array([False, True, True]), 1.0)
    duration, start = np.array([[1.0, 4], [1, 1], [1, 1]]), np.array([1.0, 0, 0])
    # A budget of 2 is 2/3 of the quick one's 1 and 1/3 of the slow one's 4; a unit of time more earns 1/3.
    found = constrained(model, duration, start, 2.0)
    assert found.policies[:, 0].tolist() == [0, 1] and found.slow == pytest.approx(1 / 3)
    assert (found.value, found.time, found.multiplier) == pytest.approx((4 / 3, 2, 1 / 3))
    found = constrained(model, duration, start, 4.0)
    assert (found.value, found.time, found.multiplier) == (2, 4, 0)
    # Where the quickest is the best, a budget of just its time is enough, rounded down too.
    found = constrained(model, np.array([[9.0, 4], [1, 1], [1, 1]]), start, 4 * (1 - 1e-13))
    assert (found.value, found.time, found.multiplier) == (2, 4, 0)


def test_a_budget_over_options():
    """An option that walks the chain to its end takes the time of its steps."""
    actions = chain(1.0)
    lasts = actions._replace(reward=np.array([[3.0, 1], [3, 2], [0, 0]]))
    walk = np.ones(3, bool), np.eye(2)[[1, 1, 1]], np.zeros(3)
    assert option_model(lasts, *walk).reward[:2, 0].tolist() == [3, 2]
    model = option_model(actions, *walk)
    found = constrained(model, option_model(lasts, *walk).reward, np.array([1.0, 0, 0]), 3.0)
    assert (found.value, found.time, found.multiplier) == (5, 3, 0)


def test_what_has_no_budgeted_optimum_is_refused():
    duration, start = np.ones((3, 2)), np.array([1.0, 0, 0])
    with pytest.raises(ValueError, match="discounts"):
        constrained(chain(0.9), duration, start, 5.0)
    with pytest.raises(ValueError, match="takes no time"):
        constrained(chain(1.0), 0 * duration, start, 5.0)
    with pytest.raises(ValueError, match="a loop pays for ever"):  # staying, for 0.5
        constrained(chain(1.0), duration, start, 5.0)
    shut = chain(1.0)._replace(legal=np.array([[True, True], [True, False], [True, True]]))
    with pytest.raises(ValueError, match="from state 0 no choices lead to an end"):
        ending(shut)
