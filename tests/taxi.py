"""Gymnasium's Taxi, of whichever version is installed, as exact tables."""

import gymnasium
import numpy as np

from forethought.envs.tabular import Tabular

NAME = max(name for name in gymnasium.registry if name.startswith("Taxi-"))


def taxi():
    """The rules of `env.unwrapped.P`, and its own distribution of starts."""
    table = (env := gymnasium.make(NAME).unwrapped).P
    transition, reward, terminal = np.zeros((500, 6, 500)), np.zeros((500, 6, 500)), np.zeros(500, bool)
    for s, row in table.items():
        for a, ((_, arrived, pays, ends),) in row.items():
            transition[s, a, arrived], reward[s, a, arrived] = 1, pays
            terminal[arrived] |= ends
    return Tabular(transition, reward, start=env.initial_state_distrib, terminal=terminal, time_limit=200, name="taxi")
