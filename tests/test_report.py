"""The report is opened in a real browser and read back; what it says is checked against numbers made by hand."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forethought import report

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'{{$title}}"

LOSSES = ("dynamics", "representation", "obs", "reward", "discount", "replay_value")


def build(directory: Path, *, rows: int = 300, episode: int = 200, sketch: bool = True, obs: int = 3) -> Path:
    """The files of a run on a pendulum-like environment; curves are shaped like those of a real run."""
    generator = np.random.default_rng(7)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "config.json", config())
    progress = np.linspace(0, 1, rows)
    with (directory / "metrics.jsonl").open("w") as file:
        for i, share in enumerate(progress):
            row: dict[str, Any] = {"step": 16 * (i + 1), "time/steps_per_second": 300 + 20 * generator.normal()}
            if i % 3 == 0:
                row["real/episode_return"] = -1200 + 1050 * (1 - np.exp(-6 * share)) + 80 * generator.normal()
            for n, name in enumerate(LOSSES):
                row[f"real/loss/{name}"] = (n + 1) * np.exp(-4 * share) * (1 + 0.2 * abs(generator.normal())) + 0.3
            row["real/loss/obs"] = None if i in (50, 51, 52) else row["real/loss/obs"]
            row |= {"real/staleness": 200 * share, "imagined/loss/actor": -2 * share + 0.1 * generator.normal()}
            row |= {"imagined/loss/critic": 2 * np.exp(-3 * share) + 0.2, "imagined/entropy": 1.4 - 2 * share}
            row |= {"imagined/return": -40 + 38 * share, "time/updates": 4.0 * i, "time/wall_seconds": 0.1 * (i + 1)}
            row |= {"time/seconds/learn": 0.07 * (i + 1), "time/seconds/act": 0.02 * (i + 1)}
            file.write(json.dumps(row) + "\n")
    write(directory / "evaluation.json", evaluation(generator, episode, sketch, obs))
    return directory


def config() -> dict[str, Any]:
    explained = {
        "real/episode_return": ["reward", "Sum of rewards of the episodes that training collected."],
        "real/loss/dynamics": ["nat", "How badly the prior foresees the posterior, after free nats."],
    }
    fields = {"model": {"units": 64, "latents": [8, 8]}, "gamma": 0.985, "rate": 1e-3}
    spec = {"name": "pendulum", "obs": {"obs": {"kind": "Box", "shape": [3]}}, "action": {"kind": "Box", "shape": [1]}}
    return {
        **{"algorithm": "dreamer", "env": "pendulum", "seed": 0, "preset": "cpu", "fields": fields, "spec": spec},
        **{"versions": {"jax": "0.8", "python": "3.11"}, "git": "0123abc", "schema": 1, "metrics": explained},
    }


def evaluation(generator: np.random.Generator, length: int, sketch: bool, dims: int) -> dict[str, Any]:
    def swing(time: np.ndarray, phase: float) -> tuple[np.ndarray, np.ndarray]:
        angle = 2.5 * np.cos(0.15 * time + phase) * np.exp(-time / 80)
        return angle, np.stack([np.cos(angle + i) * (1 + i) for i in range(dims)], axis=1)

    def acted(time: np.ndarray, phase: float) -> dict[str, Any]:
        angle, obs = swing(time, phase)
        rods = [[[0, 0, float(np.sin(a)), float(np.cos(a)), 0.06], [0, 0, 0, 0, 0.1]] for a in angle]
        obs = {"obs": obs.tolist()}
        return {"obs": obs, "reward": (-(angle**2)).tolist(), "sketch": rods if sketch else None}

    time, depth = np.arange(50), np.arange(1, 46)
    true, drift = swing(time, 0.0)[1], 0.02 * np.maximum(time - 4, 0)[:, None]
    pair = {"true": true.tolist(), "predicted": (true + drift * generator.normal(size=true.shape)).tolist()}
    reward, alive = (-(true[:, :1] ** 2)).ravel(), [1.0] * 50
    curve = {"model": 0.02 * depth, "model_sem": 0.003 * depth, "copy last": 0.9 * (1 - np.exp(-depth / 4.0))}
    curves = {name: values.tolist() for name, values in {**curve, "mean": np.full(45, 0.7)}.items()}
    loop = {"keys": {"obs": pair}, "reward": {"true": reward.tolist(), "predicted": (reward * 1.1).tolist()}}
    returns = {"agent": (-150, 20), "zero action": (-1200, 150), "random": (-1230, 120)}
    return {
        **{"step": 4800, "rule": "greedy", "env": "Pendulum-v1", "seeds": list(range(100, 140))},
        "returns": {name: (mean + std * generator.normal(size=40)).tolist() for name, (mean, std) in returns.items()},
        "open_loop": {"context": 5, "horizon": 45, **loop, "discount": {"true": alive, "predicted": [0.99] * 50}},
        "error_by_depth": {
            **{"depth": depth.tolist(), "episodes": 20, "unit": "mean absolute error"},
            **{"keys": {"obs": curves}, "reward": {**curves, "model_sem": None}},
        },
        "episode": {**acted(np.arange(length), 0.0), "action": np.sin(np.arange(length) / 9.0)[:, None].tolist()},
        "imagined_episode": acted(np.arange(50), 0.05),
    }


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def change(directory: Path, **parts: Any) -> None:
    path = directory / "evaluation.json"
    write(path, {**json.loads(path.read_text()), **parts})


def browse(path: Path, profile: Path, *, width: int = 1280, probe: str = "") -> tuple[str, list[str]]:
    """Opens a page in headless Chromium; returns its document after its scripts ran, and what they complained of.

    `probe` is script text appended to the page.
    """
    chromium = shutil.which("chromium")
    assert chromium, "the report's tests open it in a browser: apt-get install chromium"
    page = path.with_name("probed.html")
    page.write_text(path.read_text().replace("</body>", f"<script>{probe}</script></body>"))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += ["--disable-background-networking", f"--user-data-dir={profile}", "--virtual-time-budget=20000"]
    command += [f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def words(path: Path) -> str:
    """The page's own text as a reader sees it, without styles and scripts."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


def payloads(path: Path) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', path.read_text())
    return [json.loads(text) for text in found]
