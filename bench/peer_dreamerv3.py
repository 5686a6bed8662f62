"""Runs the DreamerV3 authors' own agent on walker-walk-shaped data, to time it or to hand out its losses.

This file is run by a python that has the authors' requirements; it imports nothing of ours.

    PEER_PYTHON bench/peer_dreamerv3.py DIR time                   what bench/dreamer_step.py asks for
    PEER_PYTHON bench/peer_dreamerv3.py DIR losses IN.npz OUT.npz  what bench/dreamer_parity.py asks for

DIR is a checkout of danijar/dreamerv3 at e3f0224. The agent has its size1m configuration, a batch of 16 windows of
64 rows (and one row of replay context, as its own replay delivers them), imagination over 15 steps, one CPU device
and float32; everything else is its default. Its code is left as it is: jax.jit alone is wrapped, since its calls pass
by position what newer versions of jax take by keyword only.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

OBS = {"height": (1,), "orientations": (14,), "velocity": (9,)}
ACTIONS = 6


def accept_positional_jit() -> None:
    """Lets jax.jit take its old positional arguments."""
    original = jax.jit
    names = ("in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnums")
    assert all(name in inspect.signature(original).parameters for name in names)

    def jit(fun: Any, *positional: Any, **keyword: Any) -> Any:
        return original(fun, **dict(zip(names, positional, strict=False)), **keyword)

    jax.jit = jit


def make_agent(directory: Path, batch: int, length: int, discrete: bool = False, **changes: Any) -> Any:
    """The peer's agent; `changes` go into the agent's part of its configuration."""
    accept_positional_jit()
    sys.path.insert(0, str(directory))
    import elements
    from dreamerv3.agent import Agent
    from ruamel.yaml import YAML

    presets = YAML(typ="safe").load((directory / "dreamerv3" / "configs.yaml").read_text())
    config = elements.Config(presets["defaults"]).update(presets["size1m"])
    config = config.update(
        {"jax.platform": "cpu", "jax.compute_dtype": "float32", "jax.prealloc": False, "batch_size": batch,
         "batch_length": length} | {f"agent.{name}": value for name, value in changes.items()}
    )  # fmt: skip
    # Its profiler would start at the 100th update; compiling ahead would compile its report function as well.
    flags = dict(config.jax) | {"profiler": False, "precompile": False}
    names = ("seed", "logdir", "batch_size", "batch_length", "replay_context", "report_length", "replica", "replicas")
    settings = elements.Config(**config.agent, jax=flags, **{name: config[name] for name in names})
    bools = {name: elements.Space(bool) for name in ("is_first", "is_last", "is_terminal")}
    obs = {name: elements.Space(np.float32, shape) for name, shape in OBS.items()}
    space = elements.Space(np.int32, (), 0, ACTIONS) if discrete else elements.Space(np.float32, (ACTIONS,), -1.0, 1.0)
    return Agent(obs | bools | {"reward": elements.Space(np.float32)}, {"action": space}, settings)


def synthetic(spaces: dict[str, Any], batch: int, rows: int) -> dict[str, np.ndarray]:
    """One batch of what the agent's train function wants; an episode begins in the middle of every fourth window."""
    rng = np.random.default_rng(0)
    data = {}
    for name, space in spaces.items():
        shape = (batch, rows, *space.shape)
        if name == "action":
            data[name] = rng.uniform(-1, 1, shape).astype(np.float32)
        elif np.issubdtype(space.dtype, np.floating):
            data[name] = rng.normal(size=shape).astype(np.float32)
        else:
            data[name] = np.zeros(shape, space.dtype)
    data["is_last"][::4, rows // 2 - 1] = True
    data["is_first"][::4, rows // 2] = True
    return data


def time_updates(directory: Path, answers: TextIO, batch: int = 16, length: int = 64) -> None:
    """Makes an update with the agent's own compiled train function for every line on standard input (see `harness`)."""
    agent = make_agent(directory, batch, length)
    host = synthetic(agent.spaces, batch, length + agent.config.replay_context)
    data = jax.device_put(host, agent.train_sharded)
    carry = agent.init_train(batch)
    pattern = ("dyn/", "enc/", "dec/", "rew/", "con/", "pol/", "val/")
    parameters = sum(int(x.size) for name, x in agent.params.items() if name.startswith(pattern))
    for update in itertools.count():
        seed = jax.device_put(np.array([0, update], np.uint32), agent.train_mirrored)
        jax.block_until_ready((agent.params, carry, seed))
        start = time.perf_counter()
        carry, _, _ = agent.train(carry, data | {"seed": seed})
        jax.block_until_ready((agent.params, carry))
        first = {"parameters": parameters, "jax": jax.__version__}  # the first update compiles
        print(json.dumps(time.perf_counter() - start if update else first), file=answers, flush=True)
        if not sys.stdin.readline():
            break
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), file=answers)


def sample_by_rule(offsets: np.ndarray) -> None:
    """Takes the chance out of sampling: the likeliest class, and the mean plus a fixed share of the deviation."""
    from embodied.jax import outs

    outs.Categorical.sample = lambda self, seed, shape=(): jnp.argmax(self.logits, -1)
    outs.Normal.sample = lambda self, seed, shape=(): self.mean + self.stddev * offsets


