"""Where options are worth having: the doors of a state graph, and the options that lead to them.

A door is a state whose removal splits what lies around it, a local graph cut of one state (compare Simsek, Wolfe &
Barto 2005, who cut edges). Between the doors lie regions; of every region and every door of it there is one option, as
the hallway options of Sutton, Precup & Singh (1999).
"""

from __future__ import annotations

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from jaxtyping import Bool, Int

from forethought.options import TabularOption


def cut_off(graph: Bool[np.ndarray, "S S"], radius: int = 3) -> Int[np.ndarray, " S"]:
    """How many of the states around each one its removal cuts off from the largest piece that is left.

    Args:
        graph: whether a step leads from one state to another.
        radius: steps within which a state is around another.
    """
    distance = scipy.sparse.csgraph.shortest_path(scipy.sparse.csr_array(graph), unweighted=True)
    found = np.zeros(len(graph), int)
    for s in range(len(graph)):
        around = np.flatnonzero((distance[s] <= radius) & (distance[s] > 0))
        piece = scipy.sparse.csr_array(graph[np.ix_(around, around)])
        sizes = np.bincount(scipy.sparse.csgraph.connected_components(piece)[1], minlength=1)
        found[s] = sizes.sum() - sizes.max()
    return found


def doors(graph: Bool[np.ndarray, "S S"], radius: int = 3) -> Int[np.ndarray, " D"]:
    """The states that cut off more than one state, and no fewer than any neighbour does, in ascending order."""
    size = cut_off(graph, radius)
    return np.array([s for s in range(len(graph)) if size[s] > 1 and size[s] >= size[graph[s]].max(initial=0)], int)


def regions(graph: Bool[np.ndarray, "S S"], ends: Int[np.ndarray, " D"]) -> list[Bool[np.ndarray, " S"]]:
    """What is left in pieces without the doors, a mask over states each."""
    rest = np.setdiff1d(np.arange(len(graph)), ends)
    count, labels = scipy.sparse.csgraph.connected_components(scipy.sparse.csr_array(graph[np.ix_(rest, rest)]))
    return [np.isin(np.arange(len(graph)), rest[labels == i]) for i in range(count)]


def leading(
    arrivals: Int[np.ndarray, "S A"], region: Bool[np.ndarray, " S"], target: int, starts: Bool[np.ndarray, " S"]
) -> TabularOption:
    """The option that takes a shortest path inside a region to a target beside it, and stops outside the region.

    Args:
        arrivals: the state that each action is expected to lead to; of equally short ways the first action's is taken.
        starts: states outside the region from which it may start too.
    """
    states = np.arange(len(arrivals))
    inside = region | starts
    allowed = region | (states == target)
    distance = np.where(states == target, 0.0, np.inf)
    for _ in states:
        ahead = np.where(allowed[arrivals], distance[arrivals], np.inf)
        nearer = np.where(inside & (states != target), 1 + ahead.min(1), distance)
        if np.array_equal(nearer, distance):
            break
        distance = nearer
    action = np.where(allowed[arrivals], distance[arrivals], np.inf).argmin(1)
    reaches = np.isfinite(distance) & inside & (states != target)
    return TabularOption(reaches, np.eye(arrivals.shape[1])[action], np.where(region, 0.0, 1.0))


def door_options(arrivals: Int[np.ndarray, "S A"], radius: int = 3) -> list[TabularOption]:
    """All options from a region to a door of it, which may also start at the region's other doors."""
    states = len(arrivals)
    graph = np.zeros((states, states), bool)
    graph[np.arange(states)[:, None], arrivals] = True
    np.fill_diagonal(graph, False)
    ends, found = doors(graph, radius), []
    for region in regions(graph, ends):
        own = [d for d in ends if graph[region][:, d].any() or graph[d][region].any()]
        for target in own:
            others = np.isin(np.arange(states), [d for d in own if d != target])
            found.append(leading(arrivals, region, int(target), others))
    return found
