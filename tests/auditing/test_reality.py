import jax
import numpy as np
import pytest
from by_hand import SPEC, episode

from forethought.auditing.reality import ENDLESS, HostReality, LoggedReality, PureReality, padded
from forethought.collect import RandomPolicy
from forethought.envs import make
from forethought.envs.tabular import Tabular, corridor
from forethought.envs.trial import Hover


def from_there(played, places, horizon):
    """Recorded actions and what came of them from rows [N, 2] on, [N, horizon, ...]; the last row is repeated."""
    e, top = places[:, :1], played.rows.action.shape[1] - 1
    at = np.minimum(places[:, 1:] + np.arange(horizon), top)
    step = jax.tree.map(lambda x: x[e, np.minimum(at + 1, top)], played.rows.time_step)
    return played.rows.action[e, at], step


def same(future, step, mask):
    """Whether every replay is what was recorded, at the steps of the mask [N, H]."""
    pairs = [(future.obs[name], x) for name, x in step.obs.items()] + [(future.reward, step.reward)]
    return all((replayed[:, r][mask] == x[mask]).all() for replayed, x in pairs for r in range(replayed.shape[1]))


def test_episodes_of_a_pure_environment_are_whole_and_their_end_is_repeated():
    env = corridor(length=3, time_limit=9)
    played = PureReality(env).play(RandomPolicy(env.spec.action), 12, seed=1)
    rows = played.rows.time_step
    assert rows.reward.shape == (12, 10) and len(set(played.length.tolist())) > 2
    for e, n in enumerate(played.length):
        assert rows.first[e].tolist() == [t == 0 for t in range(n)] + [False] * (10 - n)
        assert rows.last[e, : n - 1].sum() == 0 and rows.last[e, n - 1 :].all()
        assert (rows.obs["state"][e, n - 1 :] == rows.obs["state"][e, n - 1]).all()
        assert (played.rows.action[e, n - 1 :] == 0).all()
        assert rows.reward[e, 1:n].sum() == (rows.discount[e, n - 1] == 0) == (rows.obs["state"][e, n - 1] == 2)


def test_an_episode_without_an_end_is_cut():
    ring = np.eye(2)[[[1], [0]]]
    env = Tabular(ring, ring, start=np.eye(2)[0], terminal=np.zeros(2, bool))
    played = PureReality(env).play(RandomPolicy(env.spec.action), 1, seed=0)
    assert played.length.tolist() == [ENDLESS + 1] and not played.rows.time_step.last.any()


def test_replays_of_a_deterministic_environment_are_what_was_recorded():
    env = corridor(length=3, time_limit=9)
    reality = PureReality(env)
    played = reality.play(RandomPolicy(env.spec.action), 12, seed=1)
    places = np.array([(e, t) for e, n in enumerate(played.length) for t in range(0, n - 1, 2)])
    action, step = from_there(played, places, 6)
    future = reality.replay(played, places, action, times=3, seed=5)
    left = played.length[places[:, 0]] - 1 - places[:, 1]  # steps until the end
    there = np.arange(6) < left[:, None]
    assert same(future, step, there) and there.sum() > 40 and not there.all()
    ends = played.rows.time_step.discount[places[:, 0], played.length[places[:, 0]] - 1] == 0
    assert 0 < ends.sum() < len(ends)
    for i in range(len(places)):
        # After the end no reward; a termination is survived by nothing, a truncation by everything.
        assert (future.reward[i][:, ~there[i]] == 0).all()
        survived = np.where(there[i] & (np.arange(6) < left[i] - 1), 1, 0 if ends[i] else 1)
        assert (future.survived[i] == survived).all()
        assert (future.going[i] == np.append(1, survived[:-1])).all()
        # The model may be asked for what comes after a termination, but not after a cut.
        assert (future.taken[i] == (there[i] | bool(ends[i]))).all()


def test_a_replay_goes_no_further_than_the_time_limit():
    # Three steps to the right are cut one before the last state, where a reward and a termination wait.
    env = corridor(length=5, time_limit=3)
    reality = PureReality(env)
    played = reality.play(RandomPolicy(env.spec.action), 1, seed=0)
    future = reality.replay(played, np.array([[0, 0]]), np.ones((1, 5), np.int32), times=1, seed=0)
    assert future.obs["state"][0, 0, :3].tolist() == [1, 2, 3]
    assert future.reward.tolist() == [[[0] * 5]] and future.survived.tolist() == future.going.tolist() == [[[1] * 5]]
    assert future.taken.tolist() == [[[True] * 3 + [False] * 2]]


