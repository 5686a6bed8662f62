"""Compares our DreamerV3 with its authors' implementation: same weights, same batch, no chance; number by number.

    python bench/dreamer_parity.py --peer DIR --peer-python EXE [--discrete] [--as-is]

DIR is a checkout of danijar/dreamerv3 at e3f0224 and EXE a python that can import it (bench/peer_dreamerv3.py runs
there). Our agent at preset 1m gets random weights, none of them zero, on an environment with the shapes of
walker-walk; weights and a synthetic batch go to the peer. Compared are every loss, the statistics of imagination, the
gradient of the total loss for every parameter, three steps of the optimiser, and the spread of initial weights. The
exit status is 0 if all agree within the tolerances below, else 1.

Sampling follows a rule on both sides: the likeliest class, and the mean plus a fixed share of the deviation. These
choices of ours differ by design and are settled on the peer's side; --as-is leaves all but the first as the authors
have them and so shows what they amount to:

    gamma is not in the target of the discount head        the peer's `contdisc` is off
    the reward of an episode's first row is not trained    the peer's loss is silenced there
    a dream's start weighs what its real row says          the peer's predicted continuation is replaced at the start
    a discrete actor is mixed with 1 % uniform             the peer's actor is given that, which its head leaves out

Windows start from the initial latent: the peer, which could start from stored latents, gets `is_first` at every row 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from forethought import nets
from forethought.algos import dreamer
from forethought.ops import dists
from forethought.ops.stats import ReturnScale
from forethought.tree import named_arrays
from forethought.types import Box, Discrete, PerStep, Space, Spec, Step, TimeStep

Named = dict[str, np.ndarray]

# float32 on both sides, which add in different orders, through recursions over 64 rows and 15 imagined steps. What
# agrees in meaning was within 1e-6 (losses) and 2e-5 (gradients). Constants that are off by a part in a thousand show:
# 0.999 free nats, a gamma of 0.9969 and the slow critic's weight as losses, the weight of the replay loss as gradients.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
# The optimiser's few operations are elementwise.
MOVE_TOLERANCE = 1e-5

OFFSETS = np.array([-1.5, -0.7, -0.2, 0.3, 0.9, 1.6], np.float32)
"""Deviations from the mean that are added to a normal's sample, by dimension of the action."""
FACTORS = np.array([0.1, -2.0, 0.5], np.float32)
"""Gradients of the three optimiser steps, in units of the parameters: the last two are clipped, at 0.3."""

TERMS = {
    "real/loss/dynamics": "loss/dyn",
    "real/loss/representation": "loss/rep",
    "real/loss/reward": "loss/rew",
    "real/loss/discount": "loss/con",
    "real/loss/replay_critic": "loss/repval",
    "imagined/loss/actor": "loss/policy",
    "imagined/loss/critic": "loss/value",
    "real/prior_entropy": "metric/dyn_ent",
    "imagined/entropy": "metric/ent/action",
    "imagined/return_scale": "scale",
}
"""Our metric and the peer's, where there is one for one."""


def spec(discrete: bool = False) -> Spec:
    """Walker-walk's shapes, or 6 discrete actions instead; keys in alphabetical order, in which the peer joins them."""
    obs: dict[str, Space] = {"height": Box((1,)), "orientations": Box((14,)), "velocity": Box((9,))}
    return Spec("walker-walk", obs, Discrete(6) if discrete else Box((6,), low=-1.0, high=1.0))


