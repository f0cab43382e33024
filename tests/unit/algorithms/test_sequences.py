"""Sums over the sequences of a packed microbatch, on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_rows import SequenceObjective, policy_rows

from moerl.algorithms.policy import Sequences
from moerl.contract.batch import BatchTotals

LENGTHS = (3, 1, 4, 2)


def test_each_row_gets_the_sum_of_its_sequence() -> None:
    sequences = Sequences(torch.tensor([2, 0, 3]))
    values = torch.tensor([1.0, 2.0, 10.0, 20.0, 30.0])
    assert sequences.sum(values).tolist() == [3.0, 3.0, 60.0, 60.0, 60.0]
    assert sequences.sum(values.double()).dtype is torch.float64


def test_the_gradient_goes_to_all_rows_of_the_sequence() -> None:
    values = torch.arange(5.0, dtype=torch.float64, requires_grad=True)
    sequences = Sequences(torch.tensor([2, 3]))
    assert torch.autograd.gradcheck(lambda v: sequences.sum(v).exp() * torch.arange(1.0, 6.0), (values,))


def test_untrained_rows_do_not_count_whatever_they_hold() -> None:
    trainer = torch.tensor([1.0, float("nan"), 2.0, float("inf")], requires_grad=True)
    rows = policy_rows(trainer, lengths=(3, 1), mask_T=torch.tensor([True, False, True, False]))
    sums, lengths = rows.sequence_sum(rows.trainer_logprobs_T), rows.sequence_lengths()
    assert sums.tolist() == [3.0, 3.0, 3.0, 0.0]
    assert lengths.tolist() == [2.0, 2.0, 2.0, 1.0]
    sums[0].backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_loss_over_sequences_is_the_same_packed_and_one_by_one() -> None:
    generator = torch.Generator().manual_seed(3)
    trainer, proximal, advantages = torch.randn(3, sum(LENGTHS), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(LENGTHS), generator=generator) < 0.7
    trainer.requires_grad_()
    packed = policy_rows(trainer, lengths=LENGTHS, proximal_T=proximal, advantages_T=advantages, mask_T=mask)
    loss = SequenceObjective().compute_loss(packed).loss
    (gradient,) = torch.autograd.grad(loss, trainer)
    parts = []
    for rows in torch.arange(sum(LENGTHS)).split(LENGTHS):
        alone = policy_rows(trainer[rows], proximal_T=proximal[rows], advantages_T=advantages[rows], mask_T=mask[rows])
        object.__setattr__(alone, "totals", packed.totals)
        parts.append(SequenceObjective().compute_loss(alone).loss)
    (expected,) = torch.autograd.grad(torch.stack(parts).sum(), trainer)
    assert loss.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0.0)


def test_the_totals_of_a_batch_count_sequences_with_a_trained_token() -> None:
    rows = policy_rows(torch.zeros(6), lengths=(3, 3), mask_T=torch.tensor([True, True, False, False, False, False]))
    assert replace(rows.totals, facts={}) == BatchTotals(2.0, 1.0)
