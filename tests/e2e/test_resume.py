"""A run that was killed goes on, and ends as if nothing had happened: the same metrics and weights, bit for bit."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from moerl_runs import DoneRun, Fault, Runs, Sums, rows
from run_checks import assert_the_same

STEP = "moerl.trainer.trainer:MegatronTrainer.step"
UPDATE = "moerl.trainer.optimizer:Optimizer.update"
WRITE = "moerl.trainer.sharded_state:write"
COMMIT = "moerl.trainer.checkpoint:CheckpointStore.commit"
APPEND = "moerl.buffer.journal:Journal.append"
WRITE_MODEL = "moerl.trainer.hf_directory:save_torch_state_dict"


def kill(place: str, call: int = 1, *, after: bool = False) -> Fault:
    return "kill", {"place": place, "call": call, "after": after}


JOURNALLED = "with part of the groups of a step in the journal"
# Kills of one run, each after going on from the one before, and where the run goes on then. Checkpoints are written
# after steps 2, 4 and 6 of the cold start, and after 2, 4 and 5 of reinforcement learning, with two updates per step.
KILLS = {
    "in the cold start": [
        (kill(STEP, 2), "starting from the beginning"),
        (kill(STEP, 4), "sft: going on from step 2"),
        (kill(COMMIT), "sft: going on from step 2"),
        (kill(COMMIT, 2, after=True), "sft: going on from step 6"),
    ],
    "between the stages and in reinforcement learning": [
        (kill("moerl.orchestration.sft:train", after=True), "sft: going on from step 6"),
        (kill(UPDATE, 2), "sft: going on from step 6"),
        (kill(COMMIT), "sft: going on from step 6"),
        (kill("moerl.orchestration.run:Run.log", 4, after=True), "rl: going on from step 2"),
    ],
    # Those that are missing are sampled without those that are in the journal.
    JOURNALLED: [
        (kill(APPEND, 6, after=True), "rl: going on from step 2"),
        (kill(APPEND, 1, after=True), "rl: going on from step 2"),
        (kill(APPEND, 3, after=True), "rl: going on from step 4"),
    ],
    "while it writes what it leaves": [
        (kill(WRITE, 5, after=True), "rl: going on from step 2"),
        (kill(COMMIT, after=True), "rl: going on from step 4"),
        (kill(WRITE_MODEL), "rl: going on from step 5"),
        (kill("moerl.orchestration.reporting:write_summary"), "rl: going on from step 5"),
    ],
}
ALIKE = ("in the cold start", "between the stages and in reinforcement learning", "while it writes what it leaves")
"""Kills like the others, at more places."""


@pytest.mark.parametrize("when", [pytest.param(each, marks=[pytest.mark.slow] * (each in ALIKE)) for each in KILLS])
def test_a_run_killed_again_and_again_ends_as_if_undisturbed(
    when: str, forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments, goes_on = sums.train(run), "starting Megatron"
    for fault, where in KILLS[when]:
        killed = forked.run(*arguments, fault=fault, path=[sums.folder])
        assert killed.status == -signal.SIGKILL, killed.output
        assert goes_on in killed.output
        arguments, goes_on = ["train", f"resume={run}"], where
    finished = forked.run(*arguments, path=[sums.folder])
    assert finished.status == 0, finished.output
    assert goes_on in finished.output
    assert_the_same(run, undisturbed.folder)


# --- corrupt checkpoints ---------------------------------------------------------------------------------------------


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def copy_of(run: DoneRun, folder: Path) -> Path:
    return Path(shutil.copytree(run.folder, folder / "run"))


@pytest.mark.parametrize(
    "file", ["__0_0.distcp", *(pytest.param(each, marks=pytest.mark.slow) for each in (".metadata", "manifest.json"))]
)
def test_a_corrupt_newest_checkpoint_is_named_and_the_one_before_is_used(
    file: str, forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = copy_of(undisturbed, tmp_path)
    flip_byte(run / "checkpoints" / "1-rl-000005" / file)
    (run / "summary.json").unlink()
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert "WARNING: corrupt checkpoint left aside, falling back to the one before: 1-rl-000005" in finished.output
    assert "rl: going on from step 4" in finished.output
    assert_the_same(run, undisturbed.folder)


@pytest.mark.slow
def test_falling_back_into_the_cold_start_trains_its_rest_again(
    forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert forked.run(*sums.train(run), fault=kill(UPDATE, 8), path=[sums.folder]).status == -signal.SIGKILL
    assert (run / "cold_start").exists()
    flip_byte(run / "checkpoints" / "0-sft-000006" / "__0_0.distcp")
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert "sft: going on from step 4" in finished.output
    assert_the_same(run, undisturbed.folder)


@pytest.mark.slow
def test_damaged_models_are_written_again_from_checkpoints(
    forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert forked.run(*sums.train(run), fault=kill(UPDATE, 8), path=[sums.folder]).status == -signal.SIGKILL
    cut(run / "cold_start" / "model.safetensors")
    (run / "initial_model" / "config.json").unlink()
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert "cold_start: model.safetensors has " in finished.output
    assert f"writing it again from {run / 'checkpoints' / '0-sft-000006'}" in finished.output
    assert_the_same(run, undisturbed.folder)
    cut(run / "final_model" / "model.safetensors")
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert_the_same(run, undisturbed.folder)
    # Its weights are those of the reference.
    flip_byte(run / "cold_start" / "model.safetensors")
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 1, finished.output
    assert "cold_start is damaged and cannot be written again" in finished.output
    assert "model.safetensors does not match its hash; 0-sft-000006: no manifest" in finished.output


@pytest.mark.slow
def test_a_run_with_newer_checkpoints_and_no_reference_goes_on_without_its_cold_start(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = forked.run("train", "recipe=tiny", f"run_dir='{run}'", fault=kill(UPDATE, 7))
    assert stopped.status == -signal.SIGKILL, stopped.output
    assert sorted(path.name for path in (run / "checkpoints").glob("[0-9]*")) == ["1-rl-000001", "1-rl-000002"]
    flip_byte(run / "cold_start" / "model.safetensors")
    damaged = (run / "cold_start" / "model.safetensors").read_bytes()
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    said = "cold_start: model.safetensors does not match its hash; 0-sft-000004: no manifest. It stays as it is: the"
    assert finished.output.count(said) == 1
    assert rows(run) == rows(tiny.folder)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (run / "final_model" / file).read_bytes() == (tiny.folder / "final_model" / file).read_bytes()
    assert (run / "cold_start" / "model.safetensors").read_bytes() == damaged


@pytest.mark.parametrize("loss", ["every checkpoint corrupt", "every checkpoint gone"])
def test_a_run_without_a_valid_checkpoint_stops_and_is_not_started_over(
    loss: str, forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = copy_of(undisturbed, tmp_path)
    if loss == "every checkpoint gone":
        shutil.rmtree(run / "checkpoints")
    else:
        for shard in (run / "checkpoints").glob("*/__0_0.distcp"):
            flip_byte(shard)
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 1, finished.output
    expected = (
        "the checkpoints of .* are gone"
        if "gone" in loss
        else "no checkpoint in .* is valid; seen: 1-rl-000005: .*1-rl-000004: "
    )
    assert re.search(f"error: {expected}", finished.output)
    assert "go on from" not in finished.output
    assert rows(run) == rows(undisturbed.folder)


LOSSES = {
    "in the cold start": (kill(STEP, 3), ()),
    "in reinforcement learning": (kill("moerl.orchestration.run:Run.log", 7), ("cold_start",)),
    "before last_checkpoint.txt was written": (
        kill("moerl.orchestration.run:Run.log", 7),
        ("cold_start", "last_checkpoint.txt"),
    ),
}


@pytest.mark.parametrize(
    ("fault", "also_lost"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name == "in reinforcement learning"))
        for name, each in LOSSES.items()
    ],
)
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(
    fault: Fault, also_lost: tuple[str, ...], forked: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert forked.run("train", "recipe=tiny", f"run_dir='{run}'", fault=fault).status == -signal.SIGKILL
    for name in ("checkpoints", *also_lost):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (run / "metrics.jsonl").read_text()
    refused = forked.run("train", f"resume={run}")
    assert refused.status == 1, refused.output
    assert f"error: the checkpoints of {run} are gone" in refused.output
    assert (run / "metrics.jsonl").read_text() == before


def test_a_resume_with_another_learning_rate_is_refused(forked: Runs, undisturbed: DoneRun) -> None:
    finished = forked.run("train", f"resume={undisturbed.folder}", "optimizer.lr=1.0")
    assert finished.status == 2
    assert "optimizer.lr: cannot change when a run goes on" in finished.output
