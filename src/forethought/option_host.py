"""Options in environments on the host: the twin of `option_env.OptionEnv` over a `HostEnv`, and a Gymnasium wrapper.

Both take the same steps of a run from `options.py`, compiled once; the environment's steps lie between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree
from safetensors.numpy import load, save

from forethought.envs.gym import GymSingle
from forethought.gate import Refused
from forethought.option_env import MAX_STEPS, Interrupt, legality
from forethought.options import Limits, OptionSet, Under, advanced, chosen, declared, summed
from forethought.protocols import AbstractOption, HostEnv
from forethought.tree import named_arrays, select
from forethought.types import Discount, EndReason, Spec, TimeStep


class Runner(eqx.Module):
    """The compiled steps of a batch of runs: who may start, how one begins, acts and goes on."""

    options: OptionSet
    rule: Discount
    limits: Limits
    interrupt: Interrupt | None
    fallback: bool = eqx.field(static=True)

    @eqx.filter_jit
    def legal(self, time_step: TimeStep) -> Any:
        return jax.vmap(lambda t: legality(self.options, t, self.fallback))(time_step)

    @eqx.filter_jit
    def begin(self, index: Any, where: Any, others: Under | None) -> Under:
        """Runs of the options chosen where the mask holds, and `others` elsewhere."""
        fresh = jax.vmap(lambda i: chosen(self.options, i))(index)
        return fresh if others is None else select(where, fresh, others)

    @eqx.filter_jit
    def act(self, under: Under, time_step: TimeStep, keys: Any) -> tuple[Under, Any]:
        """The runs with their carries after acting, and the actions [B]."""

        def one(run: Under, now: TimeStep, key: PRNGKeyArray) -> tuple[Under, Any]:
            act_key = jax.random.split(jax.random.fold_in(key, run.steps), 3)[0]
            carry, decision = self.options.act(run.index, run.carry, now, key=act_key)
            return dataclasses.replace(run, carry=carry), decision.action

        return jax.vmap(one)(under, time_step, keys)

    @eqx.filter_jit
    def arrive(self, under: Under, before: Under, arrived: TimeStep, running: Any, keys: Any) -> Under:
        """The runs after the step that led to `arrived`; those that were not running stay as `before`."""

        def one(run: Under, now: TimeStep, key: PRNGKeyArray) -> Under:
            stop_key = jax.random.split(jax.random.fold_in(key, run.steps), 3)[2]
            gives_way = False if self.interrupt is None else self.interrupt(run.index, now)
            return advanced(self.options, run, now, self.rule, self.limits, gives_way, key=stop_key)

        return select(running, jax.vmap(one)(under, arrived, keys), before)

    @eqx.filter_jit
    def failed(self, under: Under, where: Any) -> Under:
        """The runs, of which those in `where` cannot go on."""
        reason = jnp.where(where, jnp.int32(EndReason.FAILURE), under.reason)
        return dataclasses.replace(under, reason=reason)

    @eqx.filter_jit
    def shown(self, under: Under, arrived: TimeStep) -> TimeStep:
        """The batch's time step of the level above: a run led there, but for an episode's first one."""
        legal = self.legal(arrived)
        found = jax.vmap(summed)(under, arrived, legal)
        return select(jnp.asarray(arrived.first), dataclasses.replace(arrived, legal=legal), found)


def runner(
    spec: Spec, options: Sequence[AbstractOption], rule: Discount, max_steps: int, max_time: float,
    fallback: AbstractOption | None, interrupt: Interrupt | None,
) -> Runner:  # fmt: skip
    """Raises ValueError as `OptionEnv` does."""
    limits = Limits.of(spec, rule, max_steps, max_time)
    everyone = OptionSet([*options, *([] if fallback is None else [fallback])])
    return Runner(everyone, rule, limits, interrupt, fallback is not None)


class HostOptions:
    """A `HostEnv` whose discrete action i starts `options[i]` in a `HostEnv` and lasts until that option is over.

    As `OptionEnv` over a pure environment; but an option that may not start, and a state in which none may, raise
    ValueError. Environment i's draws at its tick n come from `fold_in(fold_in(key, i), n)`. `runs` [B] tells how the
    latest runs went. A snapshot is taken between decisions.
    """

    spec: Spec
    num: int

    def __init__(
        self, env: HostEnv, options: Sequence[AbstractOption], rule: Discount, *, key: PRNGKeyArray,
        max_steps: int = MAX_STEPS, max_time: float = np.inf, fallback: AbstractOption | None = None,
        interrupt: Interrupt | None = None,
    ):  # fmt: skip
        self._runner = runner(env.spec, options, rule, max_steps, max_time, fallback, interrupt)
        self._env, self.num, self._key = env, env.num, key
        self.spec = declared(env.spec, len(self._runner.options))
        self._ticks = np.zeros(self.num, np.int32)
        self._at: TimeStep | None = None
        self._everyone = np.ones(self.num, bool)
        self.runs = self._runner.begin(np.zeros(self.num, np.int32), self._everyone, None)
        self._running = np.zeros(self.num, bool)

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        """Resets as the environment does; with a seed the options' draws begin anew too."""
        self._at = self._env.reset(where, seed=seed)
        if seed is not None:
            self._key, self._ticks = jax.random.key(seed), np.zeros(self.num, np.int32)
        mask = self._everyone if where is None else where
        self._ticks = self._ticks + mask
        self.runs = self._runner.begin(np.zeros(self.num, np.int32), mask, self.runs)
        return self._shown()

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None:
        """Starts the chosen options' first steps. Raises ValueError for one that may not start."""
        if self._at is None:
            raise ValueError(f"{self.spec.name}: it was never reset")
        mask = self._everyone if where is None else np.asarray(where, bool)
        action = np.where(mask, np.asarray(action), 0)
        legal = np.asarray(self._runner.legal(self._at))
        inside = (action >= 0) & (action < legal.shape[1])
        fine = inside & legal[np.arange(self.num), np.clip(action, 0, legal.shape[1] - 1)]
        if (mask & ~fine).any():
            i = int(np.flatnonzero(mask & ~fine)[0])
            may = np.flatnonzero(legal[i]).tolist()
            raise ValueError(f"{self.spec.name}: option {action[i]} may not start in environment {i}; {may} may")
        before, self.runs = self.runs, self._runner.begin(action.astype(np.int32), mask, self.runs)
        self._running = mask
        try:
            self._step()
        except Refused:
            self.runs, self._running = before, np.zeros(self.num, bool)
            raise

    def recv(self) -> TimeStep:
        """Runs all options under way to their ends; rows of others keep their latest time step.

        Where a gate refuses what an option does, all runs under way are over where they stand (failure): it raises
        Refused, and when it is called again it returns that time step."""
        keys = self._keys()
        while self._running.any():
            arrived = self._env.recv()
            self.runs = self._runner.arrive(self._acted, self.runs, arrived, self._running, keys)
            self._at = arrived
            still = self._running & ~np.asarray(self.runs.over)
            self._ticks = self._ticks + (self._running & ~still)
            self._running = still
            if still.any():
                try:
                    self._step()
                except Refused:  # nothing was sent for any of them
                    self.runs = self._runner.failed(self.runs, still)
                    self._ticks, self._running = self._ticks + still, np.zeros(self.num, bool)
                    raise
        return self._shown()

    def _step(self) -> None:
        assert self._at is not None
        self._acted, action = self._runner.act(self.runs, self._at, self._keys())
        self._env.send(np.asarray(action), where=self._running)

    def _keys(self) -> Any:
        each = jax.vmap(jax.random.fold_in, (None, 0))(self._key, jnp.arange(self.num))
        return jax.vmap(jax.random.fold_in)(each, jnp.asarray(self._ticks))

    def _shown(self) -> TimeStep:
        assert self._at is not None
        found = jax.tree.map(np.asarray, self._runner.shown(self.runs, self._at))
        if (stuck := ~found.legal.any(1) & ~found.last).any():
            i = int(np.flatnonzero(stuck)[0])
            raise ValueError(f"{self.spec.name}: no option may start in environment {i}; give a fallback")
        return found

    def snapshot(self) -> bytes | None:
        inner = self._env.snapshot()
        if inner is None:
            return None
        arrays = {name: np.asarray(x) for name, x in named_arrays(self._held()).items()}
        return save({"env": np.frombuffer(inner, np.uint8)} | {k: np.array(x, order="C") for k, x in arrays.items()})

    def restore(self, snapshot: bytes) -> TimeStep:
        found, held = load(snapshot), self._held()
        inner = found.pop("env").tobytes()
        if found.keys() != named_arrays(held).keys():
            raise ValueError(f"{self.spec.name}: these bytes are no snapshot of these options")
        leaves = [found[name] for name in named_arrays(held)]
        held = jax.tree.unflatten(jax.tree.structure(held), leaves)
        self._at = self._env.restore(inner)
        self._key, self._ticks = jax.random.wrap_key_data(jnp.asarray(held["key"])), held["ticks"]
        self.runs, self._running = jax.tree.map(jnp.asarray, held["runs"]), np.zeros(self.num, bool)
        return self._shown()

    def _held(self) -> dict[str, PyTree]:
        return {"key": jax.random.key_data(self._key), "ticks": self._ticks, "runs": self.runs}

    def close(self) -> None:
        self._env.close()


