"""The alignment study: its design, a small run that is stopped and goes on, and what is said of it."""

import json

import numpy as np
import pytest

from forethought import cli
from forethought.algos.aligned import Config
from forethought.studies import alignment, alignment_report, alignment_run
from forethought.studies.alignment import condition


def every(questions):
    return list(dict.fromkeys(c for pairs in questions.values() for pair in pairs for c in pair if c is not None))


def test_the_design_holds_what_it_is_to_hold():
    conditions = every(alignment.design())
    assert 100 <= len(conditions) <= 200
    assert len({c.name for c in conditions}) == len({c.file for c in conditions}) == len(conditions)
    has = lambda field: {str(getattr(c.factors, field)) for c in conditions}  # noqa: E731
    assert has("shared") >= {"0", "4", "8", "16", "24", "28", "32"}
    assert {round(float(x), 6) for x in has("weight")} >= {0.0, 0.05, 0.2, 1.0, 5.0}
    assert {f"{float(x):.0e}" for x in has("learning_rate")} >= {"3e-05", "1e-04", "3e-04", "1e-03", "3e-03", "1e-02"}
    for field in ("bounded", "frozen", "bootstrap", "moves_model", "moves_policy"):
        assert has(field) == {"True", "False"}, field
    assert {c.config.policy_loss for c in conditions} == set(alignment.POLICY_LOSSES)
    assert {c.config.partner for c in conditions} == {"policy", "random", "self"}
    for question, pairs in alignment.design().items():
        assert all(a != b for a, b in pairs) and len({a for a, _ in pairs}) == len(pairs), question


def test_a_condition_is_named_by_what_differs_from_its_base():
    assert condition("sound").name == "deterministic, sound, dual + partial"
    assert condition("literal", {"weight": 0.0}).name == "deterministic, literal, dual without alignment"
    assert condition("sound", {"shared": 32}, {"policy_loss": "imagined", "layer_norm": True}).name == (
        "imagined, sound, dual + full soft, layer_norm True"
    )
    # What a base or a default says already makes no other condition.
    assert condition("literal", {"bounded": False, "weight": 0.2}) == condition("literal")
    assert bool(condition("literal").factors.bounded) is False and bool(condition("sound").factors.bounded)
    assert condition("sound", {"stage": "dual InfoNCE"}).config == Config(stage="dual InfoNCE")


def test_a_study_goes_on_where_it_was_stopped_and_says_the_same(tmp_path, monkeypatch):
    questions = {"weight": alignment.design()["weight"][:2]}
    whole = alignment_run.run(tmp_path / "a", questions, seeds=2, episodes=20)

    class Stopped(Exception):
        pass

    def stop(done, of, what):
        if done:
            raise Stopped

    monkeypatch.setattr(alignment_run, "TOGETHER", 2)  # one condition in a call
    with pytest.raises(Stopped):
        alignment_run.run(tmp_path / "b", questions, seeds=2, episodes=20, progress=stop)
    assert len(list((tmp_path / "b/seeds").glob("*.npz"))) == 1
    again = alignment_run.run(tmp_path / "b", questions, seeds=2, episodes=20)
    said = [alignment_report.results(found, questions) for found in (whole, again)]
    assert [c["iqm"] for c in said[0]["conditions"]] == pytest.approx(
        [c["iqm"] for c in said[1]["conditions"]], rel=1e-4
    )
    with pytest.raises(ValueError, match="holds 2 seeds of 20 episodes, not 2 of 30"):
        alignment_run.run(tmp_path / "b", questions, seeds=2, episodes=30)
    (tmp_path / "b/seeds" / next(iter(whole)).file).write_bytes(b"PK torn")
    with pytest.raises(ValueError, match="not a whole file of this study"):
        alignment_run.run(tmp_path / "b", questions, seeds=2, episodes=20)


FIELDS = """name stage shared private weight policy_loss bounded target_networks frozen horizon_end learning_rate seeds
diverged iqm ci_low ci_high start end cosine model_error_1 model_error_5 exploitation_gap""".split()


