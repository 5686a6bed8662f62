import jax
import numpy as np
import pytest

from forethought.envs import make
from forethought.envs.mazes import (
    DYNA,
    FOUR_ROOMS,
    OPEN_BOTH,
    WALLED_LEFT,
    WALLED_RIGHT,
    Layout,
    dyna_maze,
    four_rooms,
    many_rooms,
    maze,
    rooms,
)  # fmt: skip
from forethought.ops.dynamic import sweep, value_iteration


def steps(env, gamma=0.95):
    """The shortest path: the only reward is 1 at its end, discounted once for each step before the last."""
    value, _ = env.optimal_values(gamma)
    return np.log(value[env.start > 0]) / np.log(gamma) + 1


def test_shortest_paths_are_the_published_ones():
    assert steps(dyna_maze()) == pytest.approx(14)
    for layout, length in ((WALLED_RIGHT, 10), (WALLED_LEFT, 16), (OPEN_BOTH, 10)):
        assert steps(maze(layout, start=(5, 3), goal=(0, 8), name="maze")) == pytest.approx(length)
    # From corner to corner of 4 x 4 rooms of 5 with doors in the middle: 22 down, 22 right.
    assert steps(many_rooms()) == pytest.approx(44)


def test_an_epsilon_greedy_walk_through_the_dyna_maze_takes_15_88_steps_at_best():
    env = dyna_maze()
    _, q = env.optimal_values(0.95)
    best = np.isclose(q, q.max(1, keepdims=True))
    policy = 0.9 * best / best.sum(1, keepdims=True) + 0.1 / 4
    follow = np.einsum("sa,sap->sp", policy, env.transition) * ~env.terminal[:, None]
    taken = np.linalg.solve(np.eye(47) - follow, ~env.terminal * 1.0)
    assert taken[DYNA.index(2, 0)] == pytest.approx(15.88, abs=0.005)


def test_four_rooms_has_the_published_values():
    env = four_rooms()
    model = env.tables(0.9)
    value = 0.9 * value_iteration(model)  # the paper pays nothing and gives the goal the value 1
    value[env.terminal] = 1
    assert env.transition.shape == (104, 4, 104)
    assert value[FOUR_ROOMS.index(1, 1)] == pytest.approx(0.083798, abs=5e-7)
    assert value.mean() == pytest.approx(0.303260, abs=5e-7)
    unpaid, found, zeros = model._replace(reward=0 * model.reward), env.terminal * 1.0, []
    for _ in range(4):
        found = sweep(unpaid, found)
        zeros.append(int((found == 0).sum()))
    assert zeros == [101, 95, 85, 75]


def test_moves_stay_inside_and_slips_are_shared():
    corner = Layout(("..", ".#"))
    assert corner.arrivals().tolist() == [[0, 2, 0, 1], [1, 1, 0, 1], [0, 2, 2, 2]]
    env = maze(corner, start=(1, 0), goal=(0, 1), slip=0.3, name="corner")
    # Down from the corner: 0.7 down, 0.1 right; up and left stay.
    np.testing.assert_allclose(env.transition[0, 1], [0.2, 0.1, 0.7])
    np.testing.assert_allclose(env.reward[0, 1], [0, 1, 0])


def test_a_map_shows_states_where_they_are():
    drawn = DYNA.picture(np.arange(47.0))
    assert drawn.shape == (6, 9) and np.isnan(drawn[0, 7]) and drawn[0, 8] == 7 and drawn[5, 8] == 46
    with pytest.raises(ValueError, match=r"\(0, 7\) is no free cell"):
        DYNA.index(0, 7)
    with pytest.raises(ValueError, match="differ in length"):
        Layout(("..", "."))
    assert rooms(2, 1, 3).rows == ("#########", "#...#...#", "#.......#", "#...#...#", "#########")


@pytest.mark.parametrize("name", ["dyna-maze", "four-rooms", "many-rooms"])
def test_mazes_are_environments_by_name(name):
    env = make(f"jax/{name}")
    state, first = env.reset(key=jax.random.key(0))
    _, step = env.step(state, jax.numpy.int32(1), key=jax.random.key(1))
    assert env.spec.name == f"jax/{name}" and first.first and not step.last
