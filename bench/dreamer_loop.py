"""The whole loop on dmc/walker-walk at size 1m and train ratio 1024: one environment step, one update of 16 x 64 rows.

    pytest bench/dreamer_loop.py --benchmark-json FILE

As a program it is the process that is timed, STEPS environment steps at a time. Nothing is rendered.
"""

from typing import Any

import harness

STEPS = 8


def test_walker_walk(benchmark: Any) -> None:
    """The bar: at least 2.2 environment steps per second."""
    worker = harness.Worker.ours(__file__)
    benchmark.pedantic(worker.work, rounds=7, warmup_rounds=1)
    rate = STEPS / benchmark.stats.stats.median
    benchmark.extra_info.update(worker.facts | worker.close(), steps_per_second=rate)
    print(f"\n{rate:.2f} environment steps/s")
    assert rate >= 2.2


def main() -> None:
    from forethought import devices

    devices.cpu_devices()
    import jax

    from forethought import envs
    from forethought.algos import dreamer
    from forethought.loop import HostLoop
    from forethought.types import PerStep

    cfg = dreamer.Config(**dreamer.PRESETS["1m"])
    env: Any = envs.make("dmc/walker-walk", num=cfg.envs, seed=0)
    num = devices.sharing(cfg.batch)
    loop = HostLoop(dreamer, cfg, env, PerStep(cfg.gamma), seed=0, num_devices=num)

    def work() -> None:
        loop.advance(STEPS)
        jax.block_until_ready(loop.agent.updates)

    work()  # fills replay at random and compiles
    harness.serve(work, devices=num, rows_per_step=cfg.updates * cfg.batch * cfg.length)


if __name__ == "__main__":
    main()
