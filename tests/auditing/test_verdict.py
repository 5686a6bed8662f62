import numpy as np
import pytest

from forethought.auditing.findings import EVALUATION, IMAGINATION, PLANNING, RANKING, USES
from forethought.auditing.tolerances import Tolerances
from forethought.auditing.verdict import judge


def curve(mean, reach=0.01):
    mean = np.asarray(mean, float)
    return {"mean": mean.tolist(), "low": (mean - reach).tolist(), "high": (mean + reach).tolist()}


NOTHING = {
    "diagnosis": {"non_finite": {}, "hypotheses": [], "region": None},
    "calibration": {"random": False, "fresh": True, "dispersion": {}, "members": None},
}


def sections(obs, reward, ends=None):
    parts = {"x[0]": {"of": "x", "excess": curve(*obs)}, "reward": {"of": "reward", "excess": curve(*reward)}}
    return NOTHING | {"error_by_depth": {"policies": {"agent": {"parts": parts, "termination": ends}}}}


END = {"many_missed": curve([-0.1, -0.1]), "at_limit": None, "at_limit_low": None, "elsewhere": 0.0}


def test_terminations_that_are_missed_in_part_are_named_too():
    # Of a real 0.04, 0.03 is missed: too little for the excess, but shown to be more than a quarter.
    ends = END | {"excess": curve([0.0, 0.001]), "missed": curve([0.0, 0.03]), "many_missed": curve([0.0, 0.02])}
    found = said(sections(([0.0, 0.0],), ([0.0, 0.0],), ends), horizon=2)
    assert [(f["kind"], f["depth"]) for f in found["findings"]] == [("missed_termination", 2)]


def said(found, horizon=4, tolerances=None, uses=USES):
    return judge(found, tolerances or Tolerances(), horizon, uses)


def test_the_safe_horizon_ends_before_the_first_depth_that_is_not_shown_to_hold():
    found = said(sections(([0.01, 0.02, 0.095, 0.01],), ([0.0, 0.0, 0.0, 0.0],)))
    # 0.095 + 0.01 > 0.1 >= 0.095 - 0.01: open, neither broken nor shown to hold; what comes after does not count.
    assert found["uses"][IMAGINATION]["safe_horizon"] == 2 and found["findings"] == []
    assert found["uses"][IMAGINATION]["status"] == "fail"
    assert "up to step 2 of 4" in found["uses"][IMAGINATION]["reasons"][0]
    assert found["uses"][PLANNING]["safe_horizon"] == 4  # which asks the reward alone


def test_a_broken_tolerance_is_a_finding_at_its_first_depth():
    found = said(sections(([0.01, 0.2, 0.3, 0.4],), ([0.0, 0.0, 0.5, 0.5],)))
    assert [(f["kind"], f["where"], f["depth"]) for f in found["findings"]] == [
        ("error", "x[0]", 2),
        ("reward", "reward", 3),
    ]
    assert found["status"] == "fail" and found["uses"][PLANNING]["safe_horizon"] == 2
    loose = said(
        sections(([0.01, 0.2, 0.3, 0.4],), ([0.0, 0.0, 0.5, 0.5],)), tolerances=Tolerances(error=1.0, reward=1.0)
    )
    assert loose["findings"] == [] and loose["uses"][IMAGINATION]["safe_horizon"] == 4


def test_what_was_not_measured_neither_passes_nor_fails():
    found = said(sections(([0.0] * 4,), ([0.0] * 4,)))
    status = {use: v["status"] for use, v in found["uses"].items()}
    assert status == {
        PLANNING: "not measured",
        IMAGINATION: "pass",
        RANKING: "not measured",
        EVALUATION: "not measured",
    }
    assert found["status"] == "pass"
    assert said(sections(([0.0] * 4,), ([0.0] * 4,)), uses=(RANKING,))["status"] == "not measured"


def test_a_depth_that_no_episode_reached_is_passed_over():
    x = curve([0.0, 0.0, 0.0, 0.0])
    for key in x:
        x[key][3] = None
    found = sections(([0.0] * 4,), ([0.0] * 4,))
    found["error_by_depth"]["policies"]["agent"]["parts"]["x[0]"]["excess"] = x
    assert said(found)["uses"][IMAGINATION]["status"] == "pass"


@pytest.mark.parametrize("missed, kind", [(0.3, "missed_termination"), (-0.3, "false_termination")])
def test_ends_are_missed_or_false(missed, kind):
    ends = END | {"excess": curve([0.0, 0.5]), "missed": curve([0.0, missed])}
    found = said(sections(([0.0, 0.0],), ([0.0, 0.0],), ends), horizon=2)
    assert [(f["kind"], f["depth"]) for f in found["findings"]] == [(kind, 2)]


def test_a_time_limit_taken_for_an_end_is_named_as_such_and_not_as_a_false_end_too():
    ends = END | {"excess": curve([0.0, 0.5]), "missed": curve([0.0, -0.3])}
    ends |= {"at_limit": 0.9, "at_limit_low": 0.7, "elsewhere": 0.01}
    found = said(sections(([0.0, 0.0],), ([0.0, 0.0],), ends), horizon=2)
    assert [f["kind"] for f in found["findings"]] == ["time_limit"]


def test_ranking_and_value():
    told = {"a": {"promised": 9.0, "real": 3.0, "error": 1.0}, "b": {"promised": 8.0, "real": 8.0, "error": 1.0}}
    ranking = {"regret": 0.5, "regret_error": 0.1, "chosen": "a", "best": "b", "range": 10.0, "policies": told}
    found = said(sections(([0.0] * 4,), ([0.0] * 4,)) | {"ranking": ranking})
    # 0.5 - 2 * 0.1 > 0.1; 9 - 3 - 2.5 > 0.25 * 10
    assert [(f["kind"], f["where"]) for f in found["findings"]] == [("ranking", "a"), ("value", "a")]
    assert found["uses"][RANKING]["status"] == found["uses"][EVALUATION]["status"] == "fail"
    assert found["uses"][IMAGINATION]["status"] == "pass"


def test_tolerances_come_from_toml_and_say_what_is_wrong(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("error = 0.3\nregret = 0\n")
    assert Tolerances.read(path) == Tolerances(error=0.3, regret=0.0)
    for text, match in (
        ("eror = 0.3", "'eror' is no tolerance; there are error, reward"),
        ("error = true", "tolerance error is True; it must be a number"),
        ("error = -1", "tolerance error is -1.0; it must be finite and at least 0"),
        ("error = inf", "tolerance error is inf"),
        ("error = ", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            Tolerances.read(path)
