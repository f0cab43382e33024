"""A loss over whole sequences through the trainer: packing and layouts change nothing. Against one process that has one
sequence in each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from policy_rows import SequenceObjective
from ranks import Ranks

from moerl.contract.batch import BatchTotals, Microbatch, TrainSample

LENGTHS = (5, 30, 17, 41, 9, 24)


def samples() -> list[TrainSample]:
    return tiny_moe.make_samples(15, LENGTHS)


def take_step(where: Any, path: Path, batches: Sequence[Microbatch] | None) -> dict[str, Any]:
    """One step; batches: for one process, as they are; None packs them for the layout."""
    trainer = tiny_moe.build(where, path, optimizer=tiny_moe.OPTIMIZER.model_copy(update={"clip_grad": 0.0}))
    totals = BatchTotals.of(tiny_moe.pack(samples())[0])
    batches = tiny_moe.shares(trainer, samples())[0] if batches is None else batches
    loss = tiny_moe.policy_loss(
        trainer,
        batches,
        totals.num_tokens,
        algorithm=SequenceObjective(),
        totals=totals,
        proximal_logprobs=[torch.from_numpy(batch.rollout_logprobs) for batch in batches],
    )
    report = trainer.step(batches, loss, enforce=True)
    return {
        "sums": tiny_moe.row_table(trainer, batches, [row.losses_T for row in report.rows]),
        "gradients": tiny_moe.gradients(trainer),
        "grad_norm": report.update.grad_norm,
        "num_microbatches": len(batches),
    }


def one_by_one() -> list[Microbatch]:
    """Microbatches of one sequence each, which still know the number of their sample."""
    alone = [tiny_moe.pack([sample], multiple=1)[0][0] for sample in samples()]
    for number, batch in enumerate(alone):
        batch.sample_index[:] = number
    return alone


@pytest.fixture(scope="module")
def expected(untied: Path, one_process: Ranks) -> dict[str, Any]:
    (result,) = one_process.run(take_step, untied, one_by_one())
    assert result["num_microbatches"] == len(LENGTHS)
    assert result["grad_norm"] > 1e-3
    return result


@pytest.mark.parametrize(
    ("number", "layout"),
    [
        pytest.param(1, {}, id="packed"),
        pytest.param(2, {"context": 2}, id="context"),
        pytest.param(2, {}, id="data", marks=pytest.mark.slow),
    ],
)
def test_sequence_sums_and_the_gradients_through_them_are_those_of_one_sequence_per_microbatch(
    number: int, layout: dict[str, int], expected: dict[str, Any], untied: Path, processes: Callable[[int], Ranks]
) -> None:
    found = processes(number).run(take_step, untied, None, **layout)
    assert found[0]["num_microbatches"] < len(LENGTHS)
    sums, by_itself = tiny_moe.gathered([each["sums"] for each in found]), tiny_moe.gathered([expected["sums"]])
    for index, sample in enumerate(samples()):
        assert len(sums[index]) == len(sample.trajectory) - 1
        assert len(np.unique(sums[index])) == 1, "every row of a sequence, on every rank, has the same sum"
        np.testing.assert_allclose(sums[index], by_itself[index], rtol=0, atol=2e-5)
    for each in found:
        assert each["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for name, gradient in expected["gradients"].items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(
                each["gradients"][name], gradient, rtol=0, atol=1e-4 * scale + 1e-9, err_msg=name
            )
