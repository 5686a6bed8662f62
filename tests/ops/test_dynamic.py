import numpy as np
import pytest

from forethought.ops.dynamic import (
    Tables,
    action_values,
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
