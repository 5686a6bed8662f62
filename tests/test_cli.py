import dataclasses
import json
import os
import shutil

import gymnasium
import numpy as np
import pytest

import stub_learner
from forethought import run, settings
from forethought.cli import main
from tiny_runs import CACHE, compiling_once, metrics


class NotFinite(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([0, np.nan if self.t == 3 else 1], np.float32), 0.0, False, self.t >= 9, {}


TRAIN = ("train", "stub", "--env", "Pendulum-v1", "--audit-episodes", 0, "--steps", 100, "--eval-episodes", 1)


@pytest.fixture(scope="module", autouse=True)
def stub():
    with pytest.MonkeyPatch.context() as patch, compiling_once():
        patch.setitem(settings.ALGORITHMS, "stub", "stub_learner")
        yield


@pytest.fixture
def call(capsys):
    def calling(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        return status, out, err

    return calling


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli") / "run"
    assert main([*map(str, TRAIN), "--out", str(root), "--quiet"]) == 0
    return root


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


OUT = "{tmp}/out"
DREAMER = ("train", "dreamer", "--env", "CartPole-v1", "--out", OUT, "--steps", 9999)
BAD = [
    ((), "required: COMMAND"),
    (("trian",), "invalid choice: 'trian'"),
    (("train", "dremer", "--env", "jax/pendulum", "--out", OUT, "--steps", 9), "invalid choice: 'dremer'"),
    (("train", "stub", "--out", OUT, "--steps", 100), "required: --env"),
    (("train", "stub", "--env", "jax/pendulum", "--out", OUT), "required: --steps"),
    (("train", "stub", "--env", "jax/pendulun", "--out", OUT, "--steps", 100), "nearest: jax/pendulum"),
    (("train", "stub", "--env", "Pendulum-v9", "--out", OUT, "--steps", 100), "Pendulum-v9"),
    (("train", "stub", "--env", "dmc/cartpole-swingdown", "--out", OUT, "--steps", 100), "cartpole-swingdown"),
    (("train", "stub", "--env", "no:such-env", "--out", OUT, "--steps", 100), "no:such-env"),
    ((*TRAIN, "--out", OUT, "--depth", 3), "--depth is not an option of 'train'"),
    ((*TRAIN, "--out", OUT, "--hor", 3), "--hor is not an option of 'train'"),  # no option is guessed
    ((*TRAIN, "--out", OUT, "--preset", "huge"), "preset is 'huge'; stub has: cpu, wide"),
    ((*TRAIN, "--out", OUT, "--horizon", 2.5), "invalid int value: '2.5'"),
    ((*TRAIN, "--out", OUT, "--rate", "fast"), "invalid float value: 'fast'"),
    ((*TRAIN, "--out", OUT, "--flavour", "sweet"), "invalid choice: 'sweet'"),
    ((*TRAIN, "--out", OUT, "--loud", "yes"), "'yes' is neither true nor false"),
    ((*TRAIN, "--out", OUT, "--seed", "-1"), "seed is -1; it must not be negative"),
    ((*TRAIN, "--out", OUT, "--devices", "3"), "devices is 3, but JAX sees 2"),
    ((*TRAIN, "--out", OUT, "--seed", 2**40), "must be below 2^32"),
    ((*TRAIN, "--out", OUT, "--checkpoint-every", 0), "checkpoint_every is 0; it must be at least 1"),
    ((*TRAIN, "--out", OUT, "--eval-env", "CartPole-v1"), "CartPole-v1: 'obs'"),
    ((*TRAIN, "--out", OUT, "--processes", 3), "3 for 2 environments"),
    ((*TRAIN, "--out", OUT, "--override", "horizen"), "no setting or field 'horizen'"),
    ((*TRAIN, "--out", "{tmp}/file"), "{tmp}/file"),
    ((*TRAIN, "--out", "{tmp}/file/below"), "{tmp}/file/below"),
    ((*TRAIN, "--out", OUT, "--json", "{tmp}/nowhere/x.json"), "{tmp}/nowhere is no directory"),
    (("train", "stub", "--env", "jax/pendulum", "--out", OUT, "--steps", -5), "steps is -5"),
    (("train", "stub", "--env", "jax/pendulum", "--out", OUT, "--steps", 39), "steps is 39"),
    (("train", "stub", "--env", "jax/pendulum", "--out", OUT, "--steps", "1e4"), "invalid int value: '1e4'"),
    (("train", "stub", "--env", "jax/pendulum", "--out", OUT, "--steps", 100, "--capacity", 10), "capacity of 5"),
    ((*DREAMER, "--actor-gradient", "dynamics"), "CartPole-v1: actor_gradient 'dynamics' needs continuous actions"),
    (("train", "dreamer", "--env", "jax/pendulum", "--out", OUT, "--steps", 9, "--starts", 99), "starts is 99"),
    (("train", "stub\nstub", "--env", "jax/pendulum"), "invalid choice: 'stub\\nstub'"),
    (("eval", "{tmp}/nowhere"), "{tmp}/nowhere: is not a run"),
    (("eval", "{tmp}/file"), "{tmp}/file: is not a run"),
    (("eval", "{tmp}/broken"), "{tmp}/broken/config.json: is not a run's config"),
    (("eval", "{tmp}/broken", "--episodes", 0), "0 is not at least 1"),
    (("audit", "{tmp}/nowhere"), "{tmp}/nowhere: is not a run"),
    (("audit", "{tmp}/broken", "--tolerances", "{tmp}/file.toml"), "{tmp}/file.toml: No such file or directory"),
    (("audit", "{tmp}/broken", "--horizon", 0), "0 is not at least 1"),
    (("report", "{tmp}/nowhere"), "{tmp}/nowhere: is not a run"),
    (("report", "{tmp}/broken"), "{tmp}/broken/config.json"),
    (("check", "Pendulum-v9"), "Pendulum-v9"),
    (("check", "Pendulum-v1", "--seed", "x"), "invalid int value: 'x'"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_line_and_status_2(arguments, said, call, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"algorithm": "stub"')
    place = lambda text: text.replace("{tmp}", str(tmp_path)) if isinstance(text, str) else text  # noqa: E731
    status, out, err = call(*map(place, arguments))
    assert status == 2 and out.count("\n") <= 1  # at most what a replay will take
    assert err.endswith("\n") and err.count("\n") == 1 and err.startswith("forethought"), err
    assert place(said) in err
    assert not (tmp_path / "out" / "config.json").exists()


def test_options_may_stand_before_the_algorithm(call, tmp_path):
    status, _, err = call("train", "--env", "jax/pendulum", "--steps", 39, "--horizon", 2, "stub", "--out", tmp_path)
    assert status == 2 and "steps is 39" in err  # so --horizon was known


@pytest.mark.parametrize(("field", "old", "new"), [("seed", 0, 3), ("horizon", 3, 4), ("eval-episodes", 1, 2)])
def test_a_changed_field_is_refused_by_name_with_both_values(field, old, new, call, copied):
    before = (copied / "config.json").read_bytes()
    status, _, err = call(*TRAIN, "--out", copied, f"--{field}", new)
    name = field.replace("-", "_")
    assert status == 2 and err.count("\n") == 1 and f"began with {name} {old}, not {new}" in err
    assert (copied / "config.json").read_bytes() == before
    status, _, err = call(*TRAIN, "--out", copied, f"--{field}", new, "--override", field)
    assert (status, err) == (0, "")
    config = json.loads((copied / "config.json").read_text())
    assert config["overrides"][0]["changed"] == {name: [old, new]}
    assert (config | config["fields"])[name] == new


def test_a_finished_run_repeated_says_so(call, copied):
    before = (copied / "metrics.jsonl").read_bytes()
    status, out, err = call(*TRAIN, "--out", copied)
    assert (status, err) == (0, "") and "nothing is left to train" in out and "mean return" in out
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_broken_newest_checkpoint_is_passed_over_and_said(call, copied):
    call(*TRAIN[:-3], 150, *TRAIN[-2:], "--out", copied, "--override", "steps")
    (older, newest) = sorted((copied / "checkpoints").iterdir())
    (newest / "manifest.json").write_bytes(b"")
    for arguments in (("eval", copied, "--episodes", 1), (*TRAIN[:-3], 150, *TRAIN[-2:], "--out", copied)):
        status, out, err = call(*arguments)
        assert (status, err) == (0, "") and "passed over a broken checkpoint" in out and newest.name in out
    (older / "manifest.json").write_bytes(b"")
    (sorted((copied / "checkpoints").iterdir())[-1] / "manifest.json").write_bytes(b"")
    status, _, err = call("eval", copied)
    assert status == 2 and err.count("\n") == 1 and "no checkpoint is whole" in err


def small_demo(monkeypatch):
    """The demo, but for its size."""
    train = run.train

    def smaller(asked, *arguments, **given):
        assert (asked.algorithm, asked.env, asked.eval_env) == ("dreamer", "jax/pendulum", "Pendulum-v1")
        assert asked.steps <= 10_000 and asked.eval_episodes == 100 and asked.seed == 2
        small = dataclasses.replace(asked, algorithm="stub", steps=100, eval_episodes=1, audit_episodes=0)
        return train(small, *arguments, **given)

    monkeypatch.setattr(run, "train", smaller)


@pytest.mark.parametrize(
    ("command", "quiet"),
    [(name, quiet) for name in ("train", "eval", "report", "check") for quiet in (False, True)] + [("demo", True)],
)
def test_every_command_writes_json_and_can_be_quiet(command, quiet, call, copied, tmp_path, monkeypatch):
    if command == "demo":
        small_demo(monkeypatch)
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # the demo adds to it
    arguments = {
        "train": (*TRAIN, "--out", copied),
        "eval": ("eval", copied, "--episodes", 2, "--sampled", "--seed", 5),
        "report": ("report", copied),
        "check": ("check", "Pendulum-v1"),
        "demo": ("demo", "--out", tmp_path / "demo", "--seed", 2),
    }[command]
    path = tmp_path / "result.json"
    status, out, err = call(*arguments, "--json", path, *["--quiet"] * quiet)
    assert (status, err) == (0, "") and (out == "") == quiet

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads(path.read_text(), parse_constant=refuse)
    wanted = {
        "train": {"directory", "steps", "seconds", "returns"},
        "eval": {"returns", "open_loop", "step", "rule", "env", "seeds"},
        "report": {"reports"},
        "check": set(),
        "demo": {"seconds", "steps", "returns"},
    }
    assert wanted[command] <= result.keys() and result
    if command == "eval":
        assert (result["rule"], result["seeds"], len(result["returns"]["agent"])) == ("sampled", [5], 2)
        assert result == json.loads((copied / "evaluation.json").read_text())
    if command == "demo":
        assert (tmp_path / "demo" / "report.html").is_file() and len(metrics(tmp_path / "demo")) > 0


def test_an_environment_with_faults_is_status_1(call, tmp_path):
    gymnasium.register("FaultyForTests-v0", NotFinite)
    try:
        status, _, err = call("check", "FaultyForTests-v0", "--json", tmp_path / "x.json")
    finally:
        gymnasium.registry.pop("FaultyForTests-v0")
    assert status == 1 and err == "" and json.loads((tmp_path / "x.json").read_text())


def test_a_path_with_brackets_is_a_path(call, finished, tmp_path):
    odd = shutil.copytree(finished, tmp_path / "a [bold]run[/b]")
    status, out, err = call(*TRAIN, "--out", odd)
    assert (status, err) == (0, "") and "[bold]run[/b]" in out


def test_help_lists_every_field_with_its_meaning(call):
    status, out, _ = call("train", "stub", "--help")
    assert status == 0
    for field in dataclasses.fields(stub_learner.Config):
        assert "--" + field.name.replace("_", "-") in out
    assert "Rows per environment and iteration." in out


def test_compiled_programs_are_kept_where_nobody_said_otherwise(call, monkeypatch, tmp_path):
    import jax

    assert jax.config.jax_compilation_cache_dir == CACHE  # what was said is left
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        call("report", tmp_path / "nowhere")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / ".cache" / "forethought" / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", CACHE)


def test_ctrl_c_before_the_training_is_one_line(call, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    assert call(*TRAIN, "--out", tmp_path)[::2] == (
        130,
        "forethought: interrupted; the last checkpoint, if there is one, is good\n",
    )


def test_without_out_the_same_command_finds_its_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, TRAIN), "--quiet"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "stub-Pendulum-v1-cpu-seed0" and (run / "report.html").is_file()
    assert main([*map(str, TRAIN)]) == 0
    assert "nothing is left to train" in capsys.readouterr().out.replace("\n", " ")
