"""The tutorial's code runs as it stands, from top to bottom."""

import pathlib
import re

TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "howto_environment.md"


def test_every_block_of_the_tutorial_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    # One namespace, as for a reader who types it in; compiled with line numbers of their own block.
    names = {"__name__": "howto"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{TUTORIAL.name}, block {number}", "exec"), names)
