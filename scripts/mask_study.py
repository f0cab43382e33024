"""Study of what a sampling mask repairs, by top-p: trainer against sampler with and without the mask, in real runs.

    python scripts/mask_study.py --runs runs/mask_study --json study.json

One cold start, then `moerl train recipe=mask_study rollout.top_p=P` for each P. Every step scores its rollouts with the
weights that sampled them, recorded routing enforced, over the whole vocabulary and inside the recorded kept sets; the
means over steps are shown. A cold start and finished runs in `--runs` are used again. Keys of `moerl train` given
first hold for all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moerl.telemetry.sinks import read_rows

MASKS = {"off": "experts", "on": "both"}
"""Scorers of a mismatch table with recorded routing enforced, by whether the sampling mask is kept."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.99])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/mask_study"))
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of `moerl train`")
    arguments = parser.parse_args()
    cold = arguments.runs / "cold"
    common = ["recipe=mask_study", f"seed={arguments.seed}", *arguments.overrides]
    if not (cold / "cold_start").exists():
        _moerl("sft", *common, f"run_dir={cold}")
    found = {}
    for top_p in arguments.top_p:
        run = arguments.runs / f"top_p-{top_p}"
        if not (run / "summary.json").exists():
            model = ["model=pretrained", f"model.path={cold / 'cold_start'}", "sft.steps=0"]
            _moerl("train", *common, *model, f"rollout.top_p={top_p}", f"run_dir={run}")
        found[top_p] = means([row for row in read_rows(run / "metrics.jsonl") if row["stage"] == "rl"])
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _moerl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "moerl", *arguments], check=True)


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over the steps of a run: kept sets, and what the ratio trainer / sampler looks like with masks off and on."""
    names = {"kept mass": "kept/mass_mean", "kept ids": "kept/size_mean"}
    for mask, scorer in MASKS.items():
        names[f"mean ratio, {mask}"] = f"mismatch/{scorer}/ratio_mean"
        names[f"outside [0.9, 1.1], {mask}"] = f"mismatch/{scorer}/share_outside_tenth"
        names[f"mean |d|, {mask}"] = f"mismatch/{scorer}/logprob_abs_mean"
    return {name: statistics.mean(row[metric] for row in rows) for name, metric in names.items()}


def show(found: dict[float, dict[str, float]]) -> None:
    table = Table("top-p", *next(iter(found.values())))
    for top_p, values in found.items():
        table.add_row(
            str(top_p), *(f"{value:.2%}" if "outside" in name else f"{value:.4g}" for name, value in values.items())
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
