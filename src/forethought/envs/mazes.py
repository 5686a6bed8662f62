"""Mazes of the literature as tables: Sutton & Barto's for Dyna, the Four Rooms, and many rooms in a row.

A layout is drawn in characters: '#' is a wall, everything else a free cell, numbered in reading order. Actions 0 to 3
go up, down, left and right; a move against a wall or the edge stays where it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from forethought.envs.tabular import Tabular

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
"""Rows and columns of up, down, left, right."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The walls of a maze, and where on the map its states lie."""

    rows: tuple[str, ...]

    def __post_init__(self):
        if len({len(row) for row in self.rows}) != 1:
            raise ValueError("layout: its rows differ in length")

    @property
    def cells(self) -> Int[np.ndarray, "S 2"]:
        """Row and column of every state."""
        return np.array([(r, c) for r, row in enumerate(self.rows) for c, x in enumerate(row) if x != "#"])

    def index(self, row: int, column: int) -> int:
        """The state at a cell. Raises ValueError for a wall and beyond the edge."""
        found = np.flatnonzero((self.cells == (row, column)).all(1))
        if not len(found):
            raise ValueError(f"layout: ({row}, {column}) is no free cell")
        return int(found[0])

    def picture(self, values: Float[np.ndarray, " S"]) -> Float[np.ndarray, "R C"]:
        """Values of states at their place on the map, NaN on walls."""
        drawn = np.full((len(self.rows), len(self.rows[0])), np.nan)
        drawn[tuple(self.cells.T)] = values
        return drawn

    def arrivals(self) -> Int[np.ndarray, "S 4"]:
        """The state that each move leads to."""
        number = self.picture(np.arange(float(len(self.cells))))
        number = np.pad(number, 1, constant_values=np.nan)
        ahead = self.cells[:, None] + MOVES + 1
        there = number[ahead[..., 0], ahead[..., 1]]
        return np.where(np.isnan(there), np.arange(len(there))[:, None], there).astype(int)


def maze(
    layout: Layout, *, start: tuple[int, int] | None, goal: tuple[int, int], name: str, slip: float = 0.0,
    reward: float = 1.0, time_limit: int | None = None,
) -> Tabular:  # fmt: skip
    """A maze that ends at its goal, with `reward` on arrival and nothing before.

    Args:
        start: a cell; None: any but the goal, equally likely.
        slip: probability of another direction than the one chosen, the three of them equally likely.
    """
    if not 0 <= slip < 1:
        raise ValueError(f"{name}: slip is {slip}; it must be from 0 to less than 1")
    arrive, end = layout.arrivals(), layout.index(*goal)
    states = len(arrive)
    chance = np.where(np.eye(4, dtype=bool), 1 - slip, slip / 3)  # [chosen, taken]
    transition = np.einsum("at,stp->sap", chance, np.eye(states)[arrive])
    rewards = np.zeros((states, 4, states))
    rewards[..., end] = reward
    begin = np.eye(states)[layout.index(*start)] if start else (np.arange(states) != end) / (states - 1)
    terminal = np.arange(states) == end
    return Tabular(transition, rewards, start=begin, terminal=terminal, time_limit=time_limit, name=name)


DYNA = Layout(
    (
        ".......#.",
        "..#....#.",
        "..#....#.",
        "..#......",
        ".....#...",
        ".........",
    )
)
"""Figure 8.2 of Sutton & Barto (2018)."""
WALLED_RIGHT = Layout((".........", ".........", ".........", "########.", ".........", "........."))
WALLED_LEFT = Layout((".........", ".........", ".........", ".########", ".........", "........."))
OPEN_BOTH = Layout((".........", ".........", ".........", ".#######.", ".........", "........."))
"""The walls of figures 8.4 and 8.5."""
FOUR_ROOMS = Layout(
    (
        "#############",
        "#.....#.....#",
        "#.....#.....#",
        "#...........#",
        "#.....#.....#",
        "#.....#.....#",
        "##.####.....#",
        "#.....###.###",
        "#.....#.....#",
        "#.....#.....#",
        "#...........#",
        "#.....#.....#",
        "#############",
    )
)
"""Figure 2 of Sutton, Precup & Singh (1999)."""


