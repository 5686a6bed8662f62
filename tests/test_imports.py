"""A module imports only what stands above it."""

import ast
from pathlib import Path

import forethought

ROOT = Path(forethought.__file__).parent
ORDER = """
_version
types  tree  devices  protocols
ops  ops.returns  ops.losses  ops.dists  ops.stats  ops.loops  ops.laprop  ops.align  ops.bounds  ops.dynamic
nets
envs.single  envs.spaces  envs.sketch  envs.probe  envs.seat  envs.workers  envs.host  envs.gym  envs.dmc
envs.pure  envs.tabular  envs.mazes  envs.distractor  envs.control  envs.trial  envs.hosted  envs.distract
envs.waiting
envs  envs.check
gate_record  evidence  gate
options  recovery  option_env  option_host  discovery  levels
imagine  collect  data  replay  packing  checkpoint
models  models.oracle  models.members  models.planted  models.rssm  models.coded  models.sight  models.actor_critic
models.goals  models.tabular
loop
auditing  auditing.subject  auditing.reality  auditing.trial  auditing.asked  auditing.depth  auditing.calibration
auditing.support  auditing.values  auditing.exploitation  auditing.diagnosis  auditing.drift  auditing.mismatch
auditing.tolerances  auditing.findings  auditing.verdict  auditing.audit  auditing.episodes  auditing.evaluation
algos  algos.dreamer  algos.aligned  algos.dyna  algos.smdp  algos.option_critic  algos.director
record  page  audit_curves  audit_promises  audit_causes  audit_report  report  compare  compare_page
logs  settings  agent  examination  run
studies  studies.alignment  studies.alignment_run  studies.alignment_report  studies.agents
studies.dyna  studies.dyna_report  studies.options  studies.options_report  studies.hierarchy  studies.hierarchy_report
__init__
cli
""".split()


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports(source):
    """The modules of ours that a source imports anywhere, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("forethought.") in MODULES else node.module for name in whole]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == "forethought"]
        found |= {name.removeprefix("forethought").lstrip(".") or "__init__" for name in ours}
    return found


IMPORTS = {name: imports(path.read_text()) for name, path in MODULES.items()}


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(MODULES)


def test_a_module_imports_only_what_stands_above_it():
    wrong = [
        f"{name} imports {other}, which stands below it"
        for name, others in IMPORTS.items()
        for other in others
        if ORDER.index(other) >= ORDER.index(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_ops_import_nothing_of_ours_but_ops():
    for name, others in IMPORTS.items():
        if name.startswith("ops"):
            assert all(other.startswith("ops") for other in others), name


def test_algorithms_know_nothing_of_each_other_and_only_studies_import_them():
    for name, others in IMPORTS.items():
        assert name.startswith("studies.") or not any(other.startswith("algos.") for other in others), name


def test_imports_are_found_wherever_they_stand():
    source = "import forethought.tree\ndef f():\n    from forethought.ops import losses, returns as r\n    import jax\n"
    assert imports(source) == {"tree", "ops.losses", "ops.returns"}
    assert imports("from forethought import nets\nfrom forethought import __doc__ as d") == {"nets", "__init__"}
    assert imports("from forethought.types import Box") == {"types"}
