import numpy as np
import pytest

from forethought.levels import Record, agreement, ends, runs, same_policy
from forethought.types import EndReason


def record():
    """Two runs of option 2 and one of option 0 that the record's end cuts off; the tick of a reset between them."""
    rows = {
        "state": [0, 1, 2, 3, 0, 1, 1], "action": [1, 1, 1, 0, 1, 0, 1], "log_prob": [-0.1] * 7,
        "reward": [1.0, 2, 4, 0, 8, 16, 32], "ended": [0, 0, 1, 0, 0, 0, 0], "option": [2, 2, 2, 2, 2, 2, 0],
        "started": [1, 0, 0, 0, 1, 0, 1], "option_log_prob": [-0.5, -0.5, -0.5, -0.5, -0.7, -0.7, -0.9],
        "version": [3, 3, 3, 3, 4, 4, 5], "reason": [0, 0, EndReason.EPISODE, 0, 0, EndReason.STOPPED, 0],
        "rbar": [1, 2.8, 6.04, 6.04, 8, 22.4, 32], "duration": [1, 2, 3, 3, 1, 2, 1], "acted": [1, 1, 1, 0, 1, 1, 1],
    }  # fmt: skip
    kinds = {"ended": bool, "started": bool, "acted": bool}
    arrays = {name: np.asarray(x, kinds.get(name, np.asarray(x).dtype)) for name, x in rows.items()}
    return Record(**{n: x.astype(float) if n in ("reward", "rbar", "duration") else x for n, x in arrays.items()})


def test_a_record_by_runs():
    found = runs(record(), own=np.arange(7.0))
    assert found.begin.tolist() == [0, 4] and found.steps.tolist() == [3, 2] and found.option.tolist() == [2, 2]
    assert found.task.tolist() == [7, 24] and found.own.tolist() == [3, 9] and found.reward.tolist() == [6.04, 22.4]
    assert found.duration.tolist() == [3, 2] and found.log_prob.tolist() == [-0.5, -0.7]
    assert found.version.tolist() == [3, 4]
    assert ends(found) == {"stopped": 1, "goal": 0, "interrupted": 0, "limit": 0, "episode": 1, "failure": 0}
    assert runs(record()).own.tolist() == [7, 24]


def paid(own, task, option):
    zero = np.zeros(len(own), int)
    real = zero.astype(float)
    return runs(record())._replace(
        begin=zero, steps=zero, option=np.asarray(option), log_prob=real, version=zero, reward=real, duration=real,
        reason=zero, task=np.asarray(task, float), own=np.asarray(own, float),
    )  # fmt: skip


def test_a_low_level_that_is_paid_for_what_hurts_is_named():
    rng = np.random.default_rng(0)
    own = rng.normal(size=60)
    task = np.concatenate(
        [own[:20] + rng.normal(size=20), -own[20:40] + 0.3 * rng.normal(size=20), rng.normal(size=20)]
    )
    table = agreement(paid(own, task, np.repeat([0, 1, 2], 20)))
    assert [table[o]["against"] for o in (0, 1, 2)] == [False, True, False]
    assert table[1]["correlation"] < -0.7 and table[0]["correlation"] > 0.3
    few = agreement(paid(own[:5], -own[:5], np.zeros(5, int)))
    assert few == {0: {"runs": 5, "correlation": None, "p": None, "against": False}}
    flat = agreement(paid(own[:20], np.ones(20), np.zeros(20, int)))
    assert flat[0]["correlation"] is None and not flat[0]["against"]


def test_data_of_another_policy_are_told_by_their_log_probabilities():
    recorded = np.log([0.5, 0.25, 0.5, 0.5])
    assert same_policy(recorded, recorded) == {"largest": 0.0, "share": 0.0, "effective": 1.0}
    told = same_policy(recorded, np.log([0.5, 0.5, 0.25, 0.5]))
    # Weights 1, 2, 0.5, 1: 4.5^2 / 6.25 / 4.
    assert told == {"largest": pytest.approx(np.log(2)), "share": 0.5, "effective": pytest.approx(0.81)}
    never = same_policy(recorded, np.array([-np.inf] * 4))
    assert never["effective"] == 0.0 and never["largest"] == np.inf
    with pytest.raises(ValueError, match="probability 0"):
        same_policy(np.array([-np.inf]), np.zeros(1))
