"""The command line: train, resume, evaluate, look at runs and compare them, check an environment, run a study.

Exit status: 0 success, 1 a check that was asked for does not hold, 2 bad input or a failure, with one line on
stderr; 130 and 143 for a run that SIGINT or SIGTERM stopped after a checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import time
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and guesses no option from its first letters."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"forethought: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    begin = time.monotonic()
    parser = _parser(arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"{unknown[0]} is not an option of '{parsed.command}'")
    if parsed.json is not None and not parsed.json.parent.is_dir():
        parser.error(f"argument --json: {parsed.json.parent} is no directory")
    _configure_jax(parsed.command, getattr(parsed, "devices", 0) or None)
    import jax

    from forethought.checkpoint import CheckpointError
    from forethought.envs import EnvironmentFault
    from forethought.logs import errors_name

    try:
        status, result = COMMANDS[parsed.command](parsed, begin)
        if parsed.json is not None:
            with errors_name(parsed.json):
                parsed.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return status
    except (
        *(ValueError, OSError, ImportError, MemoryError, FloatingPointError),
        *(CheckpointError, EnvironmentFault, jax.errors.JaxRuntimeError),
    ) as error:
        print(f"forethought {parsed.command}: {' '.join((str(error) or repr(error)).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("forethought: interrupted; the last checkpoint, if there is one, is good", file=sys.stderr)
        return 130


def _train(args: Any, begin: float) -> tuple[int, Any]:
    from forethought import run
    from forethought.settings import Settings

    fields = {name: getattr(args, name) for name in _field_names(args.algorithm) if hasattr(args, name)}
    settings = Settings(fields=fields, env_args=dict(args.env_arg), **{name: getattr(args, name) for name in SETTINGS})
    override = [name.replace("-", "_") for name in args.override]
    done = run.train(settings, args.out or _directory(settings), override=override, console=_console(args))
    result = {"directory": str(done.directory), "steps": done.steps, "seconds": time.monotonic() - begin}
    if done.stopped_by is not None:
        return 128 + done.stopped_by, result | {"stopped_by": done.stopped_by}
    evaluation = json.loads((done.directory / "evaluation.json").read_text(encoding="utf-8"))
    _say_returns(args, evaluation)
    _console(args).print(f"{done.directory / 'report.html'} shows it all", soft_wrap=True)
    return 0, result | {"returns": evaluation["returns"]}


def _directory(settings: Any) -> Path:
    """Where a run goes that was given no --out: the same command finds it again."""
    names = (settings.algorithm, settings.env, settings.preset, f"seed{settings.seed}")
    return Path("runs") / "-".join(re.sub(r"[^\w.]+", "-", name) for name in names)


def _demo(args: Any, begin: float) -> tuple[int, Any]:
    from forethought import run
    from forethought.settings import Settings

    settings = Settings(
        algorithm="dreamer",
        env="jax/pendulum",
        steps=6_000,
        seed=args.seed,
        eval_episodes=100,
        eval_env="Pendulum-v1",
        fields={"action_repeat": 1},  # a step of the pendulum is 0.05 s long as it is
    )
    console = _console(args)
    console.print(
        "A world-model agent learns to swing up a pendulum, then plays 100 episodes of Gymnasium's Pendulum-v1.",
        soft_wrap=True,
    )
    done = run.train(settings, args.out, console=console)
    seconds = time.monotonic() - begin
    if done.stopped_by is not None:
        return 128 + done.stopped_by, {"stopped_by": done.stopped_by}
    evaluation = json.loads((args.out / "evaluation.json").read_text(encoding="utf-8"))
    _say_returns(args, evaluation)
    console.print(f"{done.steps:,} environment steps, {seconds:.0f} s in all; look at {args.out / 'report.html'}")
    return 0, {"seconds": seconds, "steps": done.steps, "returns": evaluation["returns"]}


def _eval(args: Any, begin: float) -> tuple[int, Any]:
    from forethought import report, run

    result = run.evaluate(
        args.directory, episodes=args.episodes, env=args.env, greedy=not args.sampled, seed=args.seed,
        console=_console(args),
    )  # fmt: skip
    report.write(args.directory)
    _say_returns(args, result)
    return 0, result


def _audit(args: Any, begin: float) -> tuple[int, Any]:
    from forethought import report, run
    from forethought.auditing.findings import USES
    from forethought.auditing.tolerances import Tolerances

    tolerances = Tolerances.read(args.tolerances) if args.tolerances else None
    console = _console(args)
    with console.status("auditing") as status:
        found = run.examine(
            args.directory, env=args.env, policies=args.policies, horizon=args.horizon, episodes=args.episodes,
            tolerances=tolerances, uses=args.uses or USES, seed=args.seed, data=_recorded(args),
            progress=lambda what: status.update(f"auditing: {what}"),
        )  # fmt: skip
    report.write(args.directory)
    _say_verdict(args, found)
    console.print(f"{args.directory / 'report.html'} shows it all", soft_wrap=True)
    return (1 if found.verdict["status"] == "fail" else 0), found.as_dict() | {"seconds": time.monotonic() - begin}


def _recorded(args: Any) -> Any:
    """The episodes of a Minari dataset, where one is named instead of an environment."""
    if args.minari is None:
        return None
    from forethought import data

    return data.from_minari(args.minari)[0]


def _say_verdict(args: Any, found: Any) -> None:
    """The verdict by use as a table, and what was found wrong."""
    from rich.table import Table

    table = Table(title=f"{found.about['env']}, {found.verdict['horizon']} imagined steps", title_justify="left")
    for column in ("use", "verdict", "holds up to step", "why"):
        table.add_column(column)
    for use, said in found.verdict["uses"].items():
        steps = "" if said["safe_horizon"] is None else str(said["safe_horizon"])
        table.add_row(use, said["status"], steps, "\n".join(said["reasons"]))
    _console(args).print(table)


def _report(args: Any, begin: float) -> tuple[int, Any]:
    from forethought import report, settings

    for directory in args.directories:
        settings.read(directory)
        _console(args).print(str(report.write(directory)), soft_wrap=True)
    return 0, {"reports": [str(directory / "report.html") for directory in args.directories]}


def _compare(args: Any, begin: float) -> tuple[int, Any]:
    import numpy as np

    from forethought import compare, compare_page
    from forethought.logs import errors_name

    result = compare.compare(args.directories, args.range, rng=np.random.default_rng(0))
    with errors_name(args.out):
        compare_page.write(args.out, result)
    for line in (result["summary"], f"{args.out} shows it all"):
        _console(args).print(line, soft_wrap=True)
    return 0, result | {"page": str(args.out)}


def _check(args: Any, begin: float) -> tuple[int, Any]:
    from forethought.envs.check import check

    found = check(args.env, seed=args.seed, steps=args.steps, **dict(args.env_arg))
    _console(args).print(found)
    return (0 if found.ok else 1), found.as_dict()


def _study(args: Any, begin: float) -> tuple[int, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=_console(args)) as bar:
        task = bar.add_task("", total=None)
        say = lambda done, of, what: bar.update(task, completed=done, total=of, description=what)  # noqa: E731
        count = STUDIES[args.name](args, say)
    seconds = time.monotonic() - begin
    page = args.out / "report.html"
    _console(args).print(f"{count} conditions, {seconds:.0f} s in all; look at {page}", soft_wrap=True)
    return 0, {"seconds": seconds, "conditions": count, "results": str(args.out / "results.json")}


def _study_alignment(args: Any, say: Any) -> int:
    from forethought import settings
    from forethought.studies import alignment, alignment_report, alignment_run

    questions = alignment.quick() if args.quick else alignment.design()
    episodes = args.episodes or (300 if args.quick else 2000)
    found = alignment_run.run(args.out, questions, seeds=args.seeds or 32, episodes=episodes, progress=say)
    about = {"versions": settings.versions(), "git": settings.git_commit()}
    said = alignment_report.results(found, questions) | about
    alignment_report.save(args.out, said)
    alignment_report.write(args.out, found, questions, said)
    return len(found)


def _study_agents(args: Any, say: Any) -> int:
    from forethought.studies import agents

    if args.quick or args.episodes:
        raise ValueError("--quick and --episodes belong to study alignment")
    return len(agents.run(args.out, seeds=args.seeds or 10, progress=say))


def _study_tables(args: Any, say: Any) -> int:
    import importlib

    from forethought import devices, settings

    if args.episodes:
        raise ValueError("--episodes belongs to study alignment")
    if args.name != "hierarchy":  # whose operations are not small
        devices.whole_loops()
    study, report = (importlib.import_module(f"forethought.studies.{args.name}{end}") for end in ("", "_report"))
    about = {"versions": settings.versions(), "git": settings.git_commit()}
    found = study.run(args.out, seeds=args.seeds or study.SEEDS, quick=args.quick, progress=say, about=about)
    report.write(args.out, found)
    return study.count(found)


STUDIES = {
    "alignment": _study_alignment,
    "agents": _study_agents,
    "dyna": _study_tables,
    "options": _study_tables,
    "hierarchy": _study_tables,
}
COMMANDS = {
    **{"train": _train, "demo": _demo, "eval": _eval, "audit": _audit, "report": _report, "compare": _compare},
    **{"check": _check, "study": _study},
}
ENV_ARG = "handed to whatever makes the environment; may be given several times"
SETTINGS = (
    *("algorithm", "env", "steps", "seed", "preset", "processes", "devices"),
    *("checkpoint_every", "eval_episodes", "eval_env", "audit_episodes", "snapshots"),
)


def _parser(arguments: Sequence[str]) -> Parser:
    from forethought._version import __version__

    parser = Parser(prog="forethought", description="Learn a world model, plan in it, audit it.")
    parser.add_argument("--version", action="version", version=f"forethought {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    train = commands.add_parser("train", help="train an agent into a directory, or go on with one")
    algorithm = next((x for x in arguments if x in _algorithms()), None) if "train" in arguments else None
    train.add_argument("algorithm", choices=_algorithms(), help="what to train")
    train.add_argument("--env", required=True, help="jax/NAME, dmc/DOMAIN-TASK, a Gymnasium id, or module:attribute")
    train.add_argument("--out", type=Path, help="the run's directory (default: runs/ALGORITHM-ENV-PRESET-seedN)")
    _add_settings(train)
    train.add_argument("--env-arg", type=_pair, action="append", default=[], metavar="NAME=VALUE", help=ENV_ARG)
    train.add_argument(
        "--override", nargs="+", default=(), metavar="NAME", help="fields that may differ from the run's"
    )
    if algorithm in _algorithms():
        _add_fields(train, algorithm)

    demo = commands.add_parser("demo", help="train, evaluate and report on a pendulum, in two minutes")
    demo.add_argument("--out", type=Path, default=Path("demo"), help="the run's directory (default: demo)")
    demo.add_argument("--seed", type=int, default=0)

    evaluate = commands.add_parser("eval", help="play a run's newest checkpoint, beside zero and random actions")
    evaluate.add_argument("directory", type=Path, metavar="DIR")
    evaluate.add_argument("--episodes", type=_positive, default=20)
    evaluate.add_argument("--env", default=None, help="play in another environment with the same spaces")
    evaluate.add_argument("--sampled", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--seed", type=int, default=1_000_000, help="of the environments")

    audit = commands.add_parser("audit", help="ask whether a run's world model may be trusted, for what, how far ahead")
    audit.add_argument("directory", type=Path, metavar="DIR")
    audit.add_argument("--env", default=None, help="audit against another environment with the same spaces")
    audit.add_argument(
        "--minari", metavar="DATASET", help="audit on a Minari dataset's episodes instead (id or folder)"
    )
    audit.add_argument(
        "--policies", nargs="+", type=Path, default=(), metavar="DIR", help="runs that the model is to rank"
    )
    audit.add_argument("--horizon", type=_positive, default=15, help="imagined steps that the model is judged up to")
    audit.add_argument("--episodes", type=_positive, default=16, help="of each policy")
    audit.add_argument("--tolerances", type=Path, metavar="FILE", help="TOML: tolerance = number (docs/audit.md)")
    audit.add_argument("--uses", nargs="+", metavar="USE", help="what the verdict is about (default: all four)")
    audit.add_argument("--seed", type=int, default=1_000_000, help="of everything random; not one trained with")

    report = commands.add_parser("report", help="write DIR/report.html anew")
    report.add_argument("directories", type=Path, nargs="+", metavar="DIR")

    compare = commands.add_parser("compare", help="say which method is better, over tasks and seeds of finished runs")
    compare.add_argument("directories", type=Path, nargs="+", metavar="DIR")
    compare.add_argument(
        "--out", type=Path, default=Path("compare.html"), metavar="FILE", help="(default: compare.html)"
    )
    compare.add_argument(
        "--range", type=_range, action="append", default=[], metavar="TASK=LOW,HIGH",
        help="returns of TASK that count as score 0 and 1 (default: those of random actions and of the best method)",
    )  # fmt: skip

    study = commands.add_parser("study", help="run a study, or go on with one: results.json, every seed, and a page")
    study.add_argument("name", choices=STUDIES, help="which")
    study.add_argument("--out", type=Path, required=True, help="the study's directory")
    study.add_argument(
        "--seeds", type=_positive, help="of each condition (default: 32; agents 10, dyna 30, hierarchy 6)"
    )
    study.add_argument("--episodes", type=_positive, help="of each run (default: 2000, quick: 300)")
    study.add_argument(
        "--quick",
        action="store_true",
        help="less of it: fewer conditions, or fewer steps",
    )

    check = commands.add_parser("check", help="say what becomes of an environment's spaces, and find its faults")
    check.add_argument("env", metavar="ENV")
    check.add_argument("--env-arg", type=_pair, action="append", default=[], metavar="NAME=VALUE", help=ENV_ARG)
    check.add_argument("--steps", type=_positive, default=1000, help="decisions to take with each seed")
    check.add_argument("--seed", type=int, default=0)

    for command in commands.choices.values():
        command.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result as JSON")
        command.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Options for the settings of a run, with their defaults and docstrings."""
    from forethought.settings import Settings

    docs, hints = _docstrings(Settings), typing.get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        if field.name in SETTINGS[2:]:
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            kind = int if hints[field.name] is int else str
            text = docs.get(field.name, "") + ("" if default is None else f" (default: {default})")
            parser.add_argument(_flag(field.name), type=kind, required=required, default=default, help=text.strip())


