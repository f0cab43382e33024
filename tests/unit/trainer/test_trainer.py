"""A step depends on its tokens alone: not on padding, on how they are split, or on the number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks

from moerl.batching.packing import PackOptions, pack_text_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.errors import CheckpointError

LENGTHS = (5, 30, 17, 41, 9, 24)
AUX = 0.05


def gradients_of_a_step(layout: Any, path: Path, batches: list[Microbatch], aux: float) -> dict[str, Any]:
    optimizer = tiny_moe.OPTIMIZER.model_copy(update={"clip_grad": 0.0})
    trainer = tiny_moe.build(layout, path, optimizer=optimizer, moe_aux_loss_coef=aux)
    loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))
    report = trainer.step(batches, loss, enforce=True)
    return {
        "loss": sum(float(row.losses_T.sum()) for row in report.rows),
        "load": report.expert_load_LE.numpy(),
        "rows_verified": report.rows_verified,
        "gradients": tiny_moe.gradients(trainer),
    }


def assert_same_step(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
    assert left["rows_verified"] == right["rows_verified"]
    np.testing.assert_array_equal(left["load"], right["load"])
    assert tiny_moe.largest_difference(left["gradients"], right["gradients"]) < 1e-6


def pack_together(samples: list[TrainSample], multiple: int = 1) -> list[Microbatch]:
    return tiny_moe.pack(samples, token_budget=1024, multiple=multiple)[0]


@pytest.mark.parametrize("aux", [0.0, AUX])
def test_pad_rows_change_neither_loss_nor_gradient_nor_expert_load(
    aux: float, untied: Path, one_process: Ranks
) -> None:
    samples = tiny_moe.make_samples(31, LENGTHS)
    plain, padded = pack_together(samples), pack_together(samples, multiple=512)
    assert not plain[0].is_pad.any()
    assert padded[0].is_pad.sum() > 300
    results = [one_process.run(gradients_of_a_step, untied, batches, aux)[0] for batches in (plain, padded)]
    assert_same_step(*results)


def test_the_load_balancing_loss_reaches_the_router(untied: Path, one_process: Ranks) -> None:
    batches = pack_together(tiny_moe.make_samples(31, LENGTHS))
    without, with_aux = (one_process.run(gradients_of_a_step, untied, batches, aux)[0] for aux in (0.0, AUX))
    assert with_aux["loss"] == without["loss"]
    assert tiny_moe.largest_difference(with_aux["gradients"], without["gradients"]) > 1e-4


@pytest.mark.parametrize("aux", [0.0, AUX])
def test_a_microbatch_of_pad_rows_alone_changes_nothing(aux: float, untied: Path, one_process: Ranks) -> None:
    samples = tiny_moe.make_samples(32, LENGTHS)
    batches = pack_together(samples)
    _, (only_pad,) = tiny_moe.pack(samples[:1], num_ranks=2)
    assert only_pad.is_pad.all()
    results = [one_process.run(gradients_of_a_step, untied, each, aux)[0] for each in (batches, [*batches, only_pad])]
    assert_same_step(*results)


def test_how_a_batch_is_split_does_not_change_the_gradient(untied: Path, one_process: Ranks) -> None:
    samples = tiny_moe.make_samples(33, LENGTHS)
    together, (split,) = pack_together(samples), tiny_moe.pack(samples, token_budget=44)
    assert len(together) == 1
    assert len(split) >= 3
    results = [one_process.run(gradients_of_a_step, untied, batches, 0.0)[0] for batches in (together, split)]
    assert_same_step(*results)


# --- determinism -----------------------------------------------------------------------------------------------------


def train_twice_with_two_threads(layout: Any, path: Path) -> float:
    rng = np.random.default_rng(34)
    samples = tiny_moe.make_samples(34, rng.integers(30, 90, size=18).tolist())
    texts = [
        TextSample(sample.trajectory.token_ids.copy(), np.arange(len(sample.trajectory)) > 4) for sample in samples
    ]
    text_batches = pack_text_for_ranks(texts, 1, PackOptions(1024, Padding(total=4)))[0]
    batches = tiny_moe.pack(samples, token_budget=1024)[0]
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    try:
        runs = [_train(layout, path, batches, text_batches) for _ in range(2)]
    finally:
        torch.set_num_threads(1)
    return tiny_moe.largest_difference(*runs)


def _train(layout: Any, path: Path, batches: list[Microbatch], text_batches: list[Microbatch]) -> dict[str, np.ndarray]:
    from moerl.trainer.losses import TextLoss

    trainer = tiny_moe.build(layout, path, moe_aux_loss_coef=AUX)
    text_loss = TextLoss(text_batches, trainer.spec.vocab_size, tiny_moe.num_trained(text_batches))
    trainer.step(text_batches, text_loss, enforce=False)
    loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))
    trainer.step(batches, loss, enforce=True)
    return tiny_moe.exported(trainer)


def test_the_same_steps_with_two_threads_give_the_same_weights_bit_for_bit(tied: Path, one_process: Ranks) -> None:
    assert one_process.run(train_twice_with_two_threads, tied) == [0.0]


# --- save and restore ------------------------------------------------------------------------------------------------

CHECKPOINT = "0-rl-000002"


def train(trainer: Any, seeds: range) -> list[Any]:
    reports = []
    for seed in seeds:
        batches = tiny_moe.pack(tiny_moe.make_samples(seed, LENGTHS))[0]
        loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))
        reports.append(trainer.step(batches, loss, enforce=True).update)
    return reports


def save_and_go_on(layout: Any, path: Path, folder: Path, dtype: str) -> tuple[Any, Any]:
    trainer = tiny_moe.build(layout, path, dtype=dtype)
    train(trainer, range(2))
    tiny_moe.save(trainer, folder, CHECKPOINT)
    return train(trainer, range(2, 5)), tiny_moe.exported(trainer)


def restore_and_go_on(layout: Any, path: Path, folder: Path, dtype: str) -> tuple[Any, Any]:
    trainer = tiny_moe.build(layout, path, dtype=dtype)
    train(trainer, range(7, 8))
    trainer.restore(folder / CHECKPOINT)
    return train(trainer, range(2, 5)), tiny_moe.exported(trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_goes_on_bit_for_bit(dtype: str, untied: Path, tmp_path: Path, one_process: Ranks) -> None:
    ((reports, weights),) = one_process.run(save_and_go_on, untied, tmp_path, dtype)
    ((restored_reports, restored_weights),) = one_process.run(restore_and_go_on, untied, tmp_path, dtype)
    assert restored_reports == reports
    assert tiny_moe.largest_difference(restored_weights, weights) == 0.0


def restore_what_does_not_fit(layout: Any, path: Path, others: list[Path], folder: Path) -> list[str]:
    refusals = []
    for other in others:
        written = tiny_moe.save(tiny_moe.build(layout, other), folder / other.name, CHECKPOINT)
        with pytest.raises(CheckpointError) as caught:
            tiny_moe.build(layout, path).restore(written)
        refusals.append(str(caught.value))
    return refusals


def test_a_checkpoint_of_another_model_is_refused(tied: Path, untied: Path, tmp_path: Path, one_process: Ranks) -> None:
    wider = tmp_path / "wider"
    tiny_moe.write_model(wider, tied=False, seed=1, moe_intermediate_size=96)
    ((tied_refusal, wide_refusal),) = one_process.run(restore_what_does_not_fit, untied, [tied, wider], tmp_path)
    assert "does not fit the model" in tied_refusal
    assert "output_layer" in tied_refusal
    assert "shape mismatch" in wide_refusal
