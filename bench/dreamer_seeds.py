"""Many seeds of the cpu preset on the JAX pendulum in one program, against one seed.

    pytest bench/dreamer_seeds.py --benchmark-json FILE

As a program (`python bench/dreamer_seeds.py SEEDS DEVICES`) it is the process that is timed: ITERATIONS of collecting
and updating. Seeds are split over devices, which exchange nothing; a single seed may share its batch between them.
"""

import sys
from typing import Any

import pytest

import harness

ITERATIONS = 4


@pytest.mark.parametrize("devices", [1, 2])
def test_32_seeds(benchmark: Any, devices: int) -> None:
    """The bar: 32 seeds, 16 on each of two devices, cost at most 16 times one seed on one device. The other case, one
    seed whose batch is shared by both, is recorded."""
    many, one, alone = harness.Worker.ours(__file__, "32", "2"), harness.Worker.ours(__file__, "1", str(devices)), []
    benchmark.pedantic(many.work, setup=lambda: alone.append(one.work()), rounds=7, warmup_rounds=1)
    alone = sorted(alone[1:])
    ratio = benchmark.stats.stats.median / alone[len(alone) // 2]
    benchmark.extra_info.update(ratio=ratio, one_seed=alone, many=many.facts | many.close(), one=one.close())
    print(
        f"\n32 seeds {benchmark.stats.stats.median:.3f} s, one on {devices} {alone[len(alone) // 2]:.3f} s: {ratio:.1f}"
    )
    if devices == 1:
        assert ratio <= 16


def main(seeds: int, num: int) -> None:
    from forethought import devices

    devices.cpu_devices()
    import jax
    import jax.numpy as jnp

    from forethought import envs, loop
    from forethought.algos import dreamer
    from forethought.types import PerStep

    cfg = dreamer.Config(**dreamer.PRESETS["cpu"])
    env: Any = envs.make("jax/pendulum", action_repeat=cfg.action_repeat)
    rule, shared = PerStep(cfg.gamma), seeds == 1 and num > 1
    axis = devices.SHARED if shared else devices.ALONE
    spread = devices.replicated if shared else devices.apart
    keys = jax.random.key(0) if shared else jax.vmap(jax.random.key)(jnp.arange(seeds))
    held = jax.jit(spread(lambda key: loop.begin(dreamer, cfg, env, key=key)[:2], num))(keys)
    step = lambda _, held: loop.iterate(dreamer, cfg, env, rule, *held, axis)[:2]  # noqa: E731
    chunk = jax.jit(spread(lambda held: jax.lax.fori_loop(0, ITERATIONS, step, held), num), donate_argnums=0)

    def work() -> None:
        nonlocal held
        held = jax.block_until_ready(chunk(held))

    work()  # compiles
    harness.serve(work, seeds=seeds, devices=num, updates=ITERATIONS * cfg.updates)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
