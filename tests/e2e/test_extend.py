"""A finished run is made longer: it ends as one that was planned so, and its directory says what was changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from moerl_runs import DoneRun, Runs, Sums, rows, summary

from moerl.orchestration.history import read_history


def of_stage(run: Path, stage: str) -> list[dict[str, Any]]:
    return [row for row in rows(run) if row["stage"] == stage]


@pytest.fixture(scope="module")
def short(forked: Runs, sums: Sums, tmp_path_factory: pytest.TempPathFactory) -> DoneRun:
    """The undisturbed run's configuration, planned with two steps of the five; the learning rate is constant."""
    folder = tmp_path_factory.mktemp("short") / "run"
    finished = forked.run(*sums.train(folder), "rl.steps=2", path=[sums.folder])
    assert finished.status == 0, finished.output
    return DoneRun(folder, finished)


def test_a_finished_run_with_more_steps_goes_on_and_ends_as_one_planned_with_them(
    forked: Runs, sums: Sums, short: DoneRun, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(short.folder, tmp_path / "run"))
    finished = forked.run("train", f"resume={run}", "rl.steps=5", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert "rl: going on from step 2" in finished.output
    assert "changed: rl.steps 2 -> 5 after step 2 of rl" in finished.output
    assert of_stage(run, "rl") == of_stage(undisturbed.folder, "rl")
    weights, expected = (folder / "final_model" / "model.safetensors" for folder in (run, undisturbed.folder))
    assert weights.read_bytes() == expected.read_bytes()
    figures = summary(run)
    assert figures["steps"] == 5
    assert figures["heldout_accuracy_final"] == summary(undisturbed.folder)["heldout_accuracy_final"]
    last = of_stage(run, "evaluation")[-1]
    assert last == of_stage(undisturbed.folder, "evaluation")[-1]
    assert last["step"] == 5
    [row] = [row for row in read_history(run) if row.key == "rl.steps"]
    assert (row.stage, row.step, row.old, row.new, row.note) == ("rl", 2, 2, 5, "")


def test_a_run_that_has_made_the_steps_already_is_not_made_shorter(
    forked: Runs, sums: Sums, short: DoneRun, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(short.folder, tmp_path / "run"))
    finished = forked.run("train", f"resume={run}", "rl.steps=1", path=[sums.folder])
    assert finished.status == 2, finished.output
    assert "rl.steps: the run has made as many steps already; seen: 1; expected: more than 2" in finished.output
    assert read_history(run) == []
    again = forked.run("train", f"resume={run}", "evaluation.every=1", path=[sums.folder])
    assert again.status == 0, again.output
    assert summary(run)["steps"] == 2
    assert [row.key for row in read_history(run)][-1] == "evaluation.every"
    third = forked.run("train", f"resume={run}", path=[sums.folder])
    assert "changed earlier, " in third.output
    assert "evaluation.every 2 -> 1 after step 2 of rl" in third.output
