"""Environments of one's own by name, and what is said of those that cannot be made."""

import sys

import gymnasium
import host_envs
import pytest

from forethought.envs import EnvironmentFault, HostBatch, control, make
from forethought.envs.check import check
from forethought.envs.pure import Repeated
from forethought.types import Spec

MODULE = """
import dataclasses, gymnasium, numpy as np
from forethought.envs import control
from forethought.envs.distractor import Distractor

class Still(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward=1.0):
        self.value = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.value, False, False, {}

def limited(limit, **kwargs):
    return gymnasium.wrappers.TimeLimit(Still(**kwargs), limit)

class Swing(control.Pendulum):
    pass

def swing(limit):
    return Distractor(horizon=limit)

def lost():
    return {}["gone"]

def words():
    return {}

number = 3
gymnasium.register("OwnStill-v0", entry_point="own_envs:Still", max_episode_steps=7)
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_envs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield
    sys.modules.pop("own_envs", None)
    gymnasium.registry.pop("OwnStill-v0", None)


def test_an_id_of_a_module_is_registered_by_importing_it():
    before = list(sys.path)
    assert make("own_envs:OwnStill-v0").spec.time_limit == 7
    assert check("own_envs:OwnStill-v0", steps=21).ok
    assert sys.path == before


@pytest.mark.parametrize("processes", [0, 2])
def test_a_class_or_function_of_a_module_makes_a_host_environment(processes):
    env = make("own_envs:limited", num=2, processes=processes, limit=5, reward=0.5)
    assert isinstance(env, HostBatch) and env.spec.time_limit == 5
    env.reset()
    env.send(env.reset().first.astype("int32"))
    assert env.recv().reward.tolist() == [0.5, 0.5]
    env.close()
    assert make("own_envs:Still").spec.time_limit is None


def test_a_class_or_function_of_a_module_makes_a_pure_environment():
    assert isinstance(make("own_envs:Swing"), control.Pendulum)
    assert make("own_envs:swing", limit=9, action_repeat=2).spec.time_limit == 5  # 9 / 2, rounded up
    assert check("own_envs:swing", steps=27, limit=9).time_limit == 9


@pytest.mark.parametrize(
    "name, message",
    [
        ("own_envs:Stil", "'own_envs:Stil' is unknown; nearest: own_envs:Still"),
        ("no_envs:Still", "the module 'no_envs' cannot be imported: ModuleNotFoundError: No module named 'no_envs'"),
        ("own_envs:number", "'own_envs:number' is a int; give a class or function"),
        ("own_envs:words", "'own_envs:words' makes a dict; give a class or function that makes a gymnasium.Env"),
    ],
)
def test_names_that_make_nothing_are_refused_in_one_line(name, message):
    for call in (make, check):
        with pytest.raises(ValueError, match=message) as refused:
            call(name)
        assert "\n" not in str(refused.value)


class Stubborn(host_envs.Line):
    def __init__(self):
        raise KeyError("two\nlines")


@pytest.mark.parametrize(
    "env, kwargs, message",
    [
        (Stubborn, {}, "^Stubborn: making it raised KeyError: 'two.*lines'$"),
        ("own_envs:lost", {}, "^own_envs:lost: making it raised KeyError: 'gone'$"),
        ("own_envs:OwnStill-v0", {"rewrd": 2}, "^own_envs:OwnStill-v0: making it raised TypeError: .*rewrd"),
        ("jax/pendulum", {"lenth": 2}, "^jax/pendulum: making it raised TypeError: .*lenth"),
        ("dmc/cartpole-swingup", {"lenth": 2}, "^dmc/cartpole-swingup: making it raised TypeError: .*lenth"),
    ],
)
def test_what_is_raised_in_making_an_environment_is_a_fault_of_one_line(env, kwargs, message):
    for call in (make, check):
        with pytest.raises(EnvironmentFault, match=message) as fault:
            call(env, **kwargs)
        assert fault.value.kind == "raised" and "\n" not in str(fault.value)


def test_only_environments_with_decisions_of_one_unit_are_repeated():
    class Paced(control.Pendulum):
        unit: str = "second"
        pace: float | None = 1.0

        @property
        def spec(self):
            return Spec("paced", {}, super().spec.action, unit=self.unit, duration=self.pace)

    assert Repeated(Paced(unit="decision"), 2).times == 2
    for env in (Paced(), Paced(unit="decision", pace=0.5), Paced(unit="decision", pace=None)):
        with pytest.raises(ValueError, match="paced: its decisions last .* can be repeated"):
            Repeated(env, 2)
