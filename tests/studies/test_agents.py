"""The study of alignment inside dreamer, tiny: it keeps what it has run, and measures what it says."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from forethought import envs
from forethought.algos import dreamer
from forethought.envs.control import Pendulum
from forethought.studies import agents

TINY = dict(
    deter=8, hidden=8, stoch=2, classes=2, units=8, blocks=2, layers=1, bins=21, bin_limit=4.0, batch=2, length=4,
    horizon=2, prefill=64, capacity=512, action_repeat=4,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(dreamer, "PRESETS", {"cpu": dreamer.PRESETS["cpu"] | TINY})
    monkeypatch.setattr(
        agents, "ARMS", {"own, partial": {"policy_encoder": "own", "alignment": "partial", "shared": 4}}
    )
    monkeypatch.setattr(agents, "DISTRACTORS", {"irrelevant sine": {"dims": 3}})
    monkeypatch.setattr(agents, "STEPS", {"jax/pendulum": 400})
    monkeypatch.setattr(agents, "EPISODES", 2)


def test_it_keeps_what_it_has_run(small, tmp_path, monkeypatch):
    said = []
    found = agents.run(tmp_path, seeds=2, progress=lambda *at: said.append(at))
    (one,) = found
    assert (one["env"], one["distractor"], one["arm"], one["seeds"]) == (
        "jax/pendulum",
        "irrelevant sine",
        "own, partial",
        2,
    )
    assert np.shape(one["return"]) == (2, 2) and np.shape(one["error/obs"]) == np.shape(one["error/distractor"]) == (
        2,
        15,
    )
    assert json.loads((tmp_path / "results.json").read_text())["results"] == found
    assert "own, partial" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr(agents, "train", None)  # it would be called if anything were run again
    assert agents.run(tmp_path, seeds=2, progress=lambda *at: None) == found


def test_the_error_of_the_distractor_is_measured_apart_and_against_its_own_spread(small):
    cfg = dataclasses.replace(dreamer.Config(**dreamer.PRESETS["cpu"]), policy_encoder="own")
    env = envs.make(Pendulum(), action_repeat=4, distract=dict(kind="irrelevant", dims=2, dynamics="noise"))
    agent = dreamer.init(cfg, env.spec, key=jax.random.key(0))
    found = jax.jit(lambda agent: agents.measure(cfg, env, agent, key=jax.random.key(1)))(agent)
    # Standard normal noise: its variance is 1, and an untrained model, which knows nothing of it, errs by as much.
    assert found["baseline/distractor"] == pytest.approx(1.0, abs=0.3)  # 2 x 51 x 2 draws
    assert (found["error/distractor"] > 0.5).all()
    assert found["return"].shape == (2,) and (found["return"] < 0).all() and np.isfinite(found["gap"])


def test_errors_of_several_keys_are_drawn_as_one_share(tmp_path):
    row = {
        "env": "jax/cartpole-swingup",
        "distractor": "irrelevant sine",
        "arm": "shared encoder",
        "return": [[1.0, 3]] * 2,
        "gap": [0.5, 0.7],
        "error/distractor": [[9.0]] * 2,
        "baseline/distractor": [3.0] * 2,
    }
    for key, error in (("position", 0.2), ("velocity", 0.6)):
        row |= {f"error/{key}": [[error, error]] * 2, f"baseline/{key}": [2.0, 1.0]}
    page = agents.write(tmp_path, [row]).read_text()
    # (0.2 / 2 + 0.6 / 2) / 2 = 0.2 and (0.2 + 0.6) / 2 = 0.4; their mean 0.3, and 3 for the distractor.
    assert ">0.3<" in page and ">3<" in page
