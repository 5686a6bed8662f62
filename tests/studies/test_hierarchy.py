import json

import numpy as np

from forethought.envs import mazes
from forethought.studies import hierarchy, hierarchy_report


def test_a_small_run_is_written_resumed_and_drawn(tmp_path, monkeypatch):
    """Two levels in two rooms: every seed is kept, both levels are checked, and what is there is not rerun."""
    env = mazes.many_rooms(2, 1, 2, time_limit=20)
    monkeypatch.setattr(hierarchy, "TASKS", {"4 rooms": (env, 2_000)})
    monkeypatch.setattr(hierarchy, "PARTS", [("4 rooms", "two levels")])
    monkeypatch.setattr(hierarchy, "CHUNK", 8)
    monkeypatch.setattr(hierarchy, "ROWS", 200)
    small = dict(hierarchy.director.PRESETS["cpu"], updates=1, batch=4, units=16, deter=16, hidden=16, prefill=64)
    monkeypatch.setitem(hierarchy.director.PRESETS, "cpu", small)
    said = []
    run = lambda: hierarchy.run(  # noqa: E731
        tmp_path, seeds=2, quick=True, progress=lambda *at: said.append(at), about={"git": "none"}
    )
    found = run()
    assert hierarchy.count(found) == 1 and said[-1][:2] == (1, 1)
    two = found["results"][0]
    assert np.shape(two["returns"]) == (2, 10) and set(np.ravel(two["returns"])) <= {0.0, 1.0}
    assert len(two["checks"]) == 2
    told = two["checks"][0]
    assert sum(told["ends"].values()) == told["runs"] and 0 < told["replayed/low"]["effective"] <= 1
    assert (np.diff(two["cells"]) >= 0).all() and two["imagined_steps"] == two["updates"] * 4 * 4 * 16
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["git"] == "none"
    before = len(said)
    assert run() == found and len(said) == before + 1
    page = hierarchy_report.write(tmp_path, found).read_text()
    assert "too few seeds" in page and "Both levels" in page and "same policy, replayed" in page
