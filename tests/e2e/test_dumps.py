"""One half without the other: training from dumps, with no engine, and rollouts without a trainer."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moerl_runs import DoneRun, Runs, Sums, rows

from moerl.contract.disk import read_parquet, write_parquet

UNKNOWN_TO_DUMPS = re.compile(r"weights/|groups/waiting|tokens/left_out")
"""Metrics of engines and of what waits for them."""


def trained(run: Path) -> list[dict[str, Any]]:
    """The rows of both stages, without what only a run with an engine has."""
    return [
        {name: value for name, value in row.items() if not UNKNOWN_TO_DUMPS.match(name)}
        for row in rows(run)
        if row["stage"] != "evaluation"
    ]


@pytest.mark.parametrize(
    "kills",  # updates; checkpoints are written after steps of two
    [pytest.param((), id="undisturbed"), pytest.param((4, 3), id="killed twice", marks=pytest.mark.slow)],
)
def test_training_from_the_dumps_of_a_run_gives_its_digits(
    kills: tuple[int, ...], forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*sums.train(run), "rollout=dumps", f"rollout.path='{undisturbed.folder}'"]
    for call in kills:
        fault = "kill", {"place": "moerl.trainer.optimizer:Optimizer.update", "call": 6 + call, "after": False}
        killed = forked.run(*arguments, fault=fault, path=[sums.folder])
        assert killed.status == -signal.SIGKILL, killed.output
        arguments = ["train", f"resume={run}"]
    finished = forked.run(*arguments, path=[sums.folder])
    assert finished.status == 0, finished.output
    assert "no engine is started" in finished.output
    assert trained(run) == trained(undisturbed.folder)
    for model in ("cold_start", "final_model"):
        weights, expected = (folder / model / "model.safetensors" for folder in (run, undisturbed.folder))
        assert weights.read_bytes() == expected.read_bytes()
    assert not (run / "rollouts").exists()


SCORED_LOSS = """
from moerl.algorithms.toolbox import PolicyLoss, token_mean

def loss(rows):
    again = rows.scores_T["again"]
    assert again.equal(rows.rollout_logprobs_T) and again.any(), "scores are of other tokens"
    losses_T = -rows.advantages_T * rows.trainer_logprobs_T
    return PolicyLoss(token_mean(losses_T, rows.loss_mask_T, rows.totals.num_tokens), losses_T)

def advantages(batch):
    values = batch.scores_N["again"]
    return values - values.mean()
"""


def test_scores_of_a_dump_reach_the_loss_and_the_advantages_token_by_token(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    (tmp_path / "scored_loss.py").write_text(SCORED_LOSS)
    for file in sorted((tiny.folder / "rollouts").glob("step-*.parquet")):
        scored = [replace(t, scores={"again": t.rollout_logprobs}) for t in read_parquet(file)]
        write_parquet(tmp_path / "scored/rollouts" / file.name, scored)
    run = tmp_path / "run"
    model = ["recipe=tiny", "model=pretrained", f"model.path='{tiny.folder / 'cold_start'}'", "sft.steps=0"]
    dumps = ["rollout=dumps", f"rollout.path='{tmp_path / 'scored'}'", "algorithm=custom", "algorithm.scores=[again]"]
    functions = ["algorithm.loss=scored_loss:loss", "algorithm.advantages=scored_loss:advantages"]
    finished = forked.run("train", *model, *dumps, *functions, f"run_dir='{run}'", path=[tmp_path])
    assert finished.status == 0, finished.output
    assert len(rows(run)) == 3


def test_rollouts_without_a_trainer_are_summed_up_and_can_be_trained(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    model = ["recipe=tiny", "model=pretrained", f"model.path='{tiny.folder / 'final_model'}'"]
    sampled = tmp_path / "sampled"
    finished = forked.run("rollout", *model, f"run_dir='{sampled}'")
    assert finished.status == 0, finished.output
    summary = json.loads((sampled / "rollouts/rollouts.json").read_text())
    assert {"reward/mean", "accuracy/mean", "response/length_mean", "kept/size_mean"} <= summary.keys()
    run, path = tmp_path / "run", re.findall(r"rollout=dumps (rollout.path=\S+)", finished.output)
    finished = forked.run("train", *model, "sft.steps=0", f"run_dir='{run}'", "rollout=dumps", *path)
    assert finished.status == 0, finished.output
    assert "the dumps end after step 1, and so does the run; rl.steps = 3" in finished.output
    (row,) = rows(run)
    assert {name: row[name] for name in summary} == summary
    assert (
        "the run in"
        in forked.run("train", *model, "sft.steps=0", f"run_dir='{run}'", "rollout=dumps", *path, "resume=auto").output
    )