def random_state(cfg: dreamer.Config, discrete: bool) -> dreamer.State:
    """A state whose arrays are all random, in ranges like those of a trained agent."""
    state = dreamer.init(cfg, spec(discrete), key=jax.random.key(1))
    rng = np.random.default_rng(1)
    # Far bins (up to 5e8) get next to no probability, or float32 sums over them would differ by more than is compared.
    # Rewards and values are not centred at 0, where means would cancel.
    slope = -2.0 * np.abs(np.linspace(-cfg.bin_limit, cfg.bin_limit, cfg.bins) - 0.8)

    def draw(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # The latent's logits are so small that divergences lie on both sides of the 1 nat that is free.
        wide = 0.34 if "prior/output" in name or "posterior/output" in name else 1.0
        noise = wide * rng.normal(size=x.shape)
        if name.endswith("scale"):
            return jnp.asarray(1.0 + 0.3 * noise, jnp.float32)
        if name.endswith("bias"):
            base = slope if x.shape == (cfg.bins,) else 2.0 if name.endswith("discount/output/bias") else 0.0
            return jnp.asarray(base + 0.2 * noise, jnp.float32)
        inputs = x.shape[-1 if x.ndim == 2 else -2]  # a dense layer's matrix is [out, in], a block's [in, out]
        return jnp.asarray(noise / inputs**0.5, jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, eqx.filter(state.params, eqx.is_inexact_array))
    slow = jax.tree_util.tree_map_with_path(draw, eqx.filter(state.slow_critic, eqx.is_inexact_array))
    return dreamer.State(
        eqx.combine(params, state.params),
        eqx.combine(slow, state.slow_critic),
        state.opt_state,
        ReturnScale(jnp.asarray(-1.5), jnp.asarray(2.5)),
        state.updates,
    )


def random_rows(batch: int, length: int, discrete: bool) -> Step:
    """Windows [B, T]: some begin an episode, some span a truncation, some a termination, one ends with one."""
    rng = np.random.default_rng(2)
    obs = {key: rng.normal(size=(batch, length, *box.shape)) * 2 for key, box in spec().obs.items()}
    action = rng.integers(6, size=(batch, length)) if discrete else rng.uniform(-1, 1, (batch, length, 6))
    reward = rng.normal(size=(batch, length))
    first, last, discount = np.zeros((batch, length), bool), np.zeros((batch, length), bool), np.ones((batch, length))
    first[0, 0] = True
    for window, row, kept in ((1, length // 3, 1.0), (2, length // 2, 0.0), (3, length - 1, 0.0)):
        last[window, row], discount[window, row] = True, kept
        first[window, row + 1 : row + 2] = True
    action[last] = 0
    f32 = {"reward": reward, "discount": discount, "duration": ~first, "reward_delay": 0 * reward}
    f32 = {key: jnp.asarray(x, jnp.float32) for key, x in f32.items()}
    time_step = TimeStep(
        {key: jnp.asarray(x, jnp.float32) for key, x in obs.items()},
        first=jnp.asarray(first),
        last=jnp.asarray(last),
        **f32,
    )
    zeros = jnp.zeros((batch, length), jnp.int32)
    actions = jnp.asarray(action, jnp.int32 if discrete else jnp.float32)
    return Step(time_step, actions, f32["reward_delay"], zeros, zeros)


def names(params: dreamer.Params) -> Iterator[tuple[str, jax.Array]]:
    """Every array of parameters or gradients, by the peer's name and in its layout."""

    def dense(name: str, kernel: jax.Array, bias: jax.Array) -> Iterator[tuple[str, jax.Array]]:
        yield f"{name}/kernel", kernel
        yield f"{name}/bias", bias.reshape(-1)

    def layer(name: str, norm: str, part: nets.Layer) -> Iterator[tuple[str, jax.Array]]:
        yield from dense(name, part.dense.weight.T, part.dense.bias)
        yield f"{norm}/scale", part.norm.scale

    def head(name: str, mlp: nets.MLP, outputs: dict[str, int]) -> Iterator[tuple[str, jax.Array]]:
        for i, part in enumerate(mlp.trunk.layers):
            yield from layer(f"{name}/mlp/linear{i}", f"{name}/mlp/norm{i}", part)
        places = np.cumsum(list(outputs.values()))[:-1].tolist()
        arrays = (jnp.split(x, places, -1) for x in (mlp.output.weight.T, mlp.output.bias))
        for output, *pieces in zip(outputs, *arrays, strict=True):
            yield from dense(f"{name}/{output}", *pieces)

    model, core = params.model, params.model.recurrence
    for i, part in enumerate((core.embed_deter, core.embed_stoch, core.embed_action)):
        yield from layer(f"dyn/dynin{i}", f"dyn/dynin{i}norm", part)
    yield from dense("dyn/dynhid0", core.hidden.weight, core.hidden.bias)
    yield "dyn/dynhid0norm/scale", core.norm.scale.reshape(-1)
    yield from dense("dyn/dyngru", core.gates.weight, core.gates.bias)
    for name, mlp in (("prior", model.prior), ("obs", model.posterior)):
        for i, part in enumerate(mlp.trunk.layers):
            yield from layer(f"dyn/{name}{i}", f"dyn/{name}{i}norm", part)
        yield from dense(f"dyn/{name}logit", mlp.output.weight.T, mlp.output.bias)
    for i, part in enumerate(model.encoder.layers):
        yield from layer(f"enc/mlp{i}", f"enc/mlp{i}norm", part)
    for name, x in head("dec", model.decoder, {f"vec/{code.key}/pred": code.size for code in model.codes}):
        # The peer's decoder reads stoch before deter.
        yield name, jnp.roll(x, -core.norm.scale.size, 0) if name == "dec/mlp/linear0/kernel" else x
    yield from head("rew", model.reward, {"head/logits": model.bin_count})
    yield from head("con", model.discount, {"head/logit": 1})
    parts = ("logits",) if isinstance(params.actor.action, Discrete) else ("mean", "stddev")
    yield from head("pol", params.actor.net, {f"head/action/{part}": 6 for part in parts})
    yield from head("val", params.critic.net, {"head/logits": model.bin_count})


def by_name(params: dreamer.Params) -> Named:
    """The arrays of `names`; none of ours is left out."""
    found = {name: np.asarray(x) for name, x in names(params)}
    ours = named_arrays(eqx.filter(params, eqx.is_inexact_array))
    assert sum(x.size for x in found.values()) == sum(x.size for x in ours.values())
    return found


def ours(cfg: dreamer.Config, state: dreamer.State, rows: Step) -> tuple[dict[str, Any], Named, np.ndarray]:
    """Our metrics, gradients by the peer's names, and the filtered `stoch` [T, B, S, C]."""

    def likeliest(probs: jax.Array, *, key: jax.Array) -> jax.Array:
        one_hot = jax.nn.one_hot(jnp.argmax(probs, -1), probs.shape[-1])
        return one_hot + (probs - jax.lax.stop_gradient(probs))

    def keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """An optimiser's step that moves nothing and puts the gradients where the optimiser's state should be."""
        return jax.tree.map(jnp.zeros_like, updates), updates

    key, model, step = jax.random.key(3), state.params.model, rows.time_step
    keeper = optax.GradientTransformation(lambda params: params, keep)
    # Here the chance is taken out of our sampling: how latents and how actions are drawn.
    with (
        mock.patch.object(dists, "straight_through", likeliest),
        mock.patch.object(dists.Categorical, "sample", lambda self, *, key: self.mode()),
        mock.patch.object(dists.Normal, "sample", lambda self, *, key: self.mean + self.scale * OFFSETS),
        mock.patch.object(dreamer, "_optimizer", lambda cfg: keeper),
    ):
        after, metrics = eqx.filter_jit(dreamer.update)(cfg, state, rows, PerStep(cfg.gamma), key=key)

        def observe(latent: Any, row: tuple[Any, ...]) -> tuple[Any, jax.Array]:
            latent = jax.vmap(lambda latent, *row: model.observe(latent, *row, key=key))(latent, *row)
            return latent, latent.stoch

        before = jnp.concatenate([jnp.zeros_like(rows.action[:, :1]), rows.action[:, :-1]], 1)
        inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (before, step.obs, step.first.at[:, 0].set(True)))
        initial = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(before), *x.shape)), model.initial())
        stoch = jax.lax.scan(observe, initial, inputs)[1]
    return metrics, by_name(eqx.combine(after.opt_state, state.params)), np.asarray(stoch)


