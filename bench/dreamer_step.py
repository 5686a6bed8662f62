"""One update of dreamer on walker-walk-shaped data, beside the official implementation, and what its cost depends on.

    pytest bench/dreamer_step.py --peer DIR --peer-python EXE --benchmark-json FILE

As a program (`python bench/dreamer_step.py FIELDS`) it is the process that is timed, with the devices that
`forethought train` uses; FIELDS are those of Config as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import harness

PEER = Path(__file__).with_name("peer_dreamerv3.py")
FIELDS: dict[str, dict[str, Any]] = {
    "1m": {},
    "batch 8": dict(batch=8),
    "length 32": dict(length=32, starts=32),
    "horizon 8": dict(horizon=8),
    "starts 16": dict(starts=16),
    "1 device": dict(devices=1),
    "12m": dict(preset="12m"),
    "cpu": dict(preset="cpu"),
    "cpu, 1 device": dict(preset="cpu", devices=1),
}


def test_update_beside_the_official_one(benchmark: Any, request: pytest.FixtureRequest) -> None:
    """The bar: at most 0.55 of the time of the official update."""
    directory, python = (request.config.getoption(name) for name in ("--peer", "--peer-python"))
    if directory is None or python is None:
        pytest.skip("needs --peer and --peer-python")
    peer, ours, theirs = harness.Worker([python, str(PEER), directory, "time"]), harness.Worker.ours(__file__, "{}"), []
    assert peer.facts["parameters"] == ours.facts["parameters"]
    benchmark.pedantic(ours.work, setup=lambda: theirs.append(peer.work()), rounds=15, warmup_rounds=2)
    theirs = sorted(theirs[2:])
    ratio = benchmark.stats.stats.median / theirs[len(theirs) // 2]
    benchmark.extra_info.update(
        ratio=ratio, peer_seconds=theirs, peer=peer.facts | peer.close(), ours=ours.facts | ours.close()
    )
    print(f"\nours {benchmark.stats.stats.median * 1e3:.0f} ms, official {theirs[len(theirs) // 2] * 1e3:.0f} ms, "
          f"ratio {ratio:.3f}")  # fmt: skip
    assert ratio <= 0.55


@pytest.mark.parametrize("name", FIELDS)
def test_update(benchmark: Any, name: str) -> None:
    worker = harness.Worker.ours(__file__, json.dumps(FIELDS[name]))
    benchmark.pedantic(worker.work, rounds=7, warmup_rounds=2)
    benchmark.extra_info.update(worker.facts | worker.close())


TRICKS = {
    "two devices": dict(devices=1),
    "chunked": dict(without="chunked"),
    "inversion": dict(without="inversion"),
    "computing anew": dict(preset="cpu", without="computing anew"),
}
"""The tricks of docs/performance.md, and how to do without each."""


@pytest.mark.parametrize("trick", TRICKS)
def test_trick(benchmark: Any, trick: str) -> None:
    """An update with all of them and one without the trick take turns."""
    fields = {name: x for name, x in TRICKS[trick].items() if name == "preset"}
    full, lacking = harness.Worker.ours(__file__, json.dumps(fields)), []
    without = harness.Worker.ours(__file__, json.dumps(TRICKS[trick]))
    benchmark.pedantic(full.work, setup=lambda: lacking.append(without.work()), rounds=15, warmup_rounds=2)
    lacking = sorted(lacking[2:])
    ratio = lacking[len(lacking) // 2] / benchmark.stats.stats.median
    benchmark.extra_info.update(ratio=ratio, without_seconds=lacking, **full.facts | full.close())
    without.close()
    print(f"\nwithout {trick}: x{ratio:.3f}")


def leave_out(trick: str) -> None:
    """Puts what anybody would write first in the place of one of the tricks of docs/performance.md."""
    import jax
    import jax.numpy as jnp

    from forethought.ops import dists, loops

    def whole(loss: Any, params: Any, inputs: Any, data: Any) -> Any:
        rows = jax.tree.leaves(inputs)[0].shape[0]
        return loss(params, inputs, jax.tree.map(lambda x: x[:rows], data))

    def gumbel(probs: Any, *, key: Any) -> Any:
        sample = jax.nn.one_hot(jax.random.categorical(key, jnp.log(probs)), probs.shape[-1])
        return sample + (probs - jax.lax.stop_gradient(probs))

    place, name, plain = {
        "chunked": (loops, "chunked", whole),
        "inversion": (dists, "straight_through", gumbel),
        "computing anew": (jax, "checkpoint", lambda function: function),
    }[trick]
    setattr(place, name, plain)


def main(preset: str = "1m", devices: int = 0, without: str | None = None, **fields: Any) -> None:
    from forethought import devices as devices_module

    devices_module.cpu_devices(devices or None)
    import equinox as eqx
    import jax
    import numpy as np

    from forethought.algos import dreamer
    from forethought.tree import num_params
    from forethought.types import Box, PerStep, Spec, Step, TimeStep

    obs = {"height": Box((1,)), "orientations": Box((14,)), "velocity": Box((9,))}
    spec = Spec("walker-walk", obs, Box((6,), low=-1.0, high=1.0))
    cfg = dreamer.Config(**(dreamer.PRESETS[preset] | fields))
    num, rng = devices_module.sharing(cfg.batch), np.random.default_rng(0)
    if without is not None:
        leave_out(without)
    shape = (cfg.batch, cfg.length)
    normal = lambda *more: rng.normal(size=(*shape, *more)).astype(np.float32)  # noqa: E731
    last = np.zeros(shape, bool)
    last[::4, cfg.length // 2 - 1] = True
    step = TimeStep(
        {name: normal(*space.shape) for name, space in obs.items()}, normal(), np.ones(shape, np.float32),
        np.roll(last, 1, 1), last, np.ones(shape, np.float32), np.zeros(shape, np.float32),
    )  # fmt: skip
    zero = np.zeros(shape, np.int32)
    rows = Step(step, np.tanh(normal(6)), normal(), zero, zero)

    state = dreamer.init(cfg, spec, key=jax.random.key(0))
    arrays, static = eqx.partition(state, eqx.is_array)
    axis = devices_module.axis(num)

    def update(arrays: Any, rows: Step, key: Any) -> Any:
        agent, metrics = dreamer.update(
            cfg, eqx.combine(arrays, static), axis.share(rows), PerStep(cfg.gamma), key=key, axis=axis
        )
        return eqx.filter(agent, eqx.is_array), metrics

    run = jax.jit(devices_module.replicated(update, num), donate_argnums=0)
    held, rows, key = devices_module.spread((arrays, rows, jax.random.key(1)), num)

    def work() -> None:
        nonlocal held
        held = jax.block_until_ready(run(held, rows, key))[0]

    work()  # compiles
    harness.serve(work, parameters=num_params(state.params), devices=num, jax=jax.__version__)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
