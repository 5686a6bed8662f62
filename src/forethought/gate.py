"""A prediction is not a permission: an irreversible action passes only on evidence from the real world.

    action --> irreversible? --no-----------------------------------------> environment
                    |
                   yes --> every source asked --> decision on disk --yes--> environment
                                                        |
                                                        no --> Refused, and nothing of the batch is sent

The environment's Spec declares which actions are irreversible. Inside a compiled loop nobody can be asked, so there a
gated pure environment refuses when the loop is built.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_state_clean
from jaxtyping import Array, Int, PRNGKeyArray, PyTree
from safetensors.numpy import load, save

from forethought.envs.host import HostBatch
from forethought.envs.hosted import Hosted
from forethought.envs.pure import Repeated
from forethought.envs.waiting import WaitingHost
from forethought.evidence import Act as Act
from forethought.evidence import Ask as Ask
from forethought.evidence import Check as Check
from forethought.evidence import Evidence as Evidence
from forethought.evidence import Gate as Gate
from forethought.evidence import Refused as Refused
from forethought.evidence import Rule as Rule
from forethought.evidence import Source as Source
from forethought.gate_record import Record as Record
from forethought.gate_record import RecordError as RecordError
from forethought.gate_record import read as read
from forethought.protocols import AbstractEnv, HostEnv
from forethought.types import Discrete, Region, Spec, TimeStep, describe

SNAPSHOT_FORMAT = 1
Declared = tuple[int, ...] | tuple[Region, ...]


@overload
def Gated(env: AbstractEnv, gate: Gate, *, irreversible: Declared | None = None) -> GatedEnv: ...
@overload
def Gated(env: HostEnv, gate: Gate, *, irreversible: Declared | None = None, simulation: bool = False) -> GatedHost: ...
def Gated(
    env: Any, gate: Gate, *, irreversible: Declared | None = None, simulation: bool = False
) -> GatedEnv | GatedHost:
    """Puts a gate before an environment: `GatedEnv` before a pure one, `GatedHost` before a batch on the host.

    Args:
        irreversible: declared besides what the environment's own spec declares; () says that there is nothing else.
        simulation: of a host environment: what it does has no effect in the world, so that restoring it may do
            irreversible actions again.

    Raises:
        ValueError: nothing is declared; what is no environment; a pure environment declared a simulation, which it
            is anyway; or one that repeats its actions, so that one decision would let an act happen several times.
    """
    if not isinstance(env, AbstractEnv | HostEnv):
        kind = type(env).__name__
        raise ValueError(f"env: a {kind} is neither a pure nor a host environment; see forethought.make")
    spec = env.spec
    both: Any = dict.fromkeys((*spec.irreversible, *(irreversible or ())))
    declared: Any = tuple(sorted(both)) if isinstance(spec.action, Discrete) else tuple(both)
    if not declared and irreversible is None:
        raise ValueError(
            f"{spec.name}: declares nothing irreversible, so the gate would guard nothing; give irreversible=..., "
            "or irreversible=() if that is meant"
        )
    spec = dataclasses.replace(spec, irreversible=declared)
    if declared and (times := _repeats(env)) > 1:
        raise ValueError(f"{spec.name}: one decision does an irreversible action {times} times; gate it unrepeated")
    if not isinstance(env, AbstractEnv):
        return GatedHost(env, gate, spec, simulation)
    if simulation:
        raise ValueError(f"{spec.name}: simulation is for host environments; a pure one is one anyway")
    return GatedEnv(env, gate, declared)


def _repeats(env: Any) -> int:
    """How often one decision takes its action, as far as the environment is one of ours."""
    if isinstance(env, WaitingHost):
        return _repeats(env.env)
    if isinstance(env, HostBatch):
        return env._action_repeat
    pure = env.env if isinstance(env, Hosted) else env
    found = jax.tree.leaves(pure, is_leaf=lambda x: isinstance(x, Repeated)) if isinstance(pure, AbstractEnv) else []
    return max((x.times for x in found if isinstance(x, Repeated)), default=1)


class GatedState(eqx.Module):
    """The environment's state, and what a source of evidence is shown."""

    inner: PyTree
    obs: PyTree
    elapsed: Int[Array, ""]
    """Decisions taken in this episode."""


