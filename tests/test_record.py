"""A run's files are read as they are, and what cannot be read is refused by file, line and field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forethought.record import read, total


def test_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 8, "a": 1}\n{"b": null, "step": 16}\n{"step": 24, "a": 2.5}\n{"st'
    )
    record = read(tmp_path)
    assert record.torn and record.evaluation == {}
    assert {key: (x.tolist(), len(y)) for key, (x, y) in record.metrics.items()} == {"a": ([8, 24], 2), "b": ([16], 1)}
    np.testing.assert_array_equal(record.metrics["a"][1], [1, 2.5])
    assert np.isnan(record.metrics["b"][1][0])


def test_total_goes_on_after_a_restart() -> None:
    # 3, then 4 more, begins anew at 2, then 3 more: 3, 7, 9, 12
    np.testing.assert_array_equal(total(np.array([3.0, 7, 2, 5])), [3, 7, 9, 12])
    assert total(np.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    "line", ['{"step": 1, "x": "2"}', '{"x": 2}', "[1]", '{"step": null}', '{"step": 1, "x": true}', "{", ""]
)
def test_a_bad_line_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2"):
        read(tmp_path)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "evaluation", "message"),
    [
        ([], {}, r"config\.json: expected a JSON object, found list"),
        ({"metrics": {"real/loss": "nat"}}, {}, r"config\.json: metrics: real/loss: expected \[unit, explanation\]"),
        ({}, {"open_loop": {"keys": {}}}, r"evaluation\.json: open_loop: context: missing"),
        ({}, {"open_loop": {"context": 1, "keys": {"a": {"true": [1]}}}}, "open_loop: a: predicted: missing"),
        ({}, {"episode": [1]}, "episode: obs, reward: missing"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, config: Any, evaluation: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ([], r"audit\.json: expected a JSON object, found list"),
        ({}, r"audit\.json: schema: None is not 1"),
        ({"schema": 1, "about": {}}, r"audit\.json: about: env, horizon, .*: missing"),
    ],
)
def test_a_malformed_audit_is_refused(tmp_path: Path, audit: Any, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read(tmp_path).audit == {}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
