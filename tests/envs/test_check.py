"""The check finds each fault in an environment that has just that one, and nothing in sound ones."""

import io
import json
import re

import gymnasium
import host_envs
import pytest
from rich.console import Console

from forethought.envs.check import check


def limited():
    return gymnasium.wrappers.TimeLimit(host_envs.BothAtOnce(), 4)


BROKEN = {
    "not finite": (host_envs.NotFinite, "non-finite", "error", "observation 'obs' holds nan"),
    "too large": (host_envs.TooLarge, "non-finite", "error", "'big' holds 1e\\+300"),
    "infinite reward": (host_envs.InfiniteReward, "non-finite", "error", "reward holds inf"),
    "shape": (host_envs.WrongShape, "shape", "error", "observation 'obs' has shape"),
    "dtype": (host_envs.WrongDtype, "dtype", "error", "observation 'obs' is float64"),
    "missing": (host_envs.MissingKey, "missing", "error", "'gone'"),
    "range": (host_envs.OutOfRange, "value", "error", "outside Discrete"),
    "array reward": (host_envs.ArrayReward, "shape", "error", "reward has shape"),
    "no reward": (host_envs.NoReward, "dtype", "error", "reward is a NoneType"),
    "integer flag": (host_envs.IntegerTermination, "dtype", "error", "terminated is a int"),
    "raises": (host_envs.Raises, "raised", "error", "KeyError"),
    "global generator": (host_envs.GlobalRandom, "non-determinism", "error", "row 0: observation 'obs'"),
    "left over": (host_envs.Leftover, "non-determinism", "error", "row 0: observation 'obs'"),
    "seed": (host_envs.SeedIgnored, "seed", "error", "not with the seed"),
    "limit": (limited, "time limit", "error", "12 of 12 episodes terminated at step 4, the declared time limit"),
    "perhaps a limit": (
        host_envs.BothAtOnce,
        "time limit",
        "warning",
        "12 of 12 .* at step 4, the longest; if",
    ),
    "bounds": (host_envs.OutOfBounds, "bounds", "warning", "observation 'obs' is 20.0, outside its bounds"),
    "mutation": (host_envs.WritesOn, "mutation", "error", "'obs' was written to after it was returned"),
    "space": (host_envs.WordsSeen, "space", "error", "WordsSeen: observation 'screen/words': a Text space"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_and_no_other(name):
    env, kind, severity, message = BROKEN[name]
    report = check(env, steps=50)
    assert [(found.kind, found.severity) for found in report.findings] == [(kind, severity)]
    assert re.search(message, report.findings[0].message)
    assert report.ok == (severity == "warning")


@pytest.mark.parametrize(
    "env",
    [
        host_envs.Line,
        host_envs.Uneven,
        host_envs.Many,
        "CartPole-v1",
        "Blackjack-v1",
        "dmc/reacher-easy",
        "jax/pendulum",
    ],
)
def test_nothing_is_found_in_sound_environments(env):
    report = check(env, steps=60)
    assert report.findings == () and report.ok and report.steps >= 120


class Scattered(host_envs.Line):
    """Ends at a step drawn at the reset, and in any case at `most`: all of it reported as termination."""

    def __init__(self, lengths, most):
        self.lengths, self.most = lengths, most

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.length = min(int(self.np_random.choice(self.lengths)), self.most)
        return obs, info

    def terminated(self):
        return self.t == self.length


def test_a_time_limit_is_found_where_only_some_episodes_reach_it():
    def declared():
        return gymnasium.wrappers.TimeLimit(Scattered([2, 3, 9], 6), 6)

    [found] = check(declared, steps=60).findings
    assert (found.kind, found.severity) == ("time limit", "error")
    assert re.search(r"^\d+ of \d+ episodes terminated at step 6, the declared time limit", found.message)
    [found] = check(lambda: Scattered([2, 3, 9], 6), steps=60).findings
    assert (found.kind, found.severity) == ("time limit", "warning")
    assert re.search(r"^\d+ of \d+ episodes terminated at step 6, the longest; if", found.message)
    # Lengths 2, 2, 2, 3, 3, 4: they thin out by themselves.
    assert check(lambda: Scattered([2, 2, 2, 2, 3, 3, 4], 9), steps=200).findings == ()


def test_the_check_goes_on_until_enough_episodes_ended_and_says_where_they_did_not():
    long = gymnasium.wrappers.TimeLimit(Scattered([10], 10), 10)
    report = check(long, steps=7)  # 3 episodes of 10, then 7 decisions again
    assert (report.episodes, report.steps, report.note) == (3, 37, None)
    assert [found.severity for found in report.findings] == ["error"]
    report = check(gymnasium.wrappers.TimeLimit(host_envs.Line(), 9), steps=2)  # 5 times 2 decisions, and 2 again
    assert (report.episodes, report.steps) == (2, 12)
    assert report.note == "episodes ended in 10 decisions: 2; endings need 3 to be judged, so give more steps"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    assert f"note: {report.note}" in console.export_text()


def test_the_report_says_what_becomes_of_each_key():
    report = check(host_envs.Many, steps=10, action_repeat=2, unit="simulator step", time_limit=7)
    rows = {row.key: (row.native, row.ours) for row in report.rows}
    assert rows["level"] == ("Discrete(4, start=-1)", "int32[], 4 values")
    assert rows["image"] == ("Box(0, 255, (5, 5, 5), uint8)", "uint8[5, 5, 5] in [0, 255]")
    assert rows["action"] == ("MultiDiscrete([3 5])", "int32[], 15 values")
    assert (report.name, report.unit, report.time_limit) == ("Many", "simulator step", 7)
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    assert check("Pendulum-v1", steps=5).rows[-1].ours == "float32[1]; [-1, 1] to [-2, 2]"


def test_the_report_is_printed_without_reading_markup_in_what_comes_from_outside():
    class Marked(host_envs.Line):
        observation_space = gymnasium.spaces.Dict({"[red]key[/red]": gymnasium.spaces.Discrete(9)})

        def obs(self):
            return {"[red]key[/red]": self.t}

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(check(Marked, steps=5))
    text = console.export_text()
    assert "[red]key[/red]" in text and "nothing wrong found" in text


def test_unknown_environments_are_bad_input_and_no_finding():
    for name in ("Pendlum-v1", "dmc/no-task", "jax/none"):
        with pytest.raises(ValueError, match="is unknown"):
            check(name)