class GatedEnv(AbstractEnv):
    """A pure environment behind a gate. `step` can be called, but not traced where anything is irreversible.

    That any action of a compiled program might be the irreversible one is not known before it runs, so the program is
    refused when it is traced, whatever its actions will be. `reset` may be traced.
    """

    _env: AbstractEnv
    _gate: Gate = eqx.field(static=True)
    _declared: Declared = eqx.field(static=True)

    @property
    def spec(self) -> Spec:
        return dataclasses.replace(self._env.spec, irreversible=self._declared)

    def reset(self, *, key: PRNGKeyArray) -> tuple[GatedState, TimeStep]:
        inner, time_step = self._env.reset(key=key)
        return GatedState(inner, time_step.obs, jnp.zeros((), jnp.int32)), time_step

    def step(self, state: GatedState, action: Any, *, key: PRNGKeyArray) -> tuple[GatedState, TimeStep]:
        """Takes one action. Raises Refused for an irreversible one that the gate does not allow and wherever JAX
        traces or maps, and ValueError for what is no action of the space."""
        if self._declared:
            action = self._passed(state, action)
        inner, time_step = self._env.step(state.inner, action, key=key)
        return GatedState(inner, time_step.obs, state.elapsed + 1), time_step

    def _passed(self, state: GatedState, action: Any) -> Array:
        """The action, as it was judged."""
        spec = self.spec
        # A constant of a traced program is no tracer, so that the arguments alone do not tell.
        if not trace_state_clean():
            raise Refused(
                f"{spec.name}: has irreversible actions, and inside jit, vmap or scan nobody can be asked for "
                "evidence; step it outside of them, or gate it on the host: Gated(Hosted(env, ...), gate)"
            )
        taken = checked(spec, np.asarray(action)[None], np.ones(1, bool))
        if irreversible(spec, taken)[0]:
            obs = {name: _frozen(x) for name, x in state.obs.items()}
            act = Act(uuid.uuid4().hex, spec.name, None, None, int(state.elapsed), obs, _frozen(taken[0, ...]))
            self._gate.judge([act])
        return jnp.asarray(taken[0, ...])