class GymOptions(gymnasium.Env):
    """A Gymnasium environment whose actions are options, for learners of any library.

    Observations are the environment's own. The reward is rbar; `info` holds 'steps' and 'duration' of the run, its
    'factor' (the product that a backup multiplies the next value with; 0 after a termination), 'reason' (the name of
    an `EndReason`) and 'legal', the mask of options that may start next. An option that may not start raises
    ValueError.
    """

    def __init__(
        self, env: gymnasium.Env, options: Sequence[AbstractOption], rule: Discount, *, max_steps: int = MAX_STEPS,
        fallback: AbstractOption | None = None, interrupt: Interrupt | None = None, seed: int = 0,
    ):  # fmt: skip
        self._seen: Any = None
        self._single = GymSingle(_Watched(env, self))
        self._spec = self._single.spec
        self._runner = runner(self._spec, options, rule, max_steps, np.inf, fallback, interrupt)
        self.observation_space = env.observation_space
        self.action_space = gymnasium.spaces.Discrete(len(self._runner.options))
        self._key, self._tick = jax.random.key(seed), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._key, self._tick = jax.random.key(seed), 0
        answer: Any = self._single.reset  # Gymnasium takes None for "go on with the stream"
        frame = answer(seed)
        self._now = _batched(frame, first=True)
        return self._seen, {"legal": np.asarray(self._runner.legal(self._now))[0]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        legal = np.asarray(self._runner.legal(self._now))[0]
        if not (0 <= int(action) < len(legal) and legal[int(action)]):
            may = np.flatnonzero(legal).tolist()
            raise ValueError(f"{self._spec.name}: option {action} may not start here; {may} may")
        running = np.ones(1, bool)
        run = self._runner.begin(np.asarray([action], np.int32), running, None)
        keys = jax.random.fold_in(self._key, self._tick)[None]
        self._tick += 1
        while not bool(run.over[0]):
            acted, chosen_action = self._runner.act(run, self._now, keys)
            self._now = _batched(self._single.step(np.asarray(chosen_action)[0, ...]))
            run = self._runner.arrive(acted, run, self._now, running, keys)
        terminated = bool(self._now.last[0] and self._now.discount[0] == 0)
        info = {
            "steps": int(run.steps[0]), "duration": float(run.duration[0]), "factor": float(run.factor[0]),
            "reason": EndReason(int(run.reason[0])).name, "legal": np.asarray(self._runner.legal(self._now))[0],
        }  # fmt: skip
        return self._seen, float(run.reward[0]), terminated, bool(self._now.last[0]) and not terminated, info

    def close(self) -> None:
        self._single.close()


class _Watched(gymnasium.Wrapper):
    """Keeps the latest native observation where `GymOptions` finds it."""

    def __init__(self, env: gymnasium.Env, keeper: GymOptions):
        super().__init__(env)
        self._keeper = keeper

    def reset(self, **given: Any) -> Any:
        answer = self.env.reset(**given)
        self._keeper._seen = answer[0]
        return answer

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self._keeper._seen = answer[0]
        return answer


def _batched(frame: Any, first: bool = False) -> TimeStep:
    """A single environment's frame as a time step of a batch of one."""
    last = frame.terminated or frame.truncated
    obs = {name: np.asarray(x)[None] for name, x in frame.obs.items()}
    reward, discount, took, delay = np.asarray([frame.reward, not frame.terminated, not first, 0], np.float32)[:, None]
    return TimeStep(obs, reward, discount, np.asarray([first]), np.asarray([last]), took, delay)
