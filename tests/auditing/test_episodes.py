import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.auditing.episodes import play, returns, split
from forethought.collect import RandomPolicy, ZeroPolicy
from forethought.protocols import AbstractPolicy
from forethought.types import Box, Decision, Discrete, Spec, Step, TimeStep


class Counting:
    """Two environments whose episodes last 2 and 5 decisions; obs [environment, episode, t], reward t."""

    lengths = (2, 5)

    def __init__(self):
        self.spec = Spec("counting", {"obs": Box((3,))}, Box((1,), low=-1.0, high=1.0))
        self.num, self.at = 2, np.zeros((2, 3), np.float32)
        self.seeds, self.actions = [], []

    def reset(self, where=None, *, seed=None):
        if where is None:
            self.seeds.append(seed)
            self.at = np.array([[0, 0, 0], [1, 0, 0]], np.float32)
        else:
            self.at[where, 1] += 1
            self.at[where, 2] = 0
        return self.recv()

    def send(self, action, where=None):
        assert not any(self.last()[where])
        self.actions.append(action.copy())
        self.at[where, 2] += 1

    def recv(self):
        zero = np.zeros(2, np.float32)
        t = self.at[:, 2].copy()
        return TimeStep({"obs": self.at.copy()}, t, zero + 1, t == 0, self.last(), zero + 1, zero)

    def last(self):
        return self.at[:, 2] == self.lengths

    def snapshot(self):
        return None

    def restore(self, snapshot):
        raise NotImplementedError

    def close(self):
        pass


@pytest.mark.parametrize(
    ("asked", "want"), [(1, [(0, 0)]), (2, [(0, 0), (1, 0)]), (5, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)])]
)
def test_every_environment_plays_the_same_number_of_whole_episodes(asked, want):
    env, watched = Counting(), []
    played = play(
        env,
        ZeroPolicy(env.spec.action),
        asked,
        seed=9,
        key=jax.random.key(0),
        watch=lambda: watched.append(env.at[0].copy()),
    )
    assert env.seeds == [9]
    assert [tuple(e.time_step.obs["obs"][0, :2].astype(int)) for e in played] == want
    for episode, (which, _) in zip(played, want, strict=True):
        length = Counting.lengths[which]
        assert episode.time_step.obs["obs"][:, 2].tolist() == list(range(length + 1))
        assert episode.time_step.first.tolist() == [True] + [False] * length
        assert episode.time_step.last.tolist() == [False] * length + [True]
        assert np.all(episode.depth == 0)
    # 0 + 1 + 2 = 3 and 0 + .. + 5 = 15: short episodes, of which more would have ended, are not preferred.
    assert returns(played).tolist() == [{0: 3.0, 1: 15.0}[which] for which, _ in want]
    # A frame per row, of the time step that the row shows.
    first = played[0]
    assert [frame[2] for frame in watched[: len(first.depth)]] == first.time_step.obs["obs"][:, 2].tolist()


def test_the_seed_decides_what_a_policy_draws():
    def drawn(key):
        env = Counting()
        play(env, RandomPolicy(env.spec.action), 2, seed=0, key=jax.random.key(key))
        return np.array(env.actions)

    assert np.array_equal(drawn(0), drawn(0)) and not np.array_equal(drawn(0), drawn(1))
    assert not np.array_equal(drawn(0)[:, 0], drawn(0)[:, 1])  # the environments' draws differ too


class Adding(AbstractPolicy):
    """Acts by its carry, which counts rows and begins anew with an episode."""

    def initial(self):
        return jnp.zeros(())

    def __call__(self, carry, time_step, *, key):
        carry = jnp.where(time_step.first, 0.0, carry + 0.1)
        return carry, Decision(carry[None], jnp.zeros(()))


def test_the_carry_runs_through_an_episode():
    env = Counting()
    played = play(env, Adding(), 4, seed=0, key=jax.random.key(0))
    for episode in played:
        length = len(episode.depth) - 1
        np.testing.assert_allclose(episode.action[:, 0], [*(0.1 * np.arange(length)), 0], atol=1e-6)  # void at the end


def rows(marks: str) -> Step:
    """One stream's rows from a word: f a first row, l a last one, b both, - neither; obs counts them."""
    count = len(marks)
    zero = np.zeros(count, np.float32)
    flags = [np.array([m in chosen for m in marks]) for chosen in ("fb", "lb")]
    step = TimeStep({"obs": np.arange(count)}, np.arange(count, dtype=np.float32), zero, *flags, zero, zero)
    return Step(step, zero, None, np.zeros(count, np.int32), np.zeros(count, np.int32))


@pytest.mark.parametrize(
    ("marks", "want"),
    [
        ("f--l", [[0, 1, 2, 3]]),
        ("f-lfl", [[0, 1, 2], [3, 4]]),
        ("-lf-lf-", [[2, 3, 4]]),  # unfinished at either end
        ("--", []),
        ("f--", []),
        ("-l", []),
        ("bbfl", [[0], [1], [2, 3]]),  # an episode of one row is one
    ],
)
def test_split_cuts_whole_episodes(marks, want):
    assert [episode.time_step.obs["obs"].tolist() for episode in split(rows(marks))] == want


def test_returns_add_in_float64():
    episode = rows("f--l")
    # 2^24 + 1 is no float32: a float32 sum would lose every 1.
    reward = np.array([0, 2**24, 1, 1], np.float32)
    step = dataclasses.replace(episode.time_step, reward=reward)
    assert returns([dataclasses.replace(episode, time_step=step)]).tolist() == [2**24 + 2]


def test_policies_to_compare_with_play_discrete_actions_too():
    action, key = Discrete(3), jax.random.split(jax.random.key(0), 300)
    zero, random = ZeroPolicy(action), RandomPolicy(action)
    step = jax.tree.map(lambda x: x[0], rows("f").time_step)
    assert int(zero(None, step, key=key[0])[1].action) == 0
    counts = np.bincount(jax.vmap(lambda k: random(None, step, key=k)[1].action)(key), minlength=3)
    # Binomial(300, 1/3): standard deviation 8.2, so 100 +- 41 is five of them.
    assert counts.sum() == 300 and np.all(np.abs(counts - 100) < 41)
