"""Recipes to copy: the ones for GPUs are accepted, the one for a laptop learns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from moerl_runs import Runs, rows

from moerl import cli

ROOT = Path(__file__).parents[2]


SMALL = {"math_small": "sums.jsonl", "code_small": "programs.jsonl"}
"""The recipes for a laptop, and the data that docs/recipes.md makes for each."""


def make_data(folder: Path) -> None:
    """The rows of docs/recipes.md, by its own programs."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipes_for_a_laptop_run_on_the_data_of_their_page(recipe: str, forked: Runs, tmp_path: Path):
    make_data(tmp_path)
    few = ("sft.steps=2", "sft.batch_size=8", "sft.num_examples=64", "rl.steps=1", "rl.prompts_per_step=4")
    fewer = ("rl.group_size=2", "rollout.max_new_tokens=12", "evaluation.dev_problems=4", "evaluation.samples=2")
    folder = tmp_path / "run"
    place = (f"task.path='{tmp_path / SMALL[recipe]}'", f"run_dir='{folder}'")
    finished = forked.run("train", f"recipe={recipe}", *few, *fewer, "evaluation.heldout_problems=4", *place)
    assert finished.status == 0, finished.output
    [step] = [row for row in rows(folder) if row["stage"] == "rl"]
    first = "right" if recipe == "math_small" else "passed"
    assert step[f"reward/{first}/mean"] == step["accuracy/mean"]
    assert "reward/form/mean" in step
    assert len(pq.read_table(folder / "evaluations" / "heldout-000001.parquet")) == 4 * 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_a_small_chat_model_improves_on_two_rewards(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)
    assert cli.main(["train", f"recipe={recipe}", f"task.path={SMALL[recipe]}", "run_dir=run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_accuracy_final"] > summary["heldout_accuracy_cold_start"] + 0.1
    steps = summary["steps"]
    table = pq.read_table(tmp_path / "run" / "evaluations" / f"heldout-{steps:06d}.parquet").to_pylist()
    assert len(table) == 100 * 5
    assert all(row["prompt"].startswith("<|im_start|>user\n") for row in table)
    assert cli.main(["samples", "run", "--best"]) == 0
