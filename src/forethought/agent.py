"""A trained agent, as its run's directory holds it: the newest checkpoint, the snapshots before it, and its replay."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from forethought import checkpoint, packing
from forethought.auditing import episodes
from forethought.collect import blank, row_of
from forethought.envs import made_pure, make
from forethought.envs.hosted import Hosted
from forethought.protocols import AbstractEnv, AbstractPolicy, AbstractWorldModel
from forethought.replay import Replay
from forethought.settings import Settings, learner
from forethought.settings import read as read_settings
from forethought.types import Decision, Spec, Step, TimeStep

SNAPSHOTS = "snapshots"
"""The folder of a run that holds agents of earlier steps, for audits that look back."""


class Agent(AbstractPolicy):
    """A trained agent: its policy, the world model it learned, and where it came from.

    `carry, decision = agent(carry, time_step, key=key)` acts, from `agent.initial()` on.
    """

    policy: AbstractPolicy
    model: AbstractWorldModel
    spec: Spec = eqx.field(static=True)
    step: int = eqx.field(static=True)
    """Simulator steps behind the checkpoint."""

    def initial(self) -> PyTree:
        return self.policy.initial()

    def __call__(self, carry: PyTree, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[PyTree, Decision]:
        return self.policy(carry, time_step, key=key)


def load(directory: str | os.PathLike[str], *, greedy: bool = True) -> Agent:
    """Loads the agent of a run's newest good checkpoint. Raises ValueError or CheckpointError, in one line."""
    return loaded(directory, greedy=greedy)[0]


def loaded(directory: str | os.PathLike[str], *, greedy: bool) -> tuple[Agent, checkpoint.Checkpoint]:
    """The agent, and the checkpoint that it comes from."""
    found = checkpoint.latest(directory)
    settings, spec = read_settings(directory)
    if found is None:
        raise ValueError(f"{directory}: has no checkpoint yet")
    state = checkpoint.load(found, _template(settings, spec), part="agent")
    return _agent(settings, spec, state, found.step, greedy), found


def _template(settings: Settings, spec: Spec) -> Any:
    module, cfg = learner(settings.algorithm), settings.config()
    shapes = eqx.filter_eval_shape(lambda key: module.init(cfg, spec, key=key), jax.random.key(0))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)  # nothing is compiled only to be overwritten


def _agent(settings: Settings, spec: Spec, state: Any, step: int, greedy: bool) -> Agent:
    state = jax.tree.map(jnp.asarray, state)
    policy = learner(settings.algorithm).policy(settings.config(), state, greedy=greedy)
    return Agent(policy, state.params.model, spec, step)


def save_snapshot(root: Path, step: int, state: PyTree) -> None:
    """Keeps the agent of a step; a file of that name is replaced when the new one is whole."""
    path = root / SNAPSHOTS / f"{step:012d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_bytes(packing.pack({"agent": state}))
    os.replace(beside, path)


def snapshots(directory: str | os.PathLike[str], *, greedy: bool = True) -> dict[int, Agent]:
    """The agents of earlier steps that a run kept, by step. Raises ValueError naming a file that does not fit."""
    settings, spec = read_settings(directory)
    found = {}
    for path in sorted((Path(directory) / SNAPSHOTS).glob("*.safetensors")):
        try:
            state = packing.unpack(path.read_bytes(), _template(settings, spec), "agent")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        found[int(path.stem)] = _agent(settings, spec, state, int(path.stem), greedy)
    return found


def replayed(directory: str | os.PathLike[str], most: int = 200) -> list[Step]:
    """The newest whole episodes of a run's replay, at most so many, in the order in which they ended."""
    settings, spec = read_settings(directory)
    agent, found = loaded(directory, greedy=False)
    cfg = settings.config()
    example = eqx.filter_eval_shape(_example, agent.policy, spec)
    like = Replay(example, cfg.capacity // cfg.envs, cfg.envs)
    replay = checkpoint.load_replay(found, like)
    rows = jax.tree.map(np.asarray, replay.since(0))
    ended = []
    for b in range(cfg.envs):
        stream = jax.tree.map(lambda x, b=b: x[:, b], rows)
        last, whole = np.flatnonzero(stream.time_step.last), episodes.split(stream)
        ended += list(zip(last[len(last) - len(whole) :], whole, strict=True))
    return [episode for _, episode in sorted(ended, key=lambda x: x[0])][-most:]


def _example(policy: AbstractPolicy, spec: Spec) -> Step:
    """A row as training collects it."""
    step = blank(spec)
    return row_of(step, policy(policy.initial(), step, key=jax.random.key(0))[1], jnp.zeros((), jnp.int32))


def environment(settings: Settings, *, num: int, seed: int) -> Any:
    """The environment of a run, as it is trained in."""
    if settings.processes and made_pure(settings.env, settings.env_args) is not None:
        raise ValueError(f"{settings.env}: processes is {settings.processes}, but a pure environment takes 0")
    repeat = settings.config().action_repeat
    return make(
        settings.env, num=num, seed=seed, processes=settings.processes, action_repeat=repeat, **settings.env_args
    )


def elsewhere(settings: Settings, name: str) -> Settings:
    """The same settings in another environment, or in their own, without worker processes."""
    args = settings.env_args if name == settings.env else {}
    return dataclasses.replace(settings, env=name, env_args=args, processes=0)


def hosted(settings: Settings, name: str, num: int) -> Any:
    """An environment to evaluate in; a pure one is put behind the host's interface."""
    env = environment(elsewhere(settings, name), num=num, seed=0)
    return Hosted(env, num, key=jax.random.key(0)) if isinstance(env, AbstractEnv) else env


def check_fits(spec: Spec, settings: Settings, name: str) -> None:
    """Raises ValueError where environment `name` has other spaces than the one trained in."""
    env = hosted(settings, name, 1)
    env.close()
    what = lambda space: (type(space).__name__, space.shape, space.dtype, getattr(space, "n", None))  # noqa: E731
    ours, theirs = ({**one.obs, "the action": one.action} for one in (spec, env.spec))
    for key in ours | theirs:
        here, there = (what(spaces[key]) if key in spaces else "absent" for spaces in (ours, theirs))
        if here != there:
            raise ValueError(f"{env.spec.name}: '{key}' is {there}, but {here} in {spec.name}, where it was trained")
