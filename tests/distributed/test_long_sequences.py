"""A trajectory of 32K tokens, cut in two by context parallelism, trains as in one process, all of it kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_moe
from ranks import Ranks

pytestmark = pytest.mark.distributed

NUM_TOKENS = 32_768
SECONDS = 1500.0


def step(layout: Any, path: Path) -> dict[str, Any]:
    # Of one layer's activations at a time: those of attention are as large as the square of the sequence.
    trainer = tiny_moe.build(layout, path, recompute="full")
    batches, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(7, [NUM_TOKENS]), token_budget=NUM_TOKENS)
    report = trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
    return {
        "logprobs": tiny_moe.row_table(trainer, batches, [row.logprobs_T for row in report.rows]),
        "verified": report.rows_verified,
        "grad_norm": report.update.grad_norm,
    }


def test_a_sequence_of_32k_tokens_trains_in_two_halves_as_in_one(
    one_process: Ranks, two_processes: Ranks, tmp_path: Path
) -> None:
    path = tiny_moe.write_model(tmp_path / "model", tied=False, seed=3, max_positions=NUM_TOKENS)
    halves = two_processes.run(step, path, timeout_seconds=SECONDS, context=2)
    (whole,) = one_process.run(step, path, timeout_seconds=SECONDS)
    logprobs = tiny_moe.gathered([each["logprobs"] for each in halves])[0]
    assert len(logprobs) == NUM_TOKENS - 1
    assert abs(logprobs - tiny_moe.gathered([whole["logprobs"]])[0]).max() < 1e-4
    assert halves[0]["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    # Each layer's rows in the forward pass and in its recomputation.
    assert sum(each["verified"] for each in halves) >= 2 * tiny_moe.SPEC.num_moe_layers * (NUM_TOKENS - 1)
