"""How well the audit names faults: exact models that were made wrong on purpose, and exact ones that were not.

    python bench/planted.py --json planted.json
    python bench/planted.py --faults module:FAULTS      faults of somebody else's (docs/planted.md)

Every fault at three magnitudes, on three environments, over several seeds, with the default tolerances. A fault is
named where the audit's findings include one of the kinds that mean it (`MEANS`, docs/planted.md); an alarm over an
exact model is false wherever the verdict is 'fail'. Exit status 1 where fewer than 95 % of the middle and large faults
are named or more than 5 % of the exact models fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MEANS = {
    "region_bias": ("region",),
    "late_drift": ("error",),
    "reward_outside": ("exploitation", "policy_exploitation", "reward"),
    "missing_termination": ("missed_termination",),
    "identical_members": ("identical_members",),
    "delayed_action": ("delayed_action",),
    "action_sign": ("action_sign",),
    "overconfident": ("overconfident", "no_spread"),
    "swapped_keys": ("swapped_keys",),
    "mode_collapse": ("overconfident", "no_spread"),
    "time_limit_termination": ("time_limit",),
    "non_finite": ("non_finite",),
    "reward_scale": ("reward",),
    "phantom_termination": ("false_termination",),
    "ignores_action": ("error", "reward"),
}
"""The kinds of finding that name a fault."""
LATE = {"late_drift": 8}
"""Faults that are named only by a finding which says that all is well before this depth."""
SIZES = ("small", "middle", "large")
ENVS = ("jax/hover", "jax/balance", "jax/grid")


def cases(faults: dict[str, Any], seeds: int) -> list[dict[str, Any]]:
    """Every fault at every magnitude on every environment with every seed; those of one fault and environment together,
    so that they share what is compiled."""
    return [
        {"fault": fault, "environment": env, "size": size, "seed": seed}
        for fault in faults for env in ENVS for size in SIZES for seed in range(seeds)
    ]  # fmt: skip


def exact(audits: int) -> list[dict[str, Any]]:
    """Audits of models without a fault: of the exact ones, and, a tenth of them, of honest ensembles."""
    made = []
    for i in range(audits):
        model = "ensemble" if i % 10 == 9 else "exact"
        made.append({"fault": None, "model": model, "environment": ENVS[i % 3], "size": None, "seed": 100 + i})
    return made


def run(case: dict[str, Any], source: str) -> dict[str, Any]:
    """Audits the model of one case and says what was found."""
    from forethought import envs
    from forethought.auditing.audit import audit
    from forethought.envs import trial
    from forethought.models import members, oracle

    env: Any = envs.make(case["environment"])
    if case["fault"] is None:
        model = members.ensemble(env) if case["model"] == "ensemble" else oracle.Oracle(env)
        magnitude = None
    else:
        faults, build = _source(source)
        magnitude = faults[case["fault"]][SIZES.index(case["size"])]
        model = build(env, case["fault"], magnitude)
    begin = time.monotonic()
    found = audit(model, env, policies={"controller": trial.Controller(env.spec.name)}, seed=1_000_000 + case["seed"])
    findings = found.verdict["findings"]
    return case | {
        "magnitude": magnitude,
        "named": _named(case["fault"], findings, _means(source)),
        "failed": found.verdict["status"] == "fail",
        "kinds": sorted({f["kind"] for f in findings}),
        "reasons": [f["text"] for f in findings] or [r for u in found.verdict["uses"].values() for r in u["reasons"]],
        "seconds": round(time.monotonic() - begin, 2),
    }


def _named(fault: str | None, findings: list[dict[str, Any]], means: dict[str, tuple[str, ...]]) -> bool:
    if fault is None:
        return False
    meant = [f for f in findings if f["kind"] in means[fault]]
    if fault in LATE:
        first = [f["depth"] for f in findings if f["kind"] in ("error", "reward")]
        return bool(meant) and min(first) >= LATE[fault]
    return bool(meant)


def _source(source: str) -> tuple[dict[str, Any], Any]:
    """Magnitudes by fault, and the function that plants one."""
    module = importlib.import_module(source.partition(":")[0])
    return getattr(module, source.partition(":")[2]), module.planted


def _means(source: str) -> dict[str, tuple[str, ...]]:
    module = importlib.import_module(source.partition(":")[0])
    return getattr(module, "MEANS", MEANS)


def summary(done: list[dict[str, Any]]) -> dict[str, Any]:
    planted = [x for x in done if x["fault"] is not None]
    counted = [x for x in planted if x["size"] != "small"]
    clean = [x for x in done if x["fault"] is None]
    share = lambda some, key: sum(x[key] for x in some) / len(some) if some else None  # noqa: E731
    table = {
        fault: {
            env: {
                size: share(
                    [x for x in planted if (x["fault"], x["environment"], x["size"]) == (fault, env, size)], "named"
                )
                for size in SIZES
            }
            for env in ENVS
        }
        for fault in dict.fromkeys(x["fault"] for x in planted)
    }
    return {
        "named_middle_and_large": share(counted, "named"),
        "false_alarms": share(clean, "failed"),
        "audits_of_exact_models": len(clean),
        "table": table,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--faults",
        default="forethought.models.planted:FAULTS",
        help="module:dict of magnitudes; the module has planted(env, fault, magnitude) and may have MEANS",
    )
    parser.add_argument("--only", nargs="+", help="these faults alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--exact", type=int, default=100, help="audits of exact models")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    faults = {k: v for k, v in _source(args.faults)[0].items() if not args.only or k in args.only}
    todo = cases(faults, args.seeds) + sorted(exact(args.exact), key=lambda x: (x["environment"], x["model"]))
    groups: dict[Any, list[dict[str, Any]]] = {}
    for case in todo:
        groups.setdefault((case["fault"], case["environment"], case.get("model")), []).append(case)
    done: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"), initializer=_alone) as pool:
        for some in pool.map(_group, groups.values(), [args.faults] * len(groups)):
            done += some
            last, named = some[-1], {size: sum(x["named"] for x in some if x["size"] == size) for size in SIZES}
            what = f"{last['fault'] or 'exact'} {last['environment']}"
            failed = f"failed {sum(x['failed'] for x in some)} of {len(some)}"
            print(
                f"{len(done)}/{len(todo)} {what}: named {named}, {failed}, {sum(x['seconds'] for x in some):.0f} s",
                flush=True,
            )
    found = summary(done)
    if args.json:
        from forethought.settings import git_commit, versions

        args.json.write_text(
            json.dumps({"cases": done, **found, "git": git_commit(), "versions": versions()}, indent=1) + "\n"
        )
    print(json.dumps({k: v for k, v in found.items() if k != "table"}))
    enough = found["named_middle_and_large"] is None or found["named_middle_and_large"] >= 0.95
    quiet = found["false_alarms"] is None or found["false_alarms"] <= 0.05
    return 0 if enough and quiet else 1


def _group(some: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    return [run(case, source) for case in some]


def _alone() -> None:
    """Each process takes one core."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    sys.path.insert(0, os.getcwd())


if __name__ == "__main__":
    sys.exit(main())