def test_the_command_writes_results_a_page_and_every_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(alignment, "quick", lambda: {"weight": alignment.design()["weight"][:3]})
    out = tmp_path / "study"
    command = ["study", "alignment", "--quick", "--seeds", "2", "--episodes", "20", "--out", str(out), "--quiet"]
    assert cli.main([*command, "--json", str(tmp_path / "said.json")]) == 0
    said = json.loads((out / "results.json").read_text())
    for each in said["conditions"]:
        assert set(FIELDS) <= each.keys()
        assert (out / each["file"]).exists()
        assert each["ci_low"] is None  # of two seeds no interval is claimed
    assert said["references"].keys() == {
        "optimal", "optimal_bounded", "do_nothing", "random", "untrained", "evaluation_standard_error"
    }  # fmt: skip
    assert said["references"]["optimal"] == pytest.approx(3.9085, abs=1e-3)
    assert said["references"]["do_nothing"] == pytest.approx(3.3354, abs=1e-3)
    assert said["references"]["random"] == pytest.approx(0.9652, abs=1e-3)
    assert {"a", "b", "only_a_diverged", "only_b_diverged", "p"} <= said["paired"][0].keys()
    assert said["versions"]["jax"] and "git" in said
    page = (out / "report.html").read_text()
    assert "dual without alignment" in page and "Paired" in page.title()
    assert cli.main(command) == 0  # again: nothing is left to run


def test_a_bad_number_of_episodes_is_refused(tmp_path, capsys):
    assert cli.main(["study", "alignment", "--episodes", "305", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == (
        "forethought study: episodes is 305; it must be a multiple of 10, the evaluations of a run"
    )


def made(returns, **more):
    """What was found of a condition whose last returns are these."""
    seeds = len(returns)
    arrays = {
        "final/return": np.array(returns), "final/return_error": np.full(seeds, 0.1), "final/promised": np.zeros(seeds),
        "final/error": np.ones((seeds, 5, 4)), "final/cosine": np.ones(seeds), "final/cka": np.ones(seeds),
        "final/angle": np.ones(seeds), "final/jacobian_model": np.ones((seeds, 4)),
        "final/jacobian_policy": np.ones((seeds, 4)), "grad_norm": np.ones((seeds, 10)), "moved": np.ones((seeds, 10)),
        "overflown": np.zeros((seeds, 10), bool), "return": np.ones((seeds, 11)), "episodes": np.asarray(20),
    }  # fmt: skip
    for part in ("model_shared", "model_private", "policy_shared", "policy_private"):
        arrays[f"final/r2_{part}"] = np.full((seeds, 4), np.nan)
    return arrays | more


def test_diverged_runs_are_counted_and_pulled_to_the_floor():
    a, b = condition("literal"), condition("literal", {"weight": 0.0})
    found = {a: made([1.0, 2.0, 3.0, 4.0, np.nan, -1e12]), b: made([1.0, 1.0, 1.0, 1.0, -1e4, 3.0])}
    said = alignment_report.results(found, {"q": [(a, b), (b, None)]})
    one, other = said["conditions"]
    assert (one["diverged"], other["diverged"]) == (2, 1)
    # Of six the middle half is four: sorted, -1000, 1, 2, 3 (trimmed: one at each end)
    assert one["iqm"] == pytest.approx((-1000 + 1 + 2 + 3) / 4)
    assert one["end"] == pytest.approx((1 + 2 + 3 + 4 - 2000) / 6)
    (pair,) = said["paired"]
    assert (pair["only_a_diverged"], pair["only_b_diverged"], pair["p"]) == (1, 0, 1.0)
    # Differences, seed by seed: 0, 1, 2, 3, 0, -1003
    assert pair["difference"] == pytest.approx((0 + 0 + 1 + 2) / 4)
    assert json.loads(json.dumps(said, allow_nan=False)) == said
