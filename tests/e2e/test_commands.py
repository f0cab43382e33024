"""The other commands, on what a run left."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from moerl_runs import DoneRun, Runs
from safetensors.numpy import load_file, save_file


def model_of(run: DoneRun) -> list[str]:
    return ["recipe=tiny", "model=pretrained", f"model.path='{run.folder / 'final_model'}'"]


def test_sft_alone_leaves_the_cold_start_of_the_whole_run(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("sft", "recipe=tiny", f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    weights = "cold_start/model.safetensors"
    assert (run / weights).read_bytes() == (tiny.folder / weights).read_bytes()
    assert not (run / "final_model").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 0
    assert summary["heldout_accuracy_cold_start"] is not None


def test_rollout_samples_from_a_trained_model_into_parquet(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    from moerl.contract.disk import read_parquet

    run = tmp_path / "run"
    finished = forked.run("rollout", *model_of(tiny), f"run_dir='{run}'", "rollout.top_p=0.8")
    assert finished.status == 0, finished.output
    [path] = re.findall(r"16 rollouts, accuracy \d\.\d+, written to (.*)", finished.output)
    trajectories = read_parquet(path)
    assert len(trajectories) == 16
    assert {turn.sampling.top_p for t in trajectories for turn in t.turns if turn.sampling} == {0.8}
    assert {t.policy_versions.max() for t in trajectories} == {0}


def test_eval_measures_what_the_run_measured_last(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("eval", *model_of(tiny), f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((tiny.folder / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("heldout/accuracy", "heldout/length_mean"):
        assert row[name] == last[name]
    assert f"accuracy {row['heldout/accuracy']:.3f}" in finished.output


@pytest.mark.parametrize("command", ["eval", "rollout", "train"])
def test_a_model_with_a_missing_tensor_is_named_before_anything_starts(
    command: str, forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny.folder / "final_model", tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    missing = sorted(tensors)[len(tensors) // 2]
    del tensors[missing]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    arguments = ["recipe=tiny", "model=pretrained", f"model.path='{model}'", f"run_dir='{tmp_path / 'run'}'"]
    finished = forked.run(command, *arguments)
    assert finished.status == 2, finished.output
    assert f"1 of {len(tensors) + 1} tensors are missing, first '{missing}'" in finished.output
    assert "Traceback" not in finished.output
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_a_model_that_a_run_left(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", *model_of(tiny), f"run_dir='{run}'", "sft.steps=0", "rl.steps=1")
    assert finished.status == 0, finished.output
    assert not (run / "initial_model").exists()
    names = {path.name for path in (run / "final_model").iterdir()}
    assert names == {path.name for path in (tiny.folder / "final_model").iterdir()}
