"""The page of an audit says what its numbers mean: checked on an audit made by hand, and in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forethought import audit_report
from test_report import browse, found, payloads, words

HOSTILE = "<script>alert(1)</script>"


def curve(*mean: float, reach: float = 0.01) -> dict[str, list[float]]:
    return {
        "mean": [*mean],
        "low": [x - reach for x in mean],
        "high": [x + reach for x in mean],
        "sem": [reach / 2 for _ in mean],
    }


def part(of: str, *excess: float) -> dict[str, Any]:
    """Excess over three depths, beside noise of 0.02 and baselines at 0.3 and 0.9."""
    error = [x + 0.02 for x in excess]
    noise, still, flat = (curve(*[x] * 3) for x in (0.02, 0.3, 0.9))
    return {"excess": curve(*excess), "noise": noise, "spread": curve(0.01, 0.02, 0.03), "error": curve(*error),
            "copy last": still, "mean": flat, "of": of}  # fmt: skip


def made() -> dict[str, Any]:
    """An audit of two policies over three imagined steps, with every part."""
    ends = {
        "excess": curve(0.01, 0.02, 0.03), "missed": curve(0, 0, 0), "real": curve(0.0, 0.1, 0.2),
        "model": curve(0.0, 0.15, 0.4), "at_limit": 0.07, "elsewhere": 0.0301,
        "confusion": {"both": 0.11, "missed": 0.12, "false": 0.13, "neither": 0.64},
    }  # fmt: skip
    sure = part("reward", 0.01, 0.02, 0.04)
    sure["noise"]["mean"][1] = 1e-15
    policies = {
        "agent": {"parts": {"height": part("height", 0.03, 0.095, 0.35), "reward": sure},
                  "termination": ends},
        HOSTILE: {"parts": {"height": part("height", 0.02, 0.2, 0.3), "reward": part("reward", 0.06, 0.07, 0.08)},
                  "termination": None},
    }  # fmt: skip
    dispersion = {
        name: {"spread": curve(0.1, 0.1, 0.1), "error": curve(0.2, 0.6, 0.5), "noise": curve(0.1, 0.1, 0.1)}
        for name in ("height", "reward")
    }
    covered = {"height": [[0.42, 0.5, 0.71], [0.2, 0.3, 0.4]], "reward": [[0.83, 0.8, 0.77], [0.45, 0.4, 0.35]]}
    coverage = {"nominal": [0.9, 0.5], "covered": covered, "error": {"height": 0.3, "reward": 0.1}, "samples": 19}
    plans = {
        "promised": [4.0, 5.0, 6.0, 7.0], "real": [3.5, 1.0, 6.5, 2.0], "gap": [0.5, 4.0, -0.5, 5.0],
        "recorded_promised": [1.0, 2.0, 3.0, 4.0], "recorded_real": [1.5, 2.5, 2.0, 3.0],
        "false": [False, True, False, True], "distance": [0.4, 1.7, 0.6, 1.2], "by_budget": [1.25, 2.25],
        "broken": 0, "horizon": 3, "scale": 3.0, "gap_mean": 0.75, "gap_low": 0.31, "gap_high": 1.19,
        "false_share": {"mean": 0.5, "low": 0.1},
        "worst": {"gap": 7.25, "promised": 8.5, "real": 1.25, "obs": {"height": [0.25, -3.5]}, "start": [3, 14],
                  "tried": 60, "refined": 15},
    }  # fmt: skip
    ranked = {
        "agent": {"promised": 8.0, "real": 3.0, "error": 0.5}, HOSTILE: {"promised": 6.0, "real": 5.25, "error": 0.75},
    }  # fmt: skip
    ranking = {"policies": ranked, "tau": -1.0, "regret": 1.0, "regret_error": 0.22, "range": 2.25, "chosen": "agent",
               "best": HOSTILE, "steps": 9}  # fmt: skip
    checkpoints = {
        "names": ["step 1", "step 2", "step 3"], "return": [10.0, 30.0, 20.0],
        "metrics": {"error of reward, one step": [0.9, 0.1, 0.4], "error of reward, 3 steps": [0.7, 0.7, 0.7]},
        "rank_correlation": {"error of reward, one step": -1.0, "error of reward, 3 steps": None},
    }  # fmt: skip
    relevance = {"weight": {"height[1]": 0.8, "height[0]": 0.2}, "relevant": [0.04, 0.05, 0.06],
                 "others": [0.01, 0.02, 0.09], "by": "value"}  # fmt: skip
    drift = {"episode": [0, 1, 2, 3, 4, 5, 6, 7], "error": [0.01, 0.02, 0.01, 0.02, 0.31, 0.3, 0.31, 0.3], "change": 4,
             "before": 0.015, "after": 0.305, "p": 0.0008}  # fmt: skip
    texts = {
        "error": "height: observations are predicted wrongly.",
        "overconfident": "height: it is more certain than right.",
        "ranking": "The model prefers the wrong policy.",
        "drift": "From episode 4 on the error is larger.",
    }
    findings = [{"kind": kind, "where": "height", "text": text, "depth": 3} for kind, text in texts.items()]
    findings[2]["depth"] = None
    uses = {
        "planning": {"status": "pass", "reasons": [], "safe_horizon": 3},
        "imagination": {"status": "fail", "reasons": [texts["error"], texts["drift"]], "safe_horizon": 1},
        "ranking policies": {"status": "fail", "reasons": [texts["ranking"]], "safe_horizon": None},
        "offline evaluation": {"status": "not measured", "reasons": [], "safe_horizon": None},
    }
    hypothesis = {"kind": "sign", "where": "action[2]", "error": 0.4, "explained": 0.37, "p": 0.042}
    region = {"where": "height[1] > 2", "inside": 0.5, "outside": 0.05, "share": 0.2, "p": 0.003}
    limits = {"error": 0.1, "reward": 0.1, "termination": 0.1, "exploitation": 0.25, "false_plans": 0.3, "regret": 0.15,
              "support": 0.5}  # fmt: skip
    return {
        "schema": 1,
        "about": {"env": f"pole{HOSTILE}", "horizon": 3, "episodes": 7, "starts": 21, "samples": 19, "seed": 5,
                  "policies": ["agent", HOSTILE], "tolerances": limits, "reality": "fresh replays"},
        "sections": {
            "error_by_depth": {"depth": [1, 2, 3], "policies": policies, "fresh": True, "episodes": 7, "starts": 21},
            "calibration": {"random": True, "fresh": True, "dispersion": dispersion, "coverage": coverage,
                            "members": {"members": 5, "copies": 2, "rank_correlation": [0.6, 0.5, None],
                                        "auroc": [0.9, 0.8, 0.7]}},
            "diagnosis": {"non_finite": {"reward": 12}, "hypotheses": [hypothesis], "region": region},
            "exploitation": plans, "ranking": ranking,
            "support": {"outside": [0.0, 0.3, 0.625], "median": [0.2, 0.5, 1.5], "radius": 1.0, "policy": "agent"},
            "mismatch": {"relevance": relevance, "checkpoints": checkpoints,
                         "codes": {"cosine": 0.93, "cka": 0.81, "angles": [0.99, 0.5]}},
            "drift": drift,
            "provenance": {"real/steps": {"value": 6000.0, "unit": "decisions"}, "staleness": 12.5, "note": HOSTILE},
        },
        "missing": {},
        "verdict": {"findings": findings, "uses": uses, "safe_horizon": 1, "horizon": 3, "status": "fail"},
    }  # fmt: skip


def said(audit: dict[str, Any], tmp_path: Path) -> str:
    return words(audit_report.write(audit, tmp_path / "audit.html"))


def plots(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html)]


def traces(plot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in plot["traces"]}


def test_the_verdict_comes_first_and_in_words(tmp_path: Path) -> None:
    text = said(made(), tmp_path)
    sentence = (
        "The world model may not be trusted for imagination and ranking policies; it may be trusted for planning; "
        "it was not judged for offline evaluation. Taken together, its predictions are shown to hold 1 of 3 steps "
        "ahead."
    )
    assert text.count(sentence) == 2  # at the head of the page and of its first section
    assert text.index(sentence) < text.index("Error by depth")
    assert "For planning \N{CHECK MARK} pass holds 3 of 3 steps ahead" in text
    assert "For imagination \N{BALLOT X} fail holds 1 of 3 steps ahead" in text
    assert "For offline evaluation not measured" in text
    assert "Found wrong 4 in 9 parts that were measured" in text
    assert "The model prefers the wrong policy. ranking policies" in text  # a finding, and what it rules out
    assert "height: it is more certain than right. none of these uses" in text
    assert "false plans 0.3" in text  # a tolerance


def test_sections_stand_in_order() -> None:
    assert list(audit_report.sections(made())) == [
        *("Verdict", "Error by depth", "Calibration", "Exploitation", "Ranking", "Support", "Mismatch"),
        *("Diagnosis", "Drift", "Provenance"),
    ]


def test_error_by_depth_tells_one_step_from_many() -> None:
    html = audit_report.sections(made())["Error by depth"]
    assert "one step ahead is that of reward (6 % of its variance, policy &#x27;&lt;script&gt;" in html
    assert "3 steps ahead that of height (35 % of its variance, policy &#x27;agent&#x27;)" in html
    # agent's height: upper bounds 0.04, 0.105, 0.36 against 0.1; errors 0.05, 0.115, 0.37 against 0.3
    other = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert f"to step 1 (agent), 1 ({other}); better than both baselines to step 2 (agent), 2 ({other})." in html
    reward, _, height, *_ = plots(html)
    assert traces(reward)["noise"]["y"] == [0.02, 0.0, 0.02]  # 1e-15 is rounding
    assert reward["levels"] == height["levels"] == {"tolerance": 0.1}
    assert traces(height)["excess"]["y"] == [0.03, 0.095, 0.35]
    assert traces(height)["excess"]["band"] == [[0.02, 0.085, 0.34], [0.04, 0.105, 0.36]]
    assert set(traces(height)) == {"error", "excess", "noise", "copy last", "mean"}
    for share in ("11 %", "12 %", "13 %", "64 %", "7 %", "3 %"):  # the confusion of ends
        assert f"<td>{share}</td>" in html
    ends = plots(html)[-1]
    assert [(trace["role"], trace["y"]) for trace in ends["traces"]] == [
        ("real", [0.0, 0.1, 0.2]),
        ("imagined", [0.0, 0.15, 0.4]),
    ]


def test_noise_that_was_not_measured_is_not_drawn() -> None:
    audit = made()
    audit["sections"]["error_by_depth"]["fresh"] = False
    html = audit_report.sections(audit)["Error by depth"]
    height = plots(html)[2]
    assert set(traces(height)) == {"error", "copy last", "mean"} and "band" in traces(height)["error"]
    assert "noise was not measured" in html and "Together with what noise explains, the largest" in html


def test_calibration_says_what_intervals_hold() -> None:
    html = audit_report.sections(made())["Calibration"]
    assert "should hold 90 % of what comes hold 42 % to 83 % one step ahead and 71 % to 77 % at the last step" in html
    assert "It is more certain than right: height." in html
    assert traces(plots(html)[1])["3 steps"]["y"] == [0.77, 0.35]
    assert "2 members are copies of others" in html
    audit = made()
    audit["sections"]["calibration"] |= {"random": False, "coverage": None, "members": None}
    html = audit_report.sections(audit)["Calibration"]
    assert "draws no random numbers" in html and html.count("Not measured") == 2


def test_exploitation_says_what_plans_bring() -> None:
    html = audit_report.sections(made())["Exploitation"]
    # the mean gap is 0.75 standard deviations of 3: (0.5 + 4 - 0.5 + 5) / 4 = 2.25
    assert "bring 2.25 less than promised on average, 0.75 standard deviations" in html
    assert "0.31 to 1.19; tolerance 0.25" in html and "50 % of them are false" in html
    scatter, gaps, effort, distance = plots(html)
    false = traces(scatter)["false plan"]
    assert (false["x"], false["y"], false["points"]) == ([5.0, 7.0], [1.0, 2.0], True)
    assert traces(scatter)["as promised"]["x"] == traces(scatter)["as promised"]["y"] == [1.0, 7.0]
    assert gaps["traces"][0]["middle"] == 2.25 and gaps["traces"][0]["interval"] == pytest.approx([0.93, 3.57])
    assert effort["traces"][0]["y"] == [1.25, 2.25] and effort["levels"] == {"tolerance": 0.75}
    assert distance["traces"][0]["box"] == [1.7, 1.2]  # of false plans
    assert "0.25, \N{MINUS SIGN}3.5" in html and "among 60 other real rows, 15 of them" in html


def test_ranking_says_what_the_choice_costs() -> None:
    html = audit_report.sections(made())["Ranking"]
    assert (
        "The model prefers &#x27;agent&#x27;, but &#x27;&lt;script&gt;alert(1)&lt;/script&gt;&#x27; earns most" in html
    )
    assert "costs 100 % of the range of real returns, with a standard error of 22 % (tolerance 15 %)" in html
    agent = traces(plots(html)[0])["agent"]
    assert (agent["x"], agent["y"], agent["band"]) == (
        [8.0],
        [3.0],
        [[2.0], [4.0]],
    )  # 3 less and more two errors of 0.5


def test_the_other_parts_in_a_sentence() -> None:
    html = audit_report.sections(made())
    assert "At most 62 % of the rows" in html["Support"] and "more than the tolerance of 50 %" in html["Support"]
    assert "4 % of the variance is unexplained 1 step ahead, on the other 1 %" in html["Mismatch"]
    assert "3 steps ahead, 6 % and 9 %: the model is worse where it matters, but only at first" in html["Mismatch"]
    assert "with the error of reward, one step (rank correlation \N{MINUS SIGN}1)" in html["Mismatch"]
    assert [trace["bar"] for trace in plots(html["Mismatch"])[0]["traces"]] == [0.8, 0.2]
    assert "No single mistake" in html["Diagnosis"] and "<td>37 %</td>" in html["Diagnosis"]
    assert "From episode 4 on the error is larger." in html["Drift"]
    assert plots(html["Drift"])[0]["shade"] == [3.5, 7.5]
    assert "What trained this model took 6,000 real steps." in html["Provenance"]


@pytest.mark.parametrize("name", list(made()["sections"]))
def test_a_part_that_is_missing_says_why(name: str) -> None:
    audit = made()
    del audit["sections"][name]
    audit["missing"][name] = f"there is no <b> for {name}"
    shown = audit_report.sections(audit)
    (title,) = [title for title, (part, _) in audit_report.PARTS.items() if part == name]
    assert shown[title] == f'<p class="missing">Not measured: there is no &lt;b&gt; for {name}.</p>'


def test_a_use_that_was_not_judged_says_why(tmp_path: Path) -> None:
    audit = made()
    del audit["sections"]["ranking"]
    audit["missing"]["ranking"] = "the model predicts no reward"
    assert "for its real one not measured the model predicts no reward" in said(audit, tmp_path)


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    path = audit_report.write(made(), tmp_path / "audit.html")
    assert HOSTILE not in path.read_text()
    assert words(path).count(HOSTILE) >= 8


def floats(tree: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Where numbers with a fraction stand, which JSON has as null where they are not finite."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from floats(value, *path, key)
    elif isinstance(tree, float):
        yield path


def without(audit: dict[str, Any], path: tuple[Any, ...]) -> None:
    where: Any = audit["sections"]
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = None


PLACES = list(floats(made()["sections"]))


def test_a_number_that_is_null_leaves_a_gap_wherever_it_is() -> None:
    for place in PLACES:
        audit = made()
        audit["sections"] = {place[0]: audit["sections"][place[0]]}
        without(audit, place)
        audit_report.sections(audit)
    audit = made()
    without(audit, ("error_by_depth", "policies", "agent", "parts", "height", "excess", "mean", 1))
    without(audit, ("error_by_depth", "policies", "agent", "parts", "height", "excess", "high", 0))
    excess = traces(plots(audit_report.sections(audit)["Error by depth"])[2])["excess"]
    assert excess["y"] == [0.03, None, 0.35] and excess["band"][1] == [0.03, 0.105, 0.36]
    without(audit, ("exploitation", "gap_mean"))
    assert "By how much plans break their promise is not known" in audit_report.sections(audit)["Exploitation"]


def test_an_audit_of_nothing_but_nulls_is_still_a_page(tmp_path: Path) -> None:
    audit = made()
    for place in PLACES:
        without(audit, place)
    assert "no number" in said(audit, tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema",), 2, "schema: 2 is not 1"),
        (("about",), None, "about: expected an object, found NoneType"),
        (("verdict", "uses"), ..., "verdict: uses: missing"),
        (("sections", "exploitation", "by_budget"), ..., r"exploitation: .*'by_budget'"),
        (("sections", "drift", "error"), "none", "drift: error: expected rows of numbers"),
        (("sections", "error_by_depth", "depth"), [1, 2], "reward: agent: error: 3 values for 2 depths"),
        (("sections", "ranking", "policies"), [1], "ranking: not as an audit writes it"),
    ],
)
def test_what_is_no_audit_is_refused_by_name(tmp_path: Path, place: tuple[str, ...], value: Any, message: str) -> None:
    audit: Any = made()
    where = audit
    for key in place[:-1]:
        where = where[key]
    if value is ...:
        del where[place[-1]]
    else:
        where[place[-1]] = value
    with pytest.raises(ValueError, match=f"audit.json: .*{message}"):
        audit_report.write(audit, tmp_path / "audit.html")
    assert not list(tmp_path.iterdir())


PROBE = """
document.querySelectorAll("details").forEach(fold => { fold.open = true; });
document.querySelector(".switch").click();
setTimeout(() => {
  const crosses = document.querySelector("#exploitation .plot").data.filter(trace => trace.marker?.symbol === "x");
  root.dataset.found = JSON.stringify({
    drawn: plots.filter(({ element }) => element.querySelector(":is(.scatterlayer, .boxlayer, .barlayer) path")).length,
    plots: plots.length, failed: !document.getElementById("failure").hidden,
    strangers: document.querySelectorAll("img, iframe, object, [onerror], .plot a[*|href]").length,
    axes: [...document.querySelectorAll("#error-by-depth .switch + div .plot")].map(plot => plot.layout.yaxis.type),
    marks: [...document.querySelectorAll("#error-by-depth .annotation-text")].map(text => text.textContent),
    level: document.querySelector("#error-by-depth .plot").layout.annotations[0].y,
    crosses: crosses.map(trace => trace.x.length), bars: document.querySelectorAll("#ranking .errorbar").length,
    width: root.getBoundingClientRect().width, wide: document.querySelector(".sheet").scrollWidth,
    beyond: [...document.querySelectorAll("figure, details, .lead, .tile, .plot")]
      .filter(element => element.getBoundingClientRect().right > root.getBoundingClientRect().right).length,
  });
}, 1500);
"""


@pytest.mark.parametrize(("width", "options"), [(1280, ()), (420, ("--blink-settings=preferredColorScheme=0",))])
def test_browser(tmp_path: Path, width: int, options: tuple[str, ...]) -> None:
    path = audit_report.write(made(), tmp_path / "audit.html")
    narrow = "" if width > 500 else f'root.style.width = "{width}px";'
    document, complaints = browse(path, tmp_path / "profile", *options, width=width, probe=narrow + PROBE)
    seen = found(document)
    assert complaints == [] and not seen["failed"] and seen["strangers"] == 0
    assert seen["drawn"] == seen["plots"] == len(payloads(path))
    assert seen["axes"] == ["log"] * 4 and seen["level"] == pytest.approx(-1)  # a tolerance of 0.1
    assert set(seen["marks"]) == {"tolerance"}
    assert seen["crosses"] == [2] and seen["bars"] == 2  # two false plans, and two policies' errors
    assert seen["width"] == width and seen["wide"] <= width and seen["beyond"] == 0