def our_moves(cfg: dreamer.Config, params: dreamer.Params) -> Named:
    """Where our optimiser moves parameters whose gradients are the parameters times each of FACTORS in turn."""
    arrays = eqx.filter(params, eqx.is_inexact_array)
    optimizer = dreamer._optimizer(cfg)
    opt_state, moved = optimizer.init(arrays), jax.tree.map(jnp.zeros_like, arrays)
    for factor in FACTORS:
        step, opt_state = optimizer.update(jax.tree.map(lambda x, f=factor: f * x, arrays), opt_state, arrays)
        moved = jax.tree.map(jnp.add, moved, step)
    return by_name(eqx.combine(moved, params))


def theirs(args: argparse.Namespace, state: dreamer.State, rows: Step) -> Named:
    """What the peer found with our weights and our batch."""
    step = rows.time_step
    slow = dreamer.Params(state.params.model, state.params.actor, state.slow_critic)
    slow_critic = {f"slow{name}": x for name, x in by_name(slow).items() if name.startswith("val/")}
    scale = {"retnorm/lo/value": state.return_scale.low, "retnorm/hi/value": state.return_scale.high}
    batch = {
        **step.obs,
        "action": rows.action,
        "reward": step.reward,
        "is_first": step.first.at[:, 0].set(True),
        "is_last": step.last,
        "is_terminal": step.discount == 0,
    }
    given = {f"params/{name}": x for name, x in (by_name(state.params) | slow_critic | scale).items()}
    given |= {f"batch/{name}": x for name, x in batch.items()}
    given |= {"first": step.first, "offsets": OFFSETS, "factors": FACTORS, "adapt": not args.as_is}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(source, allow_pickle=False, **{name: np.asarray(x) for name, x in given.items()})
        driver = Path(__file__).with_name("peer_dreamerv3.py")
        command = [args.peer_python, driver, args.peer, "losses", source, target]
        done = subprocess.run([str(word) for word in command], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"the peer failed with status {done.returncode}:\n{done.stderr[-4000:]}")
        return dict(np.load(target))


