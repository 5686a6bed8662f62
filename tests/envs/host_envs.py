"""Small Gymnasium environments for the tests: one that is right, and broken ones that differ from it in one thing."""

import os

import gymnasium
import numpy as np
from gymnasium import spaces


class Line(gymnasium.Env):
    """A point on a line: obs [x, t], x += 0.1 a with a in [-1, 3], reward 10 t + a; truncated at t = 4."""

    observation_space: spaces.Space = spaces.Box(-10, 10, (2,), np.float32)
    action_space: spaces.Space = spaces.Box(-1, 3, (1,), np.float32)
    length = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, float(self.np_random.uniform(-1, 1))
        return self.obs(), {}

    def step(self, action):
        self.t += 1
        self.x += 0.1 * float(action[0])
        return self.obs(), self.reward(action), self.terminated(), self.t >= self.length, {}

    def obs(self):
        return np.array([self.x, self.t], np.float32)

    def reward(self, action):
        return 10.0 * self.t + float(action[0])

    def terminated(self):
        return False


class Uneven(Line):
    """Episodes of 2, 3 or 4 steps, drawn at the reset; those of 3 steps terminate, the others are truncated."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 5))
        return obs, info

    def terminated(self):
        return self.t == self.length == 3


class BothAtOnce(Line):
    """Terminates on the very step that the limit falls on."""

    def terminated(self):
        return self.t == self.length


class NotFinite(Line):
    def obs(self):
        return np.array([self.x, np.nan if self.t == 3 else 0], np.float32)


class TooLarge(Line):
    observation_space = spaces.Dict({"big": spaces.Box(-np.inf, np.inf, (2,), np.float64)})

    def obs(self):
        return {"big": np.array([0.5, 1e300 if self.t == 2 else 1.0])}


class WrongShape(Line):
    def obs(self):
        return np.zeros(3, np.float32)


class WrongDtype(Line):
    def obs(self):
        return np.array([self.x, self.t], np.float64)


class MissingKey(Line):
    observation_space = spaces.Dict({"here": spaces.Discrete(9), "gone": spaces.Discrete(9)})

    def obs(self):
        return {"here": self.t}


class OutOfRange(Line):
    observation_space = spaces.Discrete(3)

    def obs(self):
        return np.int64(self.t)


class ArrayReward(Line):
    def reward(self, action):
        return np.array([1.0])


class NoReward(Line):
    def reward(self, action):
        return None


class InfiniteReward(Line):
    def reward(self, action):
        return np.inf


class IntegerTermination(Line):
    def terminated(self):
        return 0


class Raises(Line):
    def reward(self, action):
        return {}["absent"]


class GlobalRandom(Line):
    """Draws from NumPy's global generator."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.random.uniform(-1, 1)
        return self.obs(), {}


class Leftover(Line):
    """Begins where the previous episode ended."""

    x = 0.0

    def reset(self, *, seed=None, options=None):
        before = self.x
        super().reset(seed=seed)
        self.x = before
        return self.obs(), {}


class SeedIgnored(Line):
    """Every seeded reset is the same one, though resets without a seed differ."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else 7)


class OutOfBounds(Line):
    def obs(self):
        return np.array([self.x, 20 * self.t], np.float32)


class WritesOn(Line):
    """Returns the array that it goes on writing to."""

    array = np.zeros(2, np.float32)

    def obs(self):
        self.array[:] = self.x, self.t
        return self.array


class WordsSeen(Line):
    observation_space = spaces.Dict({"screen": spaces.Dict({"words": spaces.Text(8)})})


class Dies(Line):
    """Takes its process with it on step 2."""

    def reward(self, action):
        if self.t == 2:
            os._exit(3)
        return 0.0


class Many(Line):
    """Every kind of space at once; the action tells whether it was decoded rightly."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (5, 5, 5), np.uint8),
            "counts": spaces.Box(0, 9, (2,), np.int64),
            "height": spaces.Box(-5, 5, (), np.float64),
            "level": spaces.Discrete(4, start=-1),
            "dials": spaces.MultiDiscrete([2, 7], start=[1, 0]),
            "flags": spaces.MultiBinary(3),
            "inner": spaces.Dict({"pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)))}),
        }
    )
    action_space = spaces.MultiDiscrete([3, 5])

    def reset(self, *, seed=None, options=None):
        self.t, self.action = 0, np.zeros(2, np.int64)
        return self.obs(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t, self.action = self.t + 1, action
        return self.obs(), float(10 * action[0] + action[1]), False, self.t >= self.length, {}

    def obs(self):
        return {
            "image": np.full((5, 5, 5), 200 + self.t, np.uint8),
            "counts": np.array([self.t, 9]),
            "height": np.float64(-1.5),
            "level": np.int64(self.t - 1 if self.t < 4 else 2),
            "dials": np.array([2, 6]),
            "flags": np.array([1, 0, 1], np.int8),
            "inner": {"pair": (1, np.array([0.25], np.float32))},
        }
