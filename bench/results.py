"""Takes from runs what docs/results.md reports, and draws its figures with every seed in them.

    python bench/results.py take RUN... --out docs/results/runs.json
    python bench/results.py draw docs/results
    python bench/results.py table docs/results/alignment/results.json > docs/alignment_conditions.md

`take` keeps of a run its settings, commit, versions, wall time, the training returns it logged and its final
evaluation, and adds to or replaces what the file holds. `draw` needs nothing but the files in docs/results; `table`
lists an alignment study's conditions.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

PUBLISHED = {
    "dmc/cartpole-swingup": {50_000: 321.6, 100_000: 527.7},
    "dmc/pendulum-swingup": {50_000: 182.4},
    "dmc/reacher-easy": {50_000: 630.8},
}
"""DreamerV3's own scores: training returns, mean of 5 seeds, danijar/dreamerv3 at e3f0224, scores/dmc_proprio."""


def taken(run: Path) -> dict[str, Any]:
    """The record of a finished run."""
    config, evaluation = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "evaluation"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [[line["step"], round(line["real/episode_return"], 1)] for line in lines if "real/episode_return" in line]
    latest = (config["overrides"] or [config])[-1]
    return {
        "env": config["env"], "preset": config["preset"], "seed": config["seed"], "steps": config["steps"],
        "updates": lines[-1]["update/count"], "git": latest["git"], "versions": latest["versions"],
        "train_seconds": round(lines[-1]["time/wall_seconds"]), "step": evaluation["step"], "rule": evaluation["rule"],
        "returns": {name: [round(x, 1) for x in values] for name, values in evaluation["returns"].items()},
        "training_returns": curve,
    }  # fmt: skip


def take(runs: list[Path], out: Path) -> None:
    held = json.loads(out.read_text()) if out.exists() else []
    key = lambda record: (record["env"], record["preset"], record["seed"], record["steps"])  # noqa: E731
    records = {key(record): record for record in [*held, *map(taken, runs)]}
    out.write_text("[\n" + ",\n".join(json.dumps(records[k]) for k in sorted(records)) + "\n]\n")
    for record in records.values():
        values = record["returns"]["agent"]
        error = np.std(values, ddof=1) / len(values) ** 0.5
        print(f"{record['env']} seed {record['seed']} at {record['steps']:,}: {np.mean(values):.0f} +- {error:.0f}, "
              f"{record['train_seconds']} s, {(record['git'] or '')[:7]}")  # fmt: skip


def draw_curves(folder: Path) -> None:
    """Training returns of every seed, the final greedy evaluation as a point, and what was published."""
    records = json.loads((folder / "runs.json").read_text())
    names = sorted({record["env"] for record in records})
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3.2), squeeze=False, layout="constrained")
    for ax, name in zip(axes[0], names, strict=True):
        for record in (record for record in records if record["env"] == name):
            color = f"C{record['seed']}"
            if all(r["seed"] != record["seed"] or r["env"] != name or r["steps"] <= record["steps"] for r in records):
                ax.plot(*np.array(record["training_returns"]).T, color=color, lw=1, label=f"seed {record['seed']}")
            values = record["returns"]["agent"]
            ax.errorbar(
                record["step"], np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5, fmt="o", color=color
            )
        for step, score in PUBLISHED[name].items():
            ax.plot(step, score, "k_", ms=16, mew=2)
        ax.set(title=name, xlabel="simulator steps", ylabel="return", ylim=(-20, 1000))
        ax.legend(loc="upper left", frameon=False)
    figure.savefig(folder / "curves.png", dpi=110)


def draw_preset(folder: Path) -> None:
    """One dot a seed for every variant of the cpu preset."""
    results = json.loads((folder / "cpu_preset.json").read_text())["results"]
    names, variants = (list(dict.fromkeys(r[key] for r in results)) for key in ("env", "variant"))
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.4), squeeze=False, layout="constrained")
    for ax, name in zip(axes[0], names, strict=True):
        for result in (result for result in results if result["env"] == name):
            place = variants.index(result["variant"])
            ax.plot(np.sort(result["returns"]), [place] * len(result["returns"]), "o", ms=4, alpha=0.6, color="C0")
            ax.plot(np.mean(result["returns"]), place, "k|", ms=14)
        ax.set(
            title=f"{name}, {result['steps']:,} steps",
            xlabel="greedy return, one dot a seed",
            yticks=range(len(variants)),
        )
        ax.set_yticklabels(variants)
        ax.invert_yaxis()
    figure.savefig(folder / "cpu_preset.png", dpi=110)


def table(path: Path) -> None:
    """Every condition of an alignment study, question by question, as Markdown."""
    said = json.loads(path.read_text())
    some = said["conditions"][0]
    print("# The conditions of the alignment study\n")
    print(
        f"{len(said['conditions'])} conditions, {some['seeds']} seeds each, {some['episodes']:,} episodes, commit "
        f"{said['git'][:7]}, jax {said['versions']['jax']}. Return: interquartile mean over seeds with a 95 % "
        "bootstrap interval, diverged runs counted as -1,000. Cosine of the shared parts, squared error of the model's "
        "observation one and five steps ahead, and promised minus real return: medians over seeds, '-' where not "
        "finite.\n\nMade by `python bench/results.py table docs/results/alignment/results.json`."
    )
    show = lambda x: "-" if x is None else f"{x:.3g}"  # noqa: E731
    for question in dict.fromkeys(q for c in said["conditions"] for q in c["questions"]):
        print(f"\n## {question[0].upper()}{question[1:]}\n")
        print("| condition | return | diverged | cosine | error, 1 step | error, 5 steps | promised - real |")
        print("|---|---|---|---|---|---|---|")
        for c in (c for c in said["conditions"] if question in c["questions"]):
            numbers = " | ".join(show(c[k]) for k in ("cosine", "model_error_1", "model_error_5", "exploitation_gap"))
            interval = f"{c['iqm']:.2f} ({c['ci_low']:.2f} to {c['ci_high']:.2f})"
            print(f"| {c['name']} | {interval} | {c['diverged']} | {numbers} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    taking = modes.add_parser("take")
    taking.add_argument("runs", type=Path, nargs="+")
    taking.add_argument("--out", type=Path, required=True)
    modes.add_parser("draw").add_argument("folder", type=Path)
    modes.add_parser("table").add_argument("path", type=Path)
    args = parser.parse_args()
    if args.mode == "table":
        table(args.path)
    elif args.mode == "take":
        take(args.runs, args.out)
    else:
        draw_curves(args.folder)
        draw_preset(args.folder)


if __name__ == "__main__":
    main()
