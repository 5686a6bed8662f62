"""DMControl's suite, one task at a time, with exact copies of its state."""

from __future__ import annotations

import difflib
import os
from typing import Any

import numpy as np

from forethought.envs.single import AbstractSingle, EnvironmentFault, Frame, float32, scalar_reward
from forethought.envs.sketch import stick_figure
from forethought.types import Box, Space, Spec

MODEL_SEED = 0
"""Some tasks (lqr) draw their model when they are loaded: every copy of a task is the same one."""


class DMCSingle(AbstractSingle):
    """A task of the suite with its own observation keys; scalars become shape (1,).

    Reaching the time limit is a truncation; a task that ends itself with discount 0 has terminated.
    """

    copyable = True

    def __init__(self, domain: str, task: str, kwargs: dict[str, Any]):
        suite, self._mujoco = load()
        name = f"dmc/{domain}-{task}"
        if (domain, task) not in suite.ALL_TASKS:
            close = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
            raise ValueError(f"env: '{name}' is unknown; nearest: {', '.join(close or names()[:3])}")
        self._env = suite.load(domain, task, task_kwargs={"random": MODEL_SEED, **kwargs})
        if os.environ["MUJOCO_GL"] == "disable":
            # quadruped-escape sends its terrain to the renderer at every reset: there is none.
            self._env.physics._make_rendering_contexts = lambda: None
        obs, action = self._env.observation_spec(), self._env.action_spec()
        # DMControl writes "no bound" as MuJoCo's largest value.
        low = np.where(action.minimum <= -self._mujoco.mjMAXVAL, -np.inf, action.minimum)
        high = np.where(action.maximum >= self._mujoco.mjMAXVAL, np.inf, action.maximum)
        limit = self._env._step_limit
        spaces: dict[str, Space] = {key: Box(value.shape or (1,)) for key, value in obs.items()}
        self.spec = Spec(
            name,
            spaces,
            Box(action.shape, "float32", low.astype(np.float32), high.astype(np.float32)),
            time_limit=None if np.isinf(limit) else int(np.ceil(limit)),
        )
        self.native = {key: f"{value.dtype}{value.shape}" for key, value in obs.items()}
        self.native["action"] = f"{action.dtype}{action.shape} in [{action.minimum.min():g}, {action.maximum.max():g}]"
        self._action = action
        self._model = {name: array.copy() for name, array in self._arrays().items()}
        self._attributes = dict(vars(self._env.task))

    def reset(self, seed: int) -> Frame:
        self._env.task.random.seed(seed)
        return Frame(self._read(self._env.reset().observation))

    def step(self, action: np.ndarray) -> Frame:
        box = self.spec.action
        assert isinstance(box, Box)
        native = np.clip(np.asarray(box.native(action), np.float64), self._action.minimum, self._action.maximum)
        step = self._env.step(native)
        over, ended = step.last(), step.last() and step.discount == 0
        return Frame(
            self._read(step.observation), scalar_reward(step.reward), terminated=ended, truncated=over and not ended
        )

    def state(self) -> dict[str, np.ndarray]:
        """What the next step reads: physics, random state, and what the episode changed in model and task.

        Derived quantities are left out: `restore` computes them again. The integration state holds the solver's warm
        start, without which contacts come out differently in the last digits.
        """
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(self._mujoco.mj_stateSize(self._raw_model, kind))
        self._mujoco.mj_getState(self._raw_model, self._raw_data, physics, kind)
        random = self._env.task.random.get_state(legacy=False)
        arrays = {
            "physics": physics,
            "steps": np.asarray(self._env._step_count, np.int64),
            "ended": np.asarray(self._env._reset_next_step),
            "random/key": random["state"]["key"],
            "random/pos": np.asarray(random["state"]["pos"], np.int64),
            "random/has_gauss": np.asarray(random["has_gauss"], np.int64),
            "random/gauss": np.asarray(random["gauss"]),
        }
        changed = {n: a.copy() for n, a in self._arrays().items() if not np.array_equal(a, self._model[n])}
        arrays |= {f"model/{name}": array for name, array in changed.items()}
        for name, value in vars(self._env.task).items():
            if name in self._attributes and self._attributes[name] is value:
                continue
            array = np.array(value)
            if array.dtype.kind not in "biuf":
                raise EnvironmentFault(
                    "value", f"the task changed its attribute {name}, a {type(value).__name__}: no array form"
                )
            arrays[f"task/{name}"] = array
        return arrays

    def restore(self, state: dict[str, np.ndarray]) -> None:
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        for name, array in self._arrays().items():
            wanted = state.get(f"model/{name}", self._model[name])
            if not np.array_equal(array, wanted):
                array[:] = wanted
        task = self._env.task
        for name in set(vars(task)) - set(self._attributes):
            delattr(task, name)
        vars(task).update(self._attributes)
        for name in (name for name in state if name.startswith("task/")):
            value = state[name]
            setattr(task, name.removeprefix("task/"), value.copy() if value.ndim else value.item())
        key, position = state["random/key"], int(state["random/pos"])
        task.random.set_state(("MT19937", key, position, int(state["random/has_gauss"]), float(state["random/gauss"])))
        self._mujoco.mj_setState(self._raw_model, self._raw_data, state["physics"], kind)
        self._mujoco.mj_forward(self._raw_model, self._raw_data)
        self._env._step_count, self._env._reset_next_step = int(state["steps"]), bool(state["ended"])

    def sketch(self) -> np.ndarray | None:
        return stick_figure(self._raw_model, self._raw_data)

    def close(self) -> None:
        self._env.close()

    @property
    def _raw_model(self) -> Any:
        return self._env.physics.model.ptr

    @property
    def _raw_data(self) -> Any:
        return self._env.physics.data.ptr

    def _arrays(self) -> dict[str, np.ndarray]:
        own = {name: getattr(self._raw_model, name) for name in dir(self._raw_model) if not name.startswith("_")}
        return {name: value for name, value in own.items() if isinstance(value, np.ndarray) and value.size}

    def _read(self, obs: dict[str, Any]) -> dict[str, np.ndarray]:
        read = {}
        for key, space in self.spec.obs.items():
            read[key] = float32(f"observation '{key}'", np.asarray(obs[key])).reshape(space.shape)
        return read


def load() -> tuple[Any, Any]:
    """Imports dm_control's suite and MuJoCo without a window system, unless MUJOCO_GL asks for one."""
    os.environ.setdefault("MUJOCO_GL", "disable")
    try:
        import mujoco
        from dm_control import suite
    except ImportError as error:
        raise ImportError("dmc environments need dm_control: pip install 'forethought[control]'") from error
    return suite, mujoco


def names() -> list[str]:
    """Every task of the suite as 'dmc/DOMAIN-TASK'."""
    return [f"dmc/{domain}-{task}" for domain, task in load()[0].ALL_TASKS]