class RewardHead:
    """The agent's reward head, without a loss where `silent`."""

    def __init__(self, head: Any, silent: np.ndarray):
        self.head, self.silent = head, silent

    def __call__(self, *args: Any) -> Any:
        out = self.head(*args)
        loss = out.loss
        out.loss = lambda target: jnp.where(self.silent, 0.0, loss(target))
        return out


def align(model: Any, is_first: np.ndarray, is_terminal: np.ndarray, adapt: bool) -> None:
    """Reports what imagination found; with `adapt`, also settles the choices that are ours by design."""
    import dreamerv3.agent
    from embodied.jax import heads, outs

    original = dreamerv3.agent.imag_loss
    if adapt:
        model.rew = RewardHead(model.rew, is_first)  # a first row's reward is void in ours
        categorical = heads.Head.categorical

        def mixed(self: Any, x: Any) -> Any:
            plain = categorical(self, x)
            out = outs.Categorical(plain.logits, 0.01)  # the share of its own configuration, which its head leaves out
            out.minent, out.maxent = plain.minent, plain.maxent
            return out

        heads.Head.categorical = mixed

    def imag_loss(act: Any, rew: Any, con: Any, policy: Any, value: Any, *rest: Any, **options: Any) -> Any:
        if adapt:  # whether a dream's real start had terminated is known in ours and predicted in theirs
            con = con.at[:, 0].set(1.0 - is_terminal.reshape(-1).astype(np.float32))
        losses, out, metrics = original(act, rew, con, policy, value, *rest, **options)
        extra = {"returns": out["ret"], "values": value.pred(), "actions": act["action"]}
        return losses, out, metrics | {f"parity/{name}": x for name, x in extra.items()}

    dreamerv3.agent.imag_loss = imag_loss


def losses(directory: Path, source: Path, target: Path) -> None:
    """Evaluates the agent's loss and its gradient with the weights and the batch of one file, into another.

    The file's entries: `params/NAME` by the peer's names, `batch/KEY` [B, T, ...], `first` [B, T] (where an episode
    really began), `offsets` (see `sample_by_rule`), `factors` (see `moves`), and `adapt` (see `align`).
    """
    given = dict(np.load(source))

    def part(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}

    batch, params = part("batch/"), part("params/")
    size, length = batch["is_first"].shape
    # Without contdisc the head learns whether the episode goes on, and gamma is multiplied in: as in ours.
    agent = make_agent(directory, size, length, np.issubdtype(batch["action"].dtype, np.integer), contdisc=False)
    spreads = {f"initial/{name}": np.std(x) for name, x in jax.device_get(agent.params).items()}
    jax.config.update("jax_transfer_guard", "allow")
    model = agent.model
    weights = (*(f"{module.path}/" for module in model.modules), "slowval/", "retnorm/")
    expected = {name: x.shape for name, x in agent.params.items() if name.startswith(weights)}
    unlike = expected.items() ^ {name: x.shape for name, x in params.items()}.items()
    assert not unlike, f"weights that one side lacks or that have another shape: {sorted(unlike)}"
    sample_by_rule(given["offsets"])
    align(model, given["first"], batch["is_terminal"], bool(given["adapt"]))
    obs = {name: jnp.asarray(batch[name]) for name in agent.obs_space}
    action = jnp.asarray(batch["action"])
    before = {"action": jnp.concatenate([jnp.zeros_like(action[:, :1]), action[:, :-1]], 1)}

    import ninjax

    def evaluate() -> Any:
        carry = model.init_train(size)[:3]
        gradient = ninjax.grad(lambda: model.loss(carry, obs, before, training=True), model.modules, has_aux=True)
        _, _, grads, (_, _, outs, metrics) = gradient()
        return grads, outs["losses"], outs["repfeat"]["stoch"], metrics

    state = {name: jnp.asarray(params.get(name, x)) for name, x in agent.params.items()}
    new, (grads, terms, stoch, metrics) = jax.jit(ninjax.pure(evaluate))(state, seed=0)
    found = {f"loss/{name}": x.mean() for name, x in terms.items()} | {f"grad/{name}": x for name, x in grads.items()}
    found |= {f"metric/{name}": x for name, x in metrics.items()}
    found |= {f"move/{name}": x for name, x in moves(model, {k: params[k] for k in grads}, given["factors"]).items()}
    found |= {"stoch": stoch, "scale": new["retnorm/hi/value"] - new["retnorm/lo/value"]}
    np.savez(target, **spreads, **jax.device_get(found))


def moves(model: Any, arrays: dict[str, np.ndarray], factors: np.ndarray) -> dict[str, jax.Array]:
    """Where the agent's optimiser moves parameters whose gradients are the parameters times each factor in turn."""
    optimizer = model._make_opt(**model.config.opt)
    params = {name: jnp.asarray(x) for name, x in arrays.items()}
    state, moved = optimizer.init(params), {name: jnp.zeros_like(x) for name, x in params.items()}
    for factor in factors:
        step, state = optimizer.update({name: factor * x for name, x in params.items()}, state, params)
        moved = {name: moved[name] + x for name, x in step.items()}
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="a checkout of the authors' repository")
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("time", help="make and time an update for every line on standard input")
    compare = modes.add_parser("losses", help="evaluate losses and gradients for given weights and batch")
    compare.add_argument("source", type=Path)
    compare.add_argument("target", type=Path)
    args = parser.parse_args()
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # the agent prints; our standard output is the result alone
        if args.mode == "losses":
            losses(args.directory, args.source, args.target)
        else:
            time_updates(args.directory, answers)


if __name__ == "__main__":
    main()
