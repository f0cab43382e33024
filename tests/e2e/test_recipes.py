"""Recipes to copy: the ones for GPUs are accepted, the one for a laptop learns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from moerl import cli

ROOT = Path(__file__).parents[2]


def make_sums(folder: Path) -> None:
    """The rows of docs/recipes.md, by its own program."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


@pytest.mark.slow
def test_a_small_chat_model_improves_on_two_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_sums(tmp_path)
    assert cli.main(["train", "recipe=math_small", "task.path=sums.jsonl", "run_dir=run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_accuracy_final"] > summary["heldout_accuracy_cold_start"] + 0.1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert {"reward/right/mean", "reward/form/mean"} <= last.keys()
    table = pq.read_table(tmp_path / "run" / "evaluations" / "heldout-000040.parquet").to_pylist()
    assert len(table) == 100 * 5
    assert all(row["prompt"].startswith("<|im_start|>user\n") for row in table)
    assert cli.main(["samples", "run", "--best"]) == 0
