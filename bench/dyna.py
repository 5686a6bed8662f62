"""Dyna-Q with 50 planning steps on the Dyna maze, one seed and 64, against a plain loop over a dictionary and NumPy.

    pytest bench/dyna.py --benchmark-json FILE

The plain loop is what one would write by hand: a dictionary for the model, a NumPy table for the values, random numbers
drawn once per real step. It runs one seed as one process; with 64 seeds ours uses a device of one thread per core, so
that the ratio to as many plain loops at once as there are cores is reported too. Compiling is left out; both count real
and imagined updates alike.
"""

import os
import sys
import time
from typing import Any

import harness

PLANNING, CORES = 50, os.cpu_count() or 1
PLAIN_STEPS = 3_000
OUR_STEPS = {1: 40_000, 64: 3_000}
"""Real steps of every seed, by seeds: of 64, ten million updates."""


def compare(benchmark: Any, seeds: int) -> float:
    """Measures in turns, so that both meet the same noise; returns the ratio of updates per second to one loop's."""
    ours = harness.Worker.ours(__file__, "ours", str(seeds))
    plain = [harness.Worker.ours(__file__, "plain") for _ in range(CORES)]
    alone, together = [], []

    def theirs() -> None:
        alone.append(plain[0].work())
        together.append(max(harness.together(plain)))

    benchmark.pedantic(ours.work, setup=theirs, rounds=5)
    median = lambda x: sorted(x)[len(x) // 2]  # noqa: E731
    updates = seeds * OUR_STEPS[seeds] * (PLANNING + 1)
    mine, one = updates / benchmark.stats.stats.median, PLAIN_STEPS * (PLANNING + 1) / median(alone)
    several = CORES * PLAIN_STEPS * (PLANNING + 1) / median(together)
    benchmark.extra_info.update(
        ratio=mine / one, ratio_to_all_cores=mine / several, updates_per_second=mine, plain_updates_per_second=one,
        plain_seconds=alone, plain_seconds_together=together, ours=ours.facts | ours.close(),
        plain=[worker.facts | worker.close() for worker in plain],
    )  # fmt: skip
    print(
        f"\n{seeds} seeds: ours {mine / 1e6:.1f} million updates/s, a plain loop {one / 1e6:.3f}: {mine / one:.0f} "
        f"times; {mine / several:.0f} times {CORES} plain loops at once"
    )
    return mine / one


def test_one_seed(benchmark: Any) -> None:
    """The bar: at least 30 times."""
    assert compare(benchmark, 1) >= 30


def test_many_seeds(benchmark: Any) -> None:
    """The bar: at least 100 times."""
    assert compare(benchmark, 64) >= 100


def test_cost_is_linear(benchmark: Any) -> None:
    """Ten times the planning steps, or four times the seeds, take that much longer, up to ten million updates."""
    worker = harness.Worker.ours(__file__, "linear")
    benchmark.pedantic(worker.work, rounds=1)
    found = worker.facts
    benchmark.extra_info.update(found)
    worker.close()
    for what, each in (("planning", 10), ("seeds", 4)):
        growth = [b["seconds"] / a["seconds"] for a, b in zip(found[what], found[what][1:], strict=False)]
        shown = ", ".join(f"{x['updates']:,} updates {1e3 * x['seconds']:.0f} ms" for x in found[what])
        print(f"\n{what}: {shown}; grows by {', '.join(f'{x:.1f}' for x in growth)} where {each} would be linear")
        assert all(x < 1.25 * each for x in growth)


def plain_run(steps: int, seed: int) -> float:
    """Tabular Dyna-Q (Sutton & Barto 2018, sec. 8.2) as a plain loop; returns the reward collected."""
    import numpy as np

    from forethought.envs.mazes import dyna_maze

    env = dyna_maze()
    arrives, end = env.transition.argmax(-1), int(env.terminal.argmax())
    start, rng = int(env.start.argmax()), np.random.default_rng(seed)
    q, model, seen, state, total = np.zeros(arrives.shape), {}, [], start, 0.0
    for _ in range(steps):
        row = q[state]
        greedy = np.flatnonzero(row == row.max())
        action = int(rng.integers(4) if rng.random() < 0.1 else greedy[rng.integers(len(greedy))])
        arrived = int(arrives[state, action])
        reward, factor = (1.0, 0.0) if arrived == end else (0.0, 0.95)
        q[state, action] += 0.1 * (reward + factor * q[arrived].max() - q[state, action])
        if (state, action) not in model:
            seen.append((state, action))
        model[state, action] = reward, factor, arrived
        for i in rng.integers(len(seen), size=PLANNING):
            pair = seen[i]
            r, f, p = model[pair]
            q[pair] += 0.1 * (r + f * q[p].max() - q[pair])
        state, total = (start if arrived == end else arrived), total + reward
    return total


def plain() -> None:
    rewards: list[float] = []
    harness.serve(lambda: rewards.append(plain_run(PLAIN_STEPS, len(rewards))))


def program(seeds: int, planning: int, steps: int) -> Any:
    """A compiled run of so many seeds, which waits for its result."""
    import jax
    import jax.numpy as jnp
    from jax.custom_batching import sequential_vmap

    from forethought import devices
    from forethought.algos import dyna
    from forethought.envs.mazes import dyna_maze

    cfg, env = dyna.Config(planning=planning), dyna_maze()
    one = sequential_vmap(lambda key: dyna.run(cfg, env, steps, key=key)[1].reward.sum())
    run = jax.jit(devices.apart(one, devices.sharing(seeds)))
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    work = lambda: jax.block_until_ready(run(keys))  # noqa: E731
    work()  # compiles
    return work


def ours(seeds: int) -> None:
    _begin()
    work = program(seeds, PLANNING, OUR_STEPS[seeds])
    harness.serve(work, reward=float(work().mean()))


def linear() -> None:
    """Times of one seed with 50, 500 and 5,000 planning steps, and of 4, 16 and 64 seeds with 50."""
    _begin()

    def seconds(seeds: int, planning: int, steps: int) -> dict[str, Any]:
        work, taken = program(seeds, planning, steps), []
        for _ in range(5):
            begun = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begun)
        return {"seeds": seeds, "updates": seeds * steps * (planning + 1), "seconds": min(taken)}

    planning = [seconds(1, n, 2_000) for n in (50, 500, 5_000)]
    harness.serve(lambda: None, planning=planning, seeds=[seconds(n, PLANNING, 3_000) for n in (4, 16, 64)])


def _begin() -> None:
    from forethought import devices

    devices.whole_loops()
    devices.cpu_devices()


if __name__ == "__main__":
    {"ours": lambda: ours(int(sys.argv[2])), "plain": plain, "linear": linear}[sys.argv[1]]()
