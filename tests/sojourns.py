"""A table in seconds whose steps last as they are drawn, and the distributions that tests draw from."""

import dataclasses

import jax
import numpy as np
import scipy.stats
from jax.tree_util import Partial

from forethought.envs.tabular import Tabular
from forethought.protocols import AbstractEnv

EXPONENTIAL, GAMMA, UNIFORM = (
    scipy.stats.expon(scale=0.5),
    scipy.stats.gamma(2.5, scale=0.4),
    scipy.stats.uniform(0.3, 0.9),
)
SOJOURNS = (EXPONENTIAL, GAMMA, UNIFORM)


class Lasting(AbstractEnv):
    """`table` in continuous time: a step from state s by action a lasts `lasts(s, a, key)` seconds and pays
    `pays(reward, s, duration)`: a reward and its delay."""

    table: Tabular
    lasts: Partial
    pays: Partial

    @property
    def spec(self):
        return dataclasses.replace(self.table.spec, unit="second", duration=None)

    def reset(self, *, key):
        return self.table.reset(key=key)

    def step(self, state, action, *, key):
        key, lasts_key = jax.random.split(key)
        begun = state.state
        state, arrived = self.table.step(state, action, key=key)
        took = self.lasts(begun, action, lasts_key)
        reward, delay = self.pays(arrived.reward, begun, took)
        return state, dataclasses.replace(arrived, reward=reward, reward_delay=delay, duration=took)


def row(length, *, reward=1.0, terminal=True):
    """States in a row; action 1 steps right for `reward`, action 0 stays for nothing; the last one terminates."""
    arrives = np.array([[s, min(s + 1, length - 1)] for s in range(length)])
    pays = np.zeros((length, 2, length))
    pays[:, 1] = reward
    ends = (np.arange(length) == length - 1) & terminal
    return Tabular(np.eye(length)[arrives], pays, start=np.eye(length)[0], terminal=ends, name="row")


def known(durations):
    """Steps from state s last durations[s]."""
    return Partial(lambda each, s, a, key: each[s], durations)


AT_START = Partial(lambda reward, s, took: (reward, 0 * took))
AT_END = Partial(lambda reward, s, took: (reward, took))


def nodes(law, count=100):
    """Points and weights of a Gauss-Legendre rule in the quantiles of a distribution, so that a weighted sum over what
    the library makes of each duration is an expectation (to 5e-7: the quantiles of unbounded laws have a steep end)."""
    x, weight = np.polynomial.legendre.leggauss(count)
    return law.ppf((x + 1) / 2), weight / 2