def difference(a: Any, b: Any) -> float:
    """The norm of the difference, relative to the norm of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def compare_terms(metrics: dict[str, Any], peer: Named) -> bool:
    """Prints losses and statistics side by side; whether all agree."""
    keys = spec().obs
    pairs = {name: peer[other] for name, other in TERMS.items()} | {
        "real/loss/obs": sum(peer[f"loss/{key}"] for key in keys),
        "imagined/return": peer["metric/parity/returns"].mean(),
        "imagined/value": peer["metric/parity/values"][:, 1:].mean(),
        "update/grad_norm": np.sqrt(sum(np.sum(x**2) for name, x in peer.items() if name.startswith("grad/"))),
    }
    print(f"{'':28} {'ours':>14} {'theirs':>14} {'difference':>11}")
    fine = True
    for name, other in pairs.items():
        apart = difference(metrics[name], other)
        fine &= apart < LOSS_TOLERANCE
        mark = "" if apart < LOSS_TOLERANCE else "  <-- differs"
        print(f"{name:28} {float(metrics[name]):14.7g} {float(other):14.7g} {apart:11.1e}{mark}")
    return fine


def compare_arrays(title: str, found: Named, peer: Named, prefix: str, tolerance: float, full: bool) -> bool:
    """Prints how far arrays of one kind are apart: the worst, or all; whether all agree."""
    others = {name.removeprefix(prefix): x for name, x in peer.items() if name.startswith(prefix)}
    assert found.keys() == others.keys(), found.keys() ^ others.keys()
    apart = {name: difference(found[name], x) for name, x in others.items()}
    worst = sorted(apart, key=lambda name: -apart[name])
    off = [name for name in worst if not apart[name] < tolerance]
    print(f"\n{title}: {len(apart)} tensors, {len(off)} differ by more than {tolerance:g}; the worst:")
    for name in worst if full else off or worst[:3]:
        print(f"    {name:36} {apart[name]:9.1e}   norms {np.linalg.norm(found[name]):.4g}", end="")
        print(f" and {np.linalg.norm(others[name]):.4g}")
    return not off


def compare_spreads(fresh: Named, peer: Named) -> bool:
    """Prints where initial weights are not spread alike: by more than 6 standard errors of both estimates."""
    off = []
    for name, x in fresh.items():
        mine, other = float(np.std(x)), float(peer[f"initial/{name}"])
        if abs(mine - other) > 6 / x.size**0.5 * max(mine, other):
            off.append((name, mine, other))
    print(f"\ninitial weights: {len(fresh)} tensors, {len(off)} are spread differently")
    for name, mine, other in off:
        print(f"    {name:36} ours {mine:.4f}, theirs {other:.4f}")
    return not off


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of the authors' repository")
    parser.add_argument("--peer-python", required=True, help="a python that can import it")
    parser.add_argument("--batch", type=int, default=4, help="windows; at least 4")
    parser.add_argument("--length", type=int, default=64, help="rows per window")
    parser.add_argument("--discrete", action="store_true", help="6 discrete actions instead of 6 continuous ones")
    parser.add_argument("--as-is", action="store_true", help="leave the peer's choices that ours differ in by design")
    parser.add_argument("--full", action="store_true", help="print every tensor, not the worst alone")
    args = parser.parse_args()
    cfg = dreamer.Config(batch=args.batch, length=args.length, starts=args.length)
    state, rows = random_state(cfg, args.discrete), random_rows(args.batch, args.length, args.discrete)
    peer = theirs(args, state, rows)
    metrics, grads, stoch = ours(cfg, state, rows)
    flips = int((stoch.swapaxes(0, 1).argmax(-1) != peer["stoch"].argmax(-1)).sum())
    print(
        f"{flips} of {stoch.size // stoch.shape[-1]} filtered categoricals fell to another class (ties by rounding)\n"
    )
    fresh = dreamer.init(cfg, spec(args.discrete), key=jax.random.key(4)).params
    fine = [
        compare_terms(metrics, peer),
        compare_arrays("gradients", grads, peer, "grad/", GRADIENT_TOLERANCE, args.full),
        compare_arrays("optimiser", our_moves(cfg, state.params), peer, "move/", MOVE_TOLERANCE, args.full),
        compare_spreads(by_name(fresh), peer),
    ]
    print("\nall agree" if all(fine) else "\nNOT all agree")
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
