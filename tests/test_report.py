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

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'$title <a href='https://host.invalid'>x</a>"

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

    time = np.arange(50)
    true, drift = swing(time, 0.0)[1], 0.02 * np.maximum(time - 4, 0)[:, None]
    pair = {"true": true.tolist(), "predicted": (true + drift * generator.normal(size=true.shape)).tolist()}
    reward, alive = (-(true[:, :1] ** 2)).ravel(), [1.0] * 50
    loop = {"keys": {"obs": pair}, "reward": {"true": reward.tolist(), "predicted": (reward * 1.1).tolist()}}
    returns = {"agent": (-150, 20), "zero action": (-1200, 150), "random": (-1230, 120)}
    return {
        **{"step": 4800, "rule": "greedy", "env": "Pendulum-v1", "seeds": list(range(100, 140))},
        "returns": {name: (mean + std * generator.normal(size=40)).tolist() for name, (mean, std) in returns.items()},
        "open_loop": {"context": 5, "horizon": 45, **loop, "discount": {"true": alive, "predicted": [0.99] * 50}},
        "episode": {**acted(np.arange(length), 0.0), "action": np.sin(np.arange(length) / 9.0)[:, None].tolist()},
        "imagined_episode": acted(np.arange(50), 0.05),
    }


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def change(directory: Path, **parts: Any) -> None:
    path = directory / "evaluation.json"
    write(path, {**json.loads(path.read_text()), **parts})