def test_replays_draw_fresh_noise_that_the_seed_decides():
    env = Hover()
    reality = PureReality(env)
    played = reality.play(RandomPolicy(env.spec.action), 2, seed=0)
    places = np.array([[0, 0], [1, 0]])
    action, _ = from_there(played, places, 3)
    ask = lambda seed, count: reality.replay(played, places, action, times=count, seed=seed).obs["velocity"]  # noqa: E731
    once = ask(1, 400)
    assert len(np.unique(once[:, :, 0, 0])) == 800
    np.testing.assert_array_equal(once, ask(1, 400))
    assert not np.isin(ask(2, 400), once).any()
    # v' = 0.9 v + 0.25 a + N(0, 0.2^2): the mean of 400 within four standard errors.
    velocity = played.rows.time_step.obs["velocity"][:, 0]
    np.testing.assert_allclose(once[:, :, 0].mean(1), 0.9 * velocity + 0.25 * action[:, 0], atol=4 * 0.2 / 400**0.5)


@pytest.fixture(scope="module")
def cartpole():
    limit = 16
    reality = HostReality(lambda num: make("CartPole-v1", num=num, time_limit=limit), marks=3)
    played = reality.play(RandomPolicy(reality.spec.action), 5, seed=0)
    yield reality, played, limit
    reality.close()


def test_host_episodes_are_whole_and_have_snapshots(cartpole):
    reality, played, limit = cartpole
    last = played.rows.time_step.last
    assert reality.spec.time_limit == limit and last.shape == (5, limit + 1)
    assert played.length.tolist() == (last.argmax(1) + 1).tolist()
    # Marks at 0, 0.375 and 0.75 of the limit; only rows from which a step was taken, and one episode ends at a mark.
    assert sorted(played.back) == [0, 6, 12] and 12 + 1 in played.length
    expected = {(e, t) for e, n in enumerate(played.length) for t in (0, 6, 12) if t < n - 1}
    assert set(map(tuple, reality.places(played).tolist())) == expected


def test_host_replays_are_what_was_recorded_bit_for_bit(cartpole):
    reality, played, _ = cartpole
    places = np.array(reality.places(played))[::-1]  # in any order
    horizon = 12
    action, step = from_there(played, places, horizon)
    future = reality.replay(played, places, action, times=7, seed=0)
    assert future.reward.shape == (len(places), 1, horizon)
    left = played.length[places[:, 0]] - 1 - places[:, 1]
    there = np.arange(horizon) < left[:, None]
    assert same(future, step, there) and not there.all()
    ends = played.rows.time_step.discount[places[:, 0], played.length[places[:, 0]] - 1] == 0
    assert {True, False} == set(ends.tolist())
    np.testing.assert_array_equal(future.taken[:, 0], there | ends[:, None])
    assert (future.reward[:, 0][~there] == 0).all()
    np.testing.assert_array_equal(future.survived[:, 0, -1], ~(ends & (left <= horizon)))


def test_several_plans_from_one_start_do_not_disturb_each_other(cartpole):
    reality, played, _ = cartpole
    right, left = np.ones(6, np.int32), np.zeros(6, np.int32)
    pairs = [((1, 0), right), ((1, 0), left), ((0, 6), left), ((1, 0), right), ((0, 0), right)]
    together = reality.replay(played, np.array([p for p, _ in pairs]), np.array([a for _, a in pairs]), times=1, seed=0)
    name = next(iter(together.obs))
    for i, (place, action) in enumerate(pairs):
        alone = reality.replay(played, np.array([place]), action[None], times=1, seed=0)
        np.testing.assert_array_equal(together.obs[name][i], alone.obs[name][0])
    assert not np.array_equal(together.obs[name][0], together.obs[name][1])
    # The cart is pushed to the side of the action: its velocity is the second element.
    assert together.obs[name][0, 0, -1, 1] > 0 > together.obs[name][1, 0, -1, 1]


def test_playing_again_after_replays_gives_the_same_episodes(cartpole):
    reality, played, _ = cartpole
    again = reality.play(RandomPolicy(reality.spec.action), 5, seed=0)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.rows, played.rows)) and again.back == played.back


def test_logged_episodes_are_drawn_and_padded_and_cannot_be_replayed():
    episodes = [episode([0.5] * n, start=(n, 0.0)) for n in (2, 4, 1)]
    reality = LoggedReality(SPEC, episodes)
    played = reality.play(None, 2, seed=0)
    assert len(played.length) == 2 and len(reality.play(None, 9, seed=0).length) == 3
    assert reality.replay(played, np.zeros((1, 2), int), np.zeros((1, 1, 1)), times=1, seed=0) is None
    assert reality.places(played).shape == (0, 2)
    table = padded(episodes)
    assert table.length.tolist() == [3, 5, 2]
    assert table.rows.time_step.obs["x"][2, :, 0].tolist() == [1, 1.5, 1.5, 1.5, 1.5]
    assert table.rows.time_step.last[0].tolist() == [False, False, True, True, True]
    with pytest.raises(ValueError, match="line: there is no episode"):
        LoggedReality(SPEC, [])