def _add_fields(parser: argparse.ArgumentParser, algorithm: str) -> None:
    """Options for the fields of an algorithm's Config; what is not given keeps the preset's value."""
    config = _learner(algorithm).Config
    docs, hints = _docstrings(config), typing.get_type_hints(config)
    group = parser.add_argument_group(f"fields of {algorithm} (the defaults are the preset's)")
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        kind = _boolean if hint is bool else (str if choices else hint)
        group.add_argument(
            _flag(field.name), type=kind, choices=choices, default=argparse.SUPPRESS, help=docs.get(field.name, ""),
            metavar=None if choices else hint.__name__.upper(),
        )  # fmt: skip


def _docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(text.value).split()).replace("%", "%%")
    return docs


def _algorithms() -> list[str]:
    from forethought.settings import ALGORITHMS

    return list(ALGORITHMS)


def _learner(algorithm: str) -> Any:
    from forethought.settings import learner

    return learner(algorithm)


def _field_names(algorithm: str) -> list[str]:
    return [field.name for field in dataclasses.fields(_learner(algorithm).Config)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _pair(text: str) -> tuple[str, Any]:
    """NAME=VALUE, where a value that is not a Python literal is taken as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """TASK=LOW,HIGH; a task's name may hold both signs."""
    task, equals, bounds = text.rpartition("=")
    try:
        low, high = map(float, bounds.split(","))
    except ValueError:
        equals, low, high = "", 0.0, 0.0
    if not equals or not low < high < float("inf") or low == -float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not TASK=LOW,HIGH, two numbers with LOW below HIGH")
    return task, (low, high)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return text.lower() == "true"


def _console(args: Any) -> Any:
    from rich.console import Console

    return Console(quiet=args.quiet, markup=False)  # a path may hold brackets


def _say_returns(args: Any, evaluation: dict[str, Any]) -> None:
    """The returns of an evaluation as a table."""
    import numpy as np
    from rich.table import Table

    rule, step = evaluation["rule"], evaluation["step"]
    table = Table(title=f"{evaluation['env']}, checkpoint {step:,}, {rule}", title_justify="left")
    for column in ("policy", "episodes", "mean return", "standard error", "lowest", "highest"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, values in evaluation["returns"].items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        table.add_row(
            name, str(len(values)), *[f"{x:,.1f}" for x in (np.mean(values), error, min(values), max(values))]
        )
    _console(args).print(table)


def _configure_jax(command: str, num_devices: int | None) -> None:
    """Sets what must be set before jax starts, where nobody has said otherwise."""
    # Leaves the rest of a GPU's memory to other processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from forethought.devices import cpu_devices

    if command in ("train", "demo", "study"):
        with suppress(RuntimeError):  # jax has started: whoever calls `main` from Python has chosen
            cpu_devices(num_devices)
    if command == "demo":  # two thirds of the time to compile, and code as fast for networks this small
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=1 {os.environ.get('XLA_FLAGS', '')}"

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "forethought" / "jax"))


if __name__ == "__main__":
    sys.exit(main())