def browse(path: Path, profile: Path, *options: str, width: int = 1280, probe: str) -> tuple[str, list[str]]:
    """Opens a page, with the script `probe` at its end, in headless Chromium; returns the document after its scripts
    ran, and what the console said."""
    chromium = shutil.which("chromium")
    assert chromium, "the report's tests open it in a browser: apt-get install chromium"
    page = path.with_name("probed.html")
    page.write_text(path.read_text().replace("</body>", f"<script>{probe}</script></body>"))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += ["--disable-background-networking", f"--user-data-dir={profile}", "--virtual-time-budget=20000"]
    command += [f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def words(path: Path) -> str:
    """The page's own text as a reader sees it, without styles and scripts."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


def payloads(path: Path) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', path.read_text())
    return [json.loads(text) for text in found]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build(tmp_path_factory.mktemp("run"))
    assert report.write(directory) == directory / "report.html"
    return directory


# One for each metric: 1 return, 7 other real, 4 imagined, 2 of time; a box of returns; obs of 3 dimensions, reward
# and discount; the layers of time
PLOTS = (1 + 7 + 4 + 2) + 1 + (3 + 1 + 1) + 1

PROBE = """
const slider = document.querySelector("input[type=range]");
if (slider) { slider.value = 30; slider.dispatchEvent(new Event("input")); }
setTimeout(() => {
  const edge = root.getBoundingClientRect().right;
  const beyond = element => !element.closest(".plot") && element.getBoundingClientRect().right > edge;
  const inked = ({ width, height }, pen) => pen.getImageData(0, 0, width, height).data.some(Boolean);
  root.dataset.found = JSON.stringify({
    drawn: plots.filter(({ element }) => element.querySelector(".scatterlayer path, .boxlayer path")).length,
    inked: [...document.querySelectorAll(".scenes canvas")].map(canvas => inked(canvas, canvas.getContext("2d"))),
    states: [...document.querySelectorAll(".scenes canvas + h4")].map(state => state.textContent),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    strangers: document.querySelectorAll("img, iframe, object, [onerror], .plot a[*|href]").length,
    failed: !document.getElementById("failure").hidden,
    width: edge, beyond: [...document.querySelectorAll(".sheet *")].filter(beyond).length,
    clipped: plots.filter(({ element }) => element.querySelector(".main-svg").clientWidth > element.clientWidth).length,
    sheet: getComputedStyle(document.body).backgroundColor, font: plots[0]?.element.layout.font.color,
  });
}, 1000);
"""


def found(document: str) -> dict[str, Any]:
    match = re.search(r'data-found="([^"]*)"', document)
    assert match, "the probe did not finish"
    return json.loads(html.unescape(match[1]))


def test_browser(run: Path, tmp_path: Path) -> None:
    document, complaints = browse(run / "report.html", tmp_path, probe=PROBE)
    assert complaints == []
    assert "<title>dreamer on pendulum</title>" in document
    seen = found(document)
    assert not seen["failed"]
    assert seen["drawn"] == PLOTS
    assert seen["requests"] == []
    assert seen["inked"] == [True, True]
    assert seen["states"] == ["real, depth 0", "imagined, depth 26"]  # step 30, after steps 0 to 4 were seen
    assert seen["sheet"] == "rgb(244, 246, 248)" and seen["font"] == "#566172"


def test_phone_in_the_dark(run: Path, tmp_path: Path) -> None:
    # Chromium opens no window under 500 pixels here: the rules for phones hold there, and the page is made narrower
    narrow = 'root.style.width = "375px";' + PROBE
    dark = "--blink-settings=preferredColorScheme=0"
    seen = found(browse(run / "report.html", tmp_path, dark, width=375, probe=narrow)[0])
    assert seen["width"] == 375
    assert seen["beyond"] == 0 and seen["clipped"] == 0
    assert seen["sheet"] == "rgb(13, 18, 24)" and seen["font"] == "#9fabba"


def test_text_from_outside_is_text(tmp_path: Path) -> None:
    directory = build(tmp_path / "run", rows=3, episode=4, sketch=False)
    settings = config() | {"env": HOSTILE, "fields": {HOSTILE: HOSTILE}, "metrics": {f"real/{HOSTILE}": [HOSTILE] * 2}}
    write(directory / "config.json", settings)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 64, f"real/{HOSTILE}": 1, f"time/seconds/{HOSTILE}": 1}) + "\n")
    whole = json.loads((directory / "evaluation.json").read_text())
    loop, episode, dream = (
        {**whole[name], inner: {HOSTILE: whole[name][inner]["obs"]}}
        for name, inner in (
            ("open_loop", "keys"),
            ("episode", "obs"),
            ("imagined_episode", "obs"),
        )
    )
    parts = {"open_loop": loop, "episode": episode, "imagined_episode": dream}
    change(directory, **parts, returns={"agent": [1.0], HOSTILE: [2.0]}, rule=HOSTILE, env=HOSTILE, step=HOSTILE)
    path = report.write(directory)
    assert "<img src=x" not in path.read_text()
    document, complaints = browse(path, tmp_path, probe=PROBE)
    seen = found(document)
    assert complaints == [] and not seen["failed"]
    assert seen["strangers"] == 0 and seen["requests"] == []
    assert f"<title>{html.escape(f'dreamer on {HOSTILE}', quote=False)}</title>" in document
    assert words(path).count("onerror=alert(1)") >= 12


def test_first_moments_of_a_run(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"algorithm": "dreamer", "env": "pendulum"})
    text = words(report.write(tmp_path))
    assert text.count("Not measured:") == 7  # learning, audit, real, imagined, open loop, episode, timing
    assert "none yet" in text and "nothing is said about the agent" in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 16, "real/loss/obs": 2.5}\n{"step": 32, "rea')
    path = report.write(tmp_path)
    assert [payload["traces"][0]["y"] for payload in payloads(path)] == [[2.5]]
    assert words(path).count("Not measured:") == 6 and "cut off" in words(path)
    seen = found(browse(path, tmp_path / "profile", probe=PROBE)[0])
    assert seen["drawn"] == 1 and not seen["failed"]


def test_gaps_are_shown_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {})
    lines = [
        '{"step": 1, "real/loss/obs": 1}',
        '{"step": 2, "real/loss/obs": NaN}',
        '{"step": 3, "real/loss/obs": null}',
    ]
    lines += ['{"step": 4, "real/loss/obs": -Infinity}', '{"step": 5}', '{"step": 6, "real/loss/obs": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    path = report.write(tmp_path)
    (curve,) = payloads(path)[0]["traces"]
    assert curve["x"] == [1, 2, 3, 4, 6] and curve["y"] == [1, None, None, None, 2]
    assert "3 of 5 values were not finite" in words(path)


def test_long_runs_and_wide_observations_are_thinned_and_it_is_said(tmp_path: Path) -> None:
    path = report.write(build(tmp_path, rows=9000, episode=4500, sketch=False, obs=60))
    plots = [payload for payload in payloads(path) if "traces" in payload]
    assert max(len(trace.get("y", [])) for plot in plots for trace in plot["traces"]) <= 2000
    (film,) = [payload for payload in payloads(path) if "curves" in payload]
    assert film["length"] == 1500 and film["stride"] == 3  # 4500 frames, of which at most 2000 are kept
    assert len(film["curves"]) == 1 + 1 + 6
    assert sum(plot["x"] == "step" for plot in plots) == 6 + 1 + 1
    assert words(path).count("6 of 60 dimensions are drawn, those that vary most") == 2
    assert "One frame in 3 of 4500 is kept" in words(path)
    assert path.stat().st_size < 8e6


def test_dimensions_that_vary_most_are_drawn(tmp_path: Path) -> None:
    directory = build(tmp_path, rows=1, episode=2)
    true = np.array([[0.0] * 9, [0, 1, 0, 2, 3, 4, 0, 5, 6]])  # dimensions 0, 2 and 6 stand still
    loop = {"context": 1, "horizon": 1, "keys": {"wide": {"true": true.tolist(), "predicted": true.tolist()}}}
    change(directory, open_loop=loop)
    text = words(report.write(directory))
    assert re.findall(r"wide\[(\d)\]", text) == ["1", "3", "4", "5", "7", "8"]


@pytest.mark.parametrize(
    ("agent", "other", "says"),
    [
        # means 10 and 0, each with variance 2.5 over 5 episodes: two standard errors are 2 * sqrt(1) = 2
        ([8, 9, 10, 11, 12], [-2, -1, 0, 1, 2], "above random"),
        ([-2, -1, 0, 1, 2], [8, 9, 10, 11, 12], "below random"),
        ([-0.5, 0.5, 1.5, 2.5, 3.5], [-2, -1, 0, 1, 2], "not told apart from random"),
        ([0.1, 1.1, 2.1, 3.1, 4.1], [-2, -1, 0, 1, 2], "above random"),
        ([8, 9, 10, 11], [-2, -1, 0, 1, 2], "too few"),
    ],
)
def test_verdict(tmp_path: Path, agent: list[float], other: list[float], says: str) -> None:
    write(tmp_path / "config.json", {})
    write(tmp_path / "evaluation.json", {"step": 1, "rule": "greedy", "returns": {"agent": agent, "random": other}})
    assert says in words(report.write(tmp_path))


def test_the_audit_stands_after_learning(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {})
    titles = lambda: re.findall("<h2>(.*?)</h2>", report.write(tmp_path).read_text())  # noqa: E731
    assert titles() == ["Learning", "Audit", "Losses", "Open loop", "Episode", "Timing", "Configuration"]
    assert "forethought audit DIR" in words(tmp_path / "report.html")
    about = {name: 1 for name in ("env", "horizon", "episodes", "starts", "samples", "seed", "policies", "reality")}
    use = {"status": "pass", "reasons": [], "safe_horizon": 9}
    verdict = {"findings": [], "uses": {"planning": use}, "safe_horizon": 9, "horizon": 12, "status": "pass"}
    audit = {
        "schema": 1,
        "about": about | {"tolerances": {}},
        "sections": {},
        "missing": {"drift": "no episodes were given"},
    }
    write(tmp_path / "audit.json", audit | {"verdict": verdict})
    found = titles()
    assert found[:3] == ["Learning", "Verdict", "Error by depth"] and found[10:12] == ["Provenance", "Losses"]
    text = words(tmp_path / "report.html")
    assert "may be trusted for planning. Taken together, its predictions are shown to hold 9 of 12 steps ahead" in text
    assert "World model \N{CHECK MARK} pass holds 9 of 12 steps ahead" in text  # a tile
    assert "Drift Not measured: no episodes were given." in text and "forethought audit DIR" not in text
    write(tmp_path / "audit.json", audit | {"verdict": {}})
    with pytest.raises(ValueError, match="audit.json: verdict: findings, uses"):
        report.write(tmp_path)


def test_time_goes_on_where_a_run_was_resumed(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {})
    counters = [(16, 40.0, 30.0), (32, 60.0, 40.0), (48, 10.0, 8.0), (64, 30.0, 23.0)]
    rows = [{"step": step, "time/wall_seconds": wall, "time/seconds/learn": learn} for step, wall, learn in counters]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = words(report.write(tmp_path))
    assert "Wall time 1 min 30 s" in text  # 60 s, then 30 s after the counter began anew
    assert "learn 1 min 03 s 70.0%" in text and "everything else 27.0 s 30.0%" in text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"open_loop": {"context": 1, "keys": {"a": {"true": [1], "predicted": [1, 2]}}}}, "open_loop: a: true is"),
        (
            {"open_loop": {"context": 1, "keys": {"a": {"true": [[1], [1, 2]], "predicted": [1]}}}},
            "open_loop: a: true: e",
        ),
        ({"episode": {"obs": {}, "reward": [0], "sketch": [[[0, 0, 1, 1]]]}}, "sketch: expected segments"),
        ({"returns": {"agent": [[1], [2, 3]]}}, "returns: agent: expected rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, part: dict[str, Any], message: str) -> None:
    write(tmp_path / "config.json", {})
    write(tmp_path / "evaluation.json", part)
    with pytest.raises(ValueError, match=f"evaluation.json: .*{message}"):
        report.write(tmp_path)
    assert not list(tmp_path.glob("report.html*"))


def test_a_model_may_predict_no_observations(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {})
    dream = {"obs": None, "reward": [0, 1], "sketch": None}
    write(
        tmp_path / "evaluation.json", {"episode": {"obs": {"a": [1, 2]}, "reward": [0, 2]}, "imagined_episode": dream}
    )
    (film,) = payloads(report.write(tmp_path))
    assert [[line["role"] for line in curve["lines"]] for curve in film["curves"]] == [["real", "imagined"], ["real"]]


def test_returns_that_are_not_finite_are_said(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {})
    write(tmp_path / "evaluation.json", {"returns": {"agent": [1, None, 2, 3, 4], "random": [0, 0, 0, 0, 0]}})
    text = words(report.write(tmp_path))
    assert "Mean return, agent not finite" in text and "not told apart from random" in text
