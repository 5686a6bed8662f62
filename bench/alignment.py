"""The alignment study's base condition, 32 seeds in one program, against the same loop in plain PyTorch.

    pytest bench/alignment.py --benchmark-json FILE

PyTorch runs as two processes of one thread, one seed after the other in each; ours is one process with two devices of
one thread. Both train 2,000 episodes and evaluate 11 times over 256 episodes; compiling is left out.
"""

import sys
from typing import Any

import harness

SEEDS, EPISODES, POINTS, MEASURED = 32, 2000, 10, 256


def test_seeds_per_second(benchmark: Any) -> None:
    """The bar: at least 10 times the seeds per second."""
    ours = harness.Worker.ours(__file__, "ours")
    plain = [harness.Worker.ours(__file__, "torch") for _ in range(2)]
    seconds = []
    benchmark.pedantic(ours.work, setup=lambda: seconds.append(max(harness.together(plain))), rounds=3)
    theirs = 2 / sorted(seconds)[len(seconds) // 2]
    mine = SEEDS / benchmark.stats.stats.median
    benchmark.extra_info.update(
        ratio=mine / theirs, seeds_per_second=mine, torch_seeds_per_second=theirs, torch_seconds=seconds,
        ours=ours.facts | ours.close(), torch=[worker.facts | worker.close() for worker in plain],
    )  # fmt: skip
    print(f"\nours {mine:.2f} seeds/s, PyTorch {theirs:.3f} seeds/s: {mine / theirs:.1f} times")
    assert mine / theirs >= 10


def ours() -> None:
    from forethought import devices

    devices.cpu_devices()
    import jax
    import jax.numpy as jnp

    from forethought.algos.aligned import Config, Factors
    from forethought.studies import alignment_run

    assert (alignment_run.POINTS, alignment_run.EPISODES) == (POINTS, MEASURED)
    program = alignment_run.program(Config(), EPISODES, SEEDS)
    factors = jax.tree.map(lambda x: jnp.repeat(x, SEEDS), Factors())
    work = lambda: jax.block_until_ready(program((factors, jnp.arange(SEEDS))))  # noqa: E731
    found = work()  # compiles
    harness.serve(work, returns=[float(x) for x in found["final/return"]])


def torch() -> None:
    import alignment_torch

    returns = []
    work = lambda: returns.append(alignment_torch.run(len(returns), EPISODES, POINTS, MEASURED))  # noqa: E731
    harness.serve(work)


if __name__ == "__main__":
    {"ours": ours, "torch": torch}[sys.argv[1]]()
