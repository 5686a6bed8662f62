import json

import numpy as np
import pytest

from forethought.studies import options, options_report


def test_the_papers_numbers_are_exact():
    told = options.exact()
    assert told["actions"]["corner"] == pytest.approx(0.083798, abs=5e-7)
    assert told["actions"]["mean"] == pytest.approx(0.303260, abs=5e-7)
    assert told["options"]["corner"] == pytest.approx(0.071378, abs=5e-7)
    assert told["options"]["mean"] == pytest.approx(0.299842, abs=5e-7)
    np.testing.assert_allclose(told["both"]["value"], told["actions"]["value"], atol=1e-11)
    zeros = {name: x["zeros"] for name, x in told.items()}
    assert zeros == {"actions": [101, 95, 85, 75], "options": [51, 0, 0, 0], "both": [51, 0, 0, 0]}


def test_giving_up_an_option_is_worth_more_somewhere_and_less_nowhere():
    """Theorem 2; chosen at random, many options lead away from the goal, so that it is worth something."""
    told = options.interruption()
    assert told["least"] > -1e-9 and told["largest"] > 0.001 and 0 < told["mean"] < told["largest"]
    np.testing.assert_allclose(np.max(np.subtract(told["interrupted"], told["value"])), told["largest"])


def test_arms_are_compared_with_actions_in_words():
    seeds = np.random.default_rng(0).normal(0, 1, (4, 12, 1))
    learned = [
        {"task": "t", "arm": arm, "reward": (level + x).tolist()}
        for (arm, level), x in zip({"actions": 100, "more": 110, "less": 90, "same": 100}.items(), seeds, strict=True)
    ]
    told = {x["arm"]: x for x in options.compared(learned)}
    assert {arm: x["verdict"] for arm, x in told.items()} == {
        "more": "helps", "less": "hurts", "same": "no difference shown",
    }  # fmt: skip
    assert told["more"]["low"] < told["more"]["difference"] < told["more"]["high"]
    few = options.compared([{**x, "reward": x["reward"][:4]} for x in learned])
    assert {x["verdict"] for x in few} == {"too few seeds"}


def test_a_small_run_is_written_with_every_seed_and_drawn(tmp_path, monkeypatch):
    task = "four rooms, goal in a room"
    monkeypatch.setattr(options, "TASKS", {task: options.TASKS[task]})
    monkeypatch.setattr(
        options, "ARMS", {name: options.ARMS[name] for name in ("actions", "both, interrupted", "options")}
    )
    said = []
    found = options.run(tmp_path, seeds=2, quick=True, progress=lambda *at: said.append(at), about={"git": "none"})
    assert [x["arm"] for x in found["learned"]] == ["actions", "both, interrupted"]  # doors alone do not reach it
    assert options.count(found) == 2 and said[-1][:2] == (3, 3)
    flat, both = found["learned"]
    assert np.shape(flat["reward"]) == (2, 200) and flat["mean_steps"] == 1.0
    assert both["options"] == 12 and both["mean_steps"] > 1 and sum(both["ends"].values()) == both["runs"]
    assert (np.diff(both["reward"]) >= 0).all() and both["interval"] is None
    assert json.loads((tmp_path / "results.json").read_text())["git"] == "none"
    page = options_report.write(tmp_path, found).read_text()
    assert task in page and "option 7" in page and "too few seeds" in page
