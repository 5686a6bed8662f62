"""The tutorial's code runs as it stands, from top to bottom."""

import pathlib
import re
import sys

from forethought import cli
from forethought.envs import HostBatch, make
from forethought.protocols import AbstractEnv

TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "howto_environment.md"


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)


def test_every_block_of_the_tutorial_runs():
    blocks = fenced("python")
    assert len(blocks) == 6
    # One namespace, as for a reader who types it in; compiled with line numbers of their own block.
    names = {"__name__": "howto"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{TUTORIAL.name}, block {number}", "exec"), names)


def test_the_lines_that_train_name_environments_of_the_readers_module(tmp_path, monkeypatch):
    definitions = [block for block in fenced("python") if re.search("^class ", block, re.MULTILINE)]
    (tmp_path / "your_module.py").write_text("\n".join(definitions))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "your_module", raising=False)
    made = []
    for line in fenced("sh"):
        command, *arguments = line.split()
        assert command == "forethought"
        made.append(make(cli._parser(arguments).parse_args(arguments).env))
    assert [type(env) for env in made][:1] == [HostBatch] and isinstance(made[1], AbstractEnv) and len(made) == 2
    assert [env.spec.time_limit for env in made] == [100, 100]