class GatedHost:
    """A batch of host environments behind a gate: each irreversible action of each row is decided on alone.

    A refusal raises. There is no safe action in its place: `collect` records the action that the policy chose, so the
    row would tell of something that was not done. After `Refused` nothing was sent, and another action may be.

    Restoring never does an irreversible action again. A batch of which an episode under way has done one cannot be
    snapshot (None), unless it is declared a simulation: then it is done again, and the record says so.
    """

    spec: Spec
    num: int

    def __init__(self, env: HostEnv, gate: Gate, spec: Spec, simulation: bool):
        """See `Gated`, which makes it. Rows that were begun before have to be reset first."""
        self.spec, self.num = spec, env.num
        self._env, self._gate, self._simulation = env, gate, simulation
        self._obs: dict[str, np.ndarray] = {}
        self._episode, self._step = np.full(self.num, -1), np.zeros(self.num, int)
        self._ready, self._sent, self._begun = (np.zeros(self.num, bool) for _ in range(3))
        self._acts: list[dict[str, Any]] = []  # irreversible ones of the episodes under way

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        """Begins the next episode of the environments in `where`; a reset is not judged."""
        mask = self._mask(where)
        self._ready &= ~mask
        time_step = self._env.reset(None if where is None else mask.copy(), seed=seed)
        if where is None:
            self._sent = np.zeros(self.num, bool)
        self._episode[mask] = 0 if seed is not None else self._episode[mask] + 1
        self._step[mask], self._begun[mask] = 0, True
        self._acts = [act for act in self._acts if not mask[act["row"]]]
        return self._seen(time_step, mask)

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None:
        """Starts the steps of the environments in `where`, if all that is irreversible among them is allowed.

        Rows outside `where` are not judged, and not sent either: they go on as zeros.

        Raises:
            Refused: nothing was sent.
            ValueError: no action of the space, or an environment that is at no step; nobody was asked.
            OSError, RecordError: a decision could not be written down; nothing was sent.
        """
        mask = self._mask(where)
        if self._sent.any() or (mask & ~self._ready).any():
            why = "send was called twice; recv comes in between" if self._sent.any() else "reset it first"
            row = np.flatnonzero(self._sent if self._sent.any() else mask & ~self._ready)[0]
            raise ValueError(f"{self.spec.name}: environment {row} is at no step: {why}")
        taken = checked(self.spec, action, mask)
        acts = [self._act(int(row), taken) for row in np.flatnonzero(mask & irreversible(self.spec, taken))]
        if acts:
            self._gate.judge(acts)
        self._acts += [act.named() for act in acts]
        self._sent, self._ready = mask, self._ready & ~mask
        self._step[mask] += 1
        self._env.send(taken, where=mask.copy())

    def recv(self) -> TimeStep:
        """Waits for the started steps and returns the whole batch's time step."""
        sent, self._sent = self._sent, np.zeros(self.num, bool)
        return self._seen(self._env.recv(), sent)

    def snapshot(self) -> bytes | None:
        """All that `restore` needs; None where the environment cannot, or while an episode under way has done
        something irreversible and this is no simulation. Raises ValueError before every row was reset."""
        if not self._begun.all():
            raise ValueError(f"{self.spec.name}: a snapshot is taken of environments that were all reset")
        if self._acts and not self._simulation:
            return None
        inner = self._env.snapshot()
        if inner is None:
            return None
        counts = {"episode": self._episode.tolist(), "step": self._step.tolist()}
        about = {"format": SNAPSHOT_FORMAT, "irreversible": self._declared(), "acts": self._acts, **counts}
        parts = {"gate": json.dumps(about).encode(), "inner": inner}
        return save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()})

    def restore(self, snapshot: bytes) -> TimeStep:
        """Goes back to where `snapshot` was taken.

        Raises:
            Refused: its episodes have done something irreversible, and this is no simulation.
            ValueError: a snapshot of an environment without a gate, or with another declaration, under which its
                actions were never judged.
        """
        parts = load(snapshot)
        if parts.keys() != {"gate", "inner"}:
            raise ValueError(f"{self.spec.name}: these bytes are no snapshot of a gated environment")
        about = json.loads(parts["gate"].tobytes())
        for name, own in (("format", SNAPSHOT_FORMAT), ("irreversible", self._declared())):
            if about[name] != own:
                raise ValueError(f"{self.spec.name}: the snapshot's {name} is {about[name]}, this gate has {own}")
        acts = about["acts"]
        if acts and not self._simulation:
            at = f"environment {acts[0]['row']}, episode {acts[0]['episode']}, step {acts[0]['step']}"
            raise Refused(
                f"{self.spec.name}: {at}: the snapshot's episode has done the irreversible action {acts[0]['action']}, "
                "which restoring would do again"
            )
        self._gate.replayed(acts)
        self._ready[:] = self._sent[:] = False
        time_step = self._env.restore(parts["inner"].tobytes())
        self._acts, self._begun = acts, np.ones(self.num, bool)
        self._episode, self._step = np.array(about["episode"]), np.array(about["step"])
        return self._seen(time_step, self._begun)

    def close(self) -> None:
        """Closes the environments; the record stays open."""
        self._env.close()

    def _act(self, row: int, taken: np.ndarray) -> Act:
        obs = {name: _frozen(x[row, ...]) for name, x in self._obs.items()}
        at = (row, int(self._episode[row]), int(self._step[row]))
        return Act(uuid.uuid4().hex, self.spec.name, *at, obs, _frozen(taken[row, ...]))

    def _seen(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        # Copies, so that evidence is on what the environment showed, whatever the caller makes of it.
        self._obs = {name: np.array(x) for name, x in time_step.obs.items()}
        self._ready = self._ready | (rows & ~np.asarray(time_step.last))
        return time_step

    def _declared(self) -> Any:
        return describe(self.spec).get("irreversible", [])

    def _mask(self, where: np.ndarray | None) -> np.ndarray:
        mask = np.ones(self.num, bool) if where is None else np.array(where)
        if mask.shape != (self.num,) or mask.dtype != bool:
            raise ValueError(f"{self.spec.name}: where is {mask.dtype}{list(mask.shape)}; give bool[{self.num}]")
        return mask


def checked(spec: Spec, action: Any, mask: np.ndarray) -> np.ndarray:
    """A copy of the actions [B, ...] in the dtype of the space, zeros where `mask` [B] does not hold.

    Nothing is rounded, wrapped or clipped into an action: raises ValueError for other shapes, for floats or bools in
    place of integers, and in the rows of the mask for what is not finite or lies outside the space."""
    space, given = spec.action, np.array(action)
    kind, want = (np.integer, "integers") if isinstance(space, Discrete) else (np.floating, "floats")
    if given.shape != (len(mask), *space.shape) or not np.issubdtype(given.dtype, kind):
        found = f"{given.dtype}{list(given.shape)}"
        raise ValueError(f"{spec.name}: action is {found}; give {want} of shape {[len(mask), *space.shape]}")
    given[~mask] = 0
    if isinstance(space, Discrete):
        fits = (given >= 0) & (given < space.n)
    else:
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        low, high = np.where(bounded, -1, space.low), np.where(bounded, 1, space.high)
        fits = np.isfinite(given) & (given >= low) & (given <= high)
    wrong = np.flatnonzero(mask & ~fits.reshape(len(mask), -1).all(1))
    if wrong.size:
        raise ValueError(f"{spec.name}: action {given[wrong[0]]} of environment {wrong[0]} is none of the space")
    return given.astype(space.dtype)


def irreversible(spec: Spec, action: np.ndarray) -> np.ndarray:
    """Which of the actions [B, ...], in the dtype of the space, the spec declares irreversible: bool [B]."""
    flat, found = action.reshape(len(action), -1), np.zeros(len(action), bool)
    for declared in spec.irreversible:
        low, high = (declared.low, declared.high) if isinstance(declared, Region) else (declared, declared)
        found |= ((flat >= np.asarray(low, flat.dtype)) & (flat <= np.asarray(high, flat.dtype))).all(1)
    return found


def _frozen(array: Any) -> np.ndarray:
    """A read-only copy."""
    copy = np.array(array)
    copy.flags.writeable = False
    return copy