def dyna_maze() -> Tabular:
    """Sutton & Barto's Dyna maze (example 8.1): 47 states, 14 steps from the start to the goal."""
    return maze(DYNA, start=(2, 0), goal=(0, 8), name="jax/dyna-maze")


def four_rooms(goal: tuple[int, int] = (7, 9), slip: float = 1 / 3, time_limit: int | None = None) -> Tabular:
    """The Four Rooms of Sutton, Precup & Singh (1999): 104 states, a move succeeds with probability 2/3.

    The paper's goal is worth 1 and nothing is paid; here its reward is 1, so that the paper's values are gamma times
    the values of other states here."""
    return maze(FOUR_ROOMS, start=None, goal=goal, slip=slip, time_limit=time_limit, name="jax/four-rooms")


def rooms(across: int = 4, down: int = 4, size: int = 5) -> Layout:
    """A grid of square rooms of size x size cells, each joined to its neighbours by one door in the middle."""
    height, width = down * (size + 1) + 1, across * (size + 1) + 1
    drawn = np.full((height, width), ".")
    drawn[:: size + 1], drawn[:, :: size + 1] = "#", "#"
    middle = np.arange(1 + size // 2, max(height, width), size + 1)
    for wall in range(size + 1, height - 1, size + 1):
        drawn[wall, middle[:across]] = "."
    for wall in range(size + 1, width - 1, size + 1):
        drawn[middle[:down], wall] = "."
    return Layout(tuple("".join(row) for row in drawn))


def many_rooms(
    across: int = 4, down: int = 4, size: int = 5, slip: float = 0.0, time_limit: int | None = None
) -> Tabular:
    """From the first corner of many rooms to the last, with one reward at the end."""
    layout = rooms(across, down, size)
    end = (down * (size + 1) - 1, across * (size + 1) - 1)
    return maze(layout, start=(1, 1), goal=end, slip=slip, time_limit=time_limit, name="jax/many-rooms")


class Changing(eqx.Module):
    """Mazes on one map that follow each other: which is in force depends on the steps taken in all, not the episode's.

    A state is a cell that is free in any of them. Whoever stands where a wall appears walks off it.
    """

    mazes: tuple[Tabular, ...]
    since: tuple[int, ...] = eqx.field(static=True)
    """The number of steps after which each is in force; the first: 0."""
    layout: Layout = eqx.field(static=True)
    """The map of all states."""

    def __init__(
        self, layouts: Sequence[Layout], since: Sequence[int], *, start: tuple[int, int], goal: tuple[int, int],
        name: str,
    ):  # fmt: skip
        """Raises ValueError unless `since` begins with 0, ascends, and names a step for each layout."""
        if len(since) != len(layouts) or since[0] != 0 or sorted(set(since)) != list(since):
            raise ValueError(f"{name}: since is {tuple(since)}; one step per layout is needed, from 0 upwards")
        drawn = [np.array([list(row) for row in layout.rows]) for layout in layouts]
        walls = np.all([each == "#" for each in drawn], 0)
        self.since, self.layout = tuple(since), Layout(tuple("".join(row) for row in np.where(walls, "#", ".")))
        whole, arrive = maze(self.layout, start=start, goal=goal, name=name), self.layout.arrivals()
        stay = np.arange(len(arrive))[:, None]
        closed = [each[tuple(self.layout.cells.T)] == "#" for each in drawn]
        moves = [np.eye(len(arrive))[np.where(shut[arrive], stay, arrive)] for shut in closed]
        self.mazes = tuple(dataclasses.replace(whole, transition=each) for each in moves)

    def at(self, step: int) -> Tabular:
        """The maze in force after so many steps."""
        return self.mazes[int(np.searchsorted(self.since, step, "right")) - 1]
