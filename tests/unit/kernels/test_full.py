"""Scores and KLs over the whole vocabulary, against dense float64 computations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moerl.errors import ContractError
from moerl.kernels.full import kl_full, score_full
from moerl.kernels.vocab_parallel import VocabShard

VOCAB, PADDED, ROWS = 29, 32, 7
WHOLE = VocabShard.from_group(VOCAB, PADDED, None)


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def make_logits(seed: int, scale: float = 4.0) -> Tensor:
    logits = scale * torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(seed))
    logits[:, VOCAB:] = 60.0
    return logits


TARGETS = torch.tensor([0, 28, 5, 5, 17, 3, 11])
TEMPERATURES = torch.tensor([1.0, 0.5, 0.7, 1.3, 2.0, 1.0, 0.9])
WEIGHTS = torch.linspace(-1.0, 2.0, ROWS)


def dense(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double()[:, :VOCAB] / TEMPERATURES.double()[:, None], -1)


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
def test_the_score_equals_a_dense_log_softmax_for_any_chunk_size(chunk_rows: int) -> None:
    logits = make_logits(0).requires_grad_()
    scores = score_full(logits, TARGETS, TEMPERATURES, WHOLE, chunk_rows)
    (scores.logprobs_T * WEIGHTS).sum().backward()
    exact = make_logits(0).double().requires_grad_()
    logprobs = dense(exact)
    picked = logprobs.gather(1, TARGETS[:, None])[:, 0]
    (grad,) = torch.autograd.grad((picked * WEIGHTS).sum(), exact)
    torch.testing.assert_close(scores.logprobs_T.double(), picked.detach(), rtol=1e-6, atol=2e-6)
    entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
    torch.testing.assert_close(scores.entropy_T.double(), entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient(logits).double(), grad, rtol=1e-6, atol=2e-6)
    assert torch.count_nonzero(gradient(logits)[:, VOCAB:]) == 0


def test_a_subset_of_rows_is_scored_alone() -> None:
    rows = torch.tensor([1, 4, 6])
    logits = make_logits(0).requires_grad_()
    scores = score_full(logits, TARGETS, TEMPERATURES, WHOLE, 2, rows)
    scores.logprobs_T.sum().backward()
    whole = score_full(make_logits(0), TARGETS, TEMPERATURES, WHOLE)
    torch.testing.assert_close(scores.logprobs_T.detach(), whole.logprobs_T[rows])
    assert gradient(logits).any(-1).nonzero().flatten().tolist() == rows.tolist()


def test_score_and_kl_pass_a_float64_gradcheck() -> None:
    logits, reference = make_logits(0).double().requires_grad_(), make_logits(1).double()
    assert torch.autograd.gradcheck(lambda x: score_full(x, TARGETS, TEMPERATURES, WHOLE, 3).logprobs_T, (logits,))
    assert torch.autograd.gradcheck(lambda x: kl_full(x, reference, TEMPERATURES, WHOLE, None, 3), (logits,))


def test_bfloat16_gradients_keep_the_small_remainder_of_a_likely_target() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 4] = 12.0
    logits.requires_grad_()
    shard = VocabShard.from_group(VOCAB, VOCAB, None)
    score_full(logits, torch.tensor([4]), torch.ones(1), shard).logprobs_T.sum().backward()
    remainder = 1 - torch.softmax(logits.detach().double(), -1)[0, 4]
    torch.testing.assert_close(gradient(logits)[0, 4].double(), remainder, rtol=2**-8, atol=0.0)


def test_huge_logits_do_not_overflow() -> None:
    logits = (1e4 * make_logits(0)).requires_grad_()
    scores = score_full(logits, TARGETS, TEMPERATURES, WHOLE)
    scores.logprobs_T.sum().backward()
    assert torch.isfinite(scores.logprobs_T).all()
    assert torch.isfinite(scores.entropy_T).all()
    assert torch.isfinite(gradient(logits)).all()


def test_the_kl_equals_a_dense_sum_with_its_gradient() -> None:
    logits, reference = make_logits(0).requires_grad_(), make_logits(1)
    kl = kl_full(logits, reference, TEMPERATURES, WHOLE, None, 3)
    (kl * WEIGHTS).sum().backward()
    exact = make_logits(0).double().requires_grad_()
    p, q = dense(exact), dense(reference)
    expected = (p.exp() * (p - q)).sum(-1)
    (grad,) = torch.autograd.grad((expected * WEIGHTS).sum(), exact)
    torch.testing.assert_close(kl.detach().double(), expected.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient(logits).double(), grad, rtol=1e-5, atol=1e-5)


def test_the_kl_to_itself_is_zero_and_rows_not_selected_are_skipped() -> None:
    logits = make_logits(0)
    zero = kl_full(logits, logits.clone(), TEMPERATURES, WHOLE)
    torch.testing.assert_close(zero, torch.zeros(ROWS), rtol=0.0, atol=1e-6)
    select = torch.arange(ROWS) % 2 == 0
    chosen = logits.clone().requires_grad_()
    kl = kl_full(chosen, make_logits(1), TEMPERATURES, WHOLE, select)
    kl.sum().backward()
    torch.testing.assert_close(
        kl.detach(), kl_full(logits, make_logits(1), TEMPERATURES, WHOLE).masked_fill(~select, 0.0)
    )
    assert torch.count_nonzero(gradient(chosen)[~select]) == 0


def test_the_inputs_are_not_written_to() -> None:
    logits, reference = make_logits(0).requires_grad_(), make_logits(1)
    score_full(logits, TARGETS, TEMPERATURES, WHOLE).logprobs_T.sum().backward()
    kl_full(logits, reference, TEMPERATURES, WHOLE).sum().backward()
    assert torch.equal(logits.detach(), make_logits(0))
    assert torch.equal(reference, make_logits(1))


@pytest.mark.parametrize("target", [-1, VOCAB, PADDED + 3])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    targets = TARGETS.clone()
    targets[2] = target
    with pytest.raises(ContractError, match="target_outside_vocabulary"):
        score_full(make_logits(0), targets, TEMPERATURES, WHOLE)


def test_a_temperature_of_zero_is_refused() -> None:
    temperatures = TEMPERATURES.clone()
    temperatures[2] = 0.0
    with pytest.raises(ContractError, match="temperature_not_positive"):
        kl_full(make_logits(0), make_logits(1), temperatures, WHOLE)
