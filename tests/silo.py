"""Environments with one irreversible action that keep a list of what was really done, and gates before them."""

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from forethought import envs
from forethought.envs.tabular import corridor
from forethought.gate import Gate, Gated, Record, read

KEY = jax.random.key(5)
LAUNCH = 2
CORRIDOR = corridor(4, time_limit=20)  # action 1 goes right, 0 left


class Silo(gymnasium.Env):
    """Counts its steps; whatever it does is appended to `world`, of which action 2, the launch, is irreversible."""

    observation_space: spaces.Space = spaces.Box(0, 99, (1,), np.float32)
    action_space: spaces.Space = spaces.Discrete(4)

    def __init__(self, world):
        self.world = world

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.world.append(int(action))
        self.t += 1
        return np.full(1, self.t, np.float32), 0.0, False, self.t >= 6, {}


class Dial(Silo):
    action_space = spaces.Box(np.array([0, -1], np.float32), np.array([10, 1], np.float32))

    def step(self, action):
        return Silo.step(self, action[0] > 9.49)  # native 9.5 is 0.9


@pytest.fixture
def record(tmp_path):
    with_file = Record(tmp_path / "gate.jsonl")
    yield with_file
    with_file.close()


def silo(num, kind=Silo, **kwargs):
    """A batch of environments and the list of what they did."""
    world = []
    return envs.make(lambda: kind(world), num=num, **kwargs), world


def guarded(record, *sources, num=3, declared=(LAUNCH,), **kwargs):
    env, world = silo(num)
    gated = Gated(env, Gate(sources, record), irreversible=declared, **kwargs)
    gated.reset(seed=0)
    return gated, world


def done(gated, world):
    """What was done in the world, steps that are still under way included."""
    gated.recv()
    return world


def yes(act):
    return True


def lines(record):
    return read(record.path).lines


def verdicts(record):
    return [line["verdict"] for line in lines(record)]
