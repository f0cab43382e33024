"""Runs whose tokens are scored by another model while others are sampled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from moerl_runs import Fault, Runs, rows

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet

PER_STEP = 16
DISTIL = """from moerl.algorithms.toolbox import PolicyLoss, token_mean


def distil(rows):
    losses_T = -(rows.scores_T["teacher"] - rows.rollout_logprobs_T) * rows.trainer_logprobs_T
    return PolicyLoss(token_mean(losses_T, rows.loss_mask_T, rows.totals.num_tokens), losses_T)
"""
IN_PROCESS = ("rollout.placement=process", "buffer.max_staleness=1")


@pytest.fixture(scope="module")
def start(forked: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to start from, and to be the teacher; with a loss of its user's."""
    folder = tmp_path_factory.mktemp("teacher")
    finished = forked.run("sft", "recipe=tiny", f"run_dir='{folder / 'run'}'")
    assert finished.status == 0, finished.output
    (folder / "distillation.py").write_text(DISTIL)
    return folder


def words(start: Path, run: Path) -> list[str]:
    model = start / "run" / "cold_start"
    return [
        *("train", "recipe=tiny", f"run_dir='{run}'", f"model.path='{model}'", "model.architecture=null"),
        *("sft.steps=0", "rl.steps=3", "algorithm=custom", "algorithm.loss=distillation:distil"),
        *("algorithm.scores=[teacher]", f"scorers={{teacher: {{kind: model, path: '{model}'}}}}"),
    ]


def test_a_teacher_that_is_the_policy_itself_gives_the_log_probs_of_the_engine(
    forked: Runs, start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished = forked.run(*words(start, run), cwd=start)
    assert finished.status == 0, finished.output
    steps = [row for row in rows(run) if row["stage"] == "rl"]
    first, *later = (read_parquet(run / "rollouts" / f"step-{step:06d}.parquet") for step in range(1, len(steps) + 1))
    assert any(trajectory.truncated.any() for trajectory in first), "kept sets are part of what is compared"
    for trajectory in first:
        np.testing.assert_allclose(trajectory.scores["teacher"], trajectory.rollout_logprobs, atol=1e-5)
    assert abs(steps[0]["score/teacher/policy_gap"]) < 1e-5
    gaps = [t.rollout_logprobs - t.scores["teacher"] for trajectories in later for t in trajectories]
    assert np.abs(np.concatenate(gaps)).max() > 1e-4, "the policy has moved away from its teacher"
    evaluations = [row for row in rows(run) if row["stage"] == "evaluation"]
    assert evaluations
    assert not any(name.startswith("score/") for row in evaluations for name in row)
    assert not list((run / "logs").glob("scorer-*")), "a process that said nothing leaves no log"


@pytest.mark.slow
def test_rollouts_that_are_sampled_alone_are_scored_for_a_run_from_dumps(
    forked: Runs, start: Path, tmp_path: Path
) -> None:
    sampled, run = tmp_path / "sampled", tmp_path / "run"
    scored = [word for word in words(start, sampled)[1:] if not word.startswith(("rl.steps", "algorithm", "sft"))]
    finished = forked.run("rollout", *scored)
    assert finished.status == 0, finished.output
    dump = sampled / "rollouts" / "rollouts.parquet"
    for trajectory in read_parquet(dump):
        np.testing.assert_allclose(trajectory.scores["teacher"], trajectory.rollout_logprobs, atol=1e-5)
    learn = [word for word in words(start, run) if not word.startswith(("scorers", "rl.steps"))]
    finished = forked.run(*learn, "rollout=dumps", f"rollout.path='{dump}'", "rl.steps=1", cwd=start)
    assert finished.status == 0, finished.output
    [step] = [row for row in rows(run) if row["stage"] == "rl"]
    assert abs(step["score/teacher/policy_gap"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("where", [(), IN_PROCESS], ids=["embedded", "process"])
def test_a_run_whose_teacher_dies_says_so_and_goes_on_with_another_process(
    where: tuple[str, ...], forked: Runs, start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill: Fault = ("kill_scorer", {"call": PER_STEP + 6})
    finished = forked.run(*words(start, run), *where, fault=kill, cwd=start)
    assert finished.status == 1, finished.output
    assert "scorers.teacher: the model of " in finished.output
    assert "killed by SIGKILL" in finished.output
    again = forked.run("train", f"resume={run}", cwd=start)
    assert again.status == 0, again.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.trained, ledger.pending) == (3 * PER_STEP, 0)
    trained = [t for step in (1, 2, 3) for t in read_parquet(run / "rollouts" / f"step-{step:06d}.parquet")]
    assert len({t.lineage.rollout_id for t in trained}) == 3 * PER_STEP
    assert all("teacher" in t.scores for t in trained)
