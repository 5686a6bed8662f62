"""Tries the cpu preset and its neighbours on pure environments, many seeds at once.

    python bench/cpu_preset.py --seeds 10 --out docs/results/cpu_preset.json

A variant changes one thing of BASE, or two. Every seed is trained for the same simulator steps and then plays greedily;
each finished (environment, variant) is written at once, and the same command goes on with those that are missing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from forethought import devices

devices.cpu_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from forethought import collect, envs  # noqa: E402
from forethought.algos import dreamer  # noqa: E402
from forethought.protocols import AbstractEnv  # noqa: E402
from forethought.studies.agents import train  # noqa: E402
from harness import provenance  # noqa: E402

STEPS = {"jax/pendulum": 6_000, "jax/cartpole-swingup": 10_000}
"""Simulator steps of training, at which the preset has begun to learn but is not done."""

BASE = dict(updates=8, starts=4, learning_rate=1e-3)
"""What the preset was when this was run; the last variant is what it became."""

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "block scale 1": dict(block_scale=1.0),
    "updates 16": dict(updates=16),
    "updates 4": dict(updates=4),
    "entropy 3e-3": dict(entropy=3e-3),
    "starts 16": dict(starts=16),
    "starts 1": dict(starts=1),
    "width 32": dict(deter=32, hidden=32, units=32),
    "width 128": dict(deter=128, hidden=128, units=128),
    "16 updates, 1 start": dict(updates=16, starts=1),
    "16 updates, 1 start, 5e-4": dict(updates=16, starts=1, learning_rate=5e-4),
}

EPISODES = 10


def returns(cfg: Any, env: AbstractEnv, agents: Any) -> np.ndarray:
    """The returns [S, EPISODES] of greedy episodes, in which no seed was trained."""

    def play(agent: Any, key: Any) -> Any:
        policy = dreamer.policy(cfg, agent, greedy=True)
        rows = collect.episode(env, policy, policy_version=agent.updates, key=key).time_step
        return jnp.sum(jnp.where(rows.first, 0.0, rows.reward))

    keys = jax.random.split(jax.random.key(1_000_000), EPISODES)
    return np.asarray(jax.jit(jax.vmap(jax.vmap(play, (None, 0)), (0, None)))(agents, keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", choices=STEPS, nargs="+", default=list(STEPS))
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    args = parser.parse_args()
    found = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    for variant in args.variant:
        for name in args.env:
            if any((r["env"], r["variant"], r["seeds"]) == (name, variant, args.seeds) for r in found):
                continue
            cfg = dreamer.Config(**(dreamer.PRESETS["cpu"] | BASE | VARIANTS[variant]))
            env: Any = envs.make(name, action_repeat=cfg.action_repeat)
            agents, seconds = train(cfg, env, STEPS[name], args.seeds)
            played = returns(cfg, env, agents).mean(1)
            result = dict(
                env=name, variant=variant, seeds=args.seeds, steps=STEPS[name], updates=int(agents.updates[0]),
                seconds_per_update=seconds, returns=[round(float(x), 2) for x in played],
            )  # fmt: skip
            found.append(result | provenance())
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"results": found}, indent=1) + "\n")
            print(f"{name} {variant}: {played.mean():.0f}, seeds {np.sort(played).round()}, {seconds * 1e3:.0f} ms, "
                  f"{cfg.updates} updates", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
