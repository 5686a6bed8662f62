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
