"""Scores of sampled tokens under the support they were drawn from, against a dense float64 computation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError
from moerl.kernels import full, support
from moerl.kernels.full import score_full
from moerl.kernels.kept import KeptRows
from moerl.kernels.support import score_support
from moerl.kernels.vocab_parallel import VocabShard

VOCAB, PADDED = 37, 40
WHOLE = VocabShard.from_group(VOCAB, PADDED, None)


@dataclass
class Case:
    logits: Tensor
    targets: Tensor
    temperatures: Tensor
    keep: Tensor
    kept: KeptRows


def make_case(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """Random rows; row t lists `sizes[t]` ids, its target among them; 0 leaves the vocabulary open."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(sizes)
    logits = (3 * torch.randn(num_rows, PADDED, generator=generator)).to(dtype)
    logits[:, VOCAB:] = 50.0
    keep = torch.zeros(num_rows, PADDED, dtype=torch.bool)
    listed, targets = [], torch.zeros(num_rows, dtype=torch.int64)
    for row, size in enumerate(sizes):
        ids = torch.randperm(VOCAB, generator=generator)[: size or VOCAB].sort().values
        targets[row] = ids[int(torch.randint(len(ids), (1,), generator=generator))]
        keep[row, ids] = True
        listed.append(ids.numpy().astype(np.int32) if size else np.zeros(0, np.int32))
    temperatures = 0.5 + torch.rand(num_rows, generator=generator)
    return Case(logits, targets, temperatures, keep, kept_rows(listed))


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def kept_rows(listed: list[np.ndarray]) -> KeptRows:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in listed])]).astype(np.int64)
    sets = KeptSets(offsets, np.concatenate([np.zeros(0, np.int32), *listed]).astype(np.int32))
    return KeptRows.from_csr(sets, sets.sizes > 0, "cpu")


def dense_logprobs(case: Case, logits: Tensor) -> Tensor:
    """[T, V'] log-softmax of masked, tempered logits in float64."""
    z = logits.double() / case.temperatures.double()[:, None]
    return torch.log_softmax(z.masked_fill(~case.keep, float("-inf")), -1)


def dense_scores(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of a weighted sum of log-probs, in float64."""
    logits = case.logits.double().requires_grad_()
    logprobs = dense_logprobs(case, logits)
    scores = logprobs.gather(1, case.targets[:, None])[:, 0]
    (grad,) = torch.autograd.grad((scores * row_weights(len(scores))).sum(), logits)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~case.keep, 0.0)).sum(-1)
    return scores.detach(), entropy.detach(), grad


def row_weights(num_rows: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, num_rows, dtype=torch.float64)


MIXES = {
    "all_listed": [5, 1, 12, 37, 2],
    "all_open": [0, 0, 0],
    "mixed": [4, 0, 1, 0, 30, 0, 37],
    "open_tail": [3, 8, 0, 0],
}


@pytest.mark.parametrize("sizes", MIXES.values(), ids=MIXES.keys())
def test_scores_and_gradients_equal_a_dense_masked_log_softmax(sizes: list[int]) -> None:
    case = make_case(sizes)
    logits = case.logits.clone().requires_grad_()
    scores = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE)
    (scores.logprobs_T * row_weights(len(sizes)).float()).sum().backward()
    logprobs, entropy, grad = dense_scores(case)
    assert scores.logprobs_T.dtype == torch.float32
    assert not scores.entropy_T.requires_grad
    torch.testing.assert_close(scores.logprobs_T.double(), logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(scores.entropy_T.double(), entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient(logits).double(), grad, rtol=1e-6, atol=2e-6)


def test_the_logprobs_of_all_listed_ids_carry_gradients_and_sum_to_one() -> None:
    case = make_case([5, 0, 1, 12])
    logits = case.logits.double().requires_grad_()
    kept_logprobs = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE).kept_logprobs
    mass = torch.zeros(4, dtype=torch.float64).index_add(0, case.kept.rows, kept_logprobs.detach().exp())
    torch.testing.assert_close(mass, torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    dense_logits = case.logits.double().requires_grad_()
    dense = dense_logprobs(case, dense_logits)[case.kept.rows, case.kept.ids]
    weights = row_weights(len(dense)).cos()
    (grad,) = torch.autograd.grad((kept_logprobs * weights).sum(), logits)
    (dense_grad,) = torch.autograd.grad((dense * weights).sum(), dense_logits)
    torch.testing.assert_close(grad, dense_grad, rtol=1e-12, atol=1e-12)


def test_gradients_pass_a_float64_gradcheck() -> None:
    case = make_case([3, 0, 1, 6], dtype=torch.float64)

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE)
        return scores.logprobs_T, scores.kept_logprobs

    assert torch.autograd.gradcheck(run, (case.logits.requires_grad_(),))


def test_a_singleton_set_scores_zero_with_exactly_zero_gradient() -> None:
    case = make_case([1, 1, 1])
    logits = case.logits.clone().requires_grad_()
    scores = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE)
    scores.logprobs_T.sum().backward()
    assert torch.equal(scores.logprobs_T, torch.zeros(3))
    assert torch.equal(scores.entropy_T, torch.zeros(3))
    assert torch.count_nonzero(gradient(logits)) == 0


def test_listing_the_whole_vocabulary_equals_the_full_score() -> None:
    case = make_case([VOCAB] * 6)
    logits, other = case.logits.clone().requires_grad_(), case.logits.clone().requires_grad_()
    listed = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE)
    whole = score_full(other, case.targets, case.temperatures, WHOLE)
    listed.logprobs_T.sum().backward()
    whole.logprobs_T.sum().backward()
    torch.testing.assert_close(listed.logprobs_T, whole.logprobs_T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(listed.entropy_T, whole.entropy_T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(logits), gradient(other), rtol=1e-6, atol=1e-6)


def test_bfloat16_logits_are_scored_in_float32_and_get_bfloat16_gradients() -> None:
    case = make_case([5, 0, 1, 12], dtype=torch.bfloat16)
    logits = case.logits.clone().requires_grad_()
    scores = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE)
    (scores.logprobs_T * row_weights(4).float()).sum().backward()
    logprobs, _, grad = dense_scores(case)
    torch.testing.assert_close(scores.logprobs_T.double(), logprobs, rtol=1e-6, atol=2e-6)
    assert gradient(logits).dtype == torch.bfloat16
    torch.testing.assert_close(gradient(logits).double(), grad, rtol=2**-8, atol=1e-6)


def test_rows_not_selected_are_zero_and_get_no_gradient() -> None:
    case = make_case([5, 0, 3, 0, 12])
    case.temperatures[2] = 0.0
    case.targets[3] = -1
    select = torch.tensor([True, True, False, False, True])
    logits = case.logits.clone().requires_grad_()
    scores = score_support(logits, case.targets, case.kept, case.temperatures, WHOLE, select)
    scores.logprobs_T.sum().backward()
    case.temperatures[2], case.targets[3] = 1.0, 0
    logprobs, _, _ = dense_scores(case)
    torch.testing.assert_close(scores.logprobs_T.double(), logprobs * select, rtol=1e-6, atol=2e-6)
    assert torch.equal(scores.logprobs_T[~select], torch.zeros(2))
    assert torch.equal(scores.entropy_T[~select], torch.zeros(2))
    assert torch.equal(scores.kept_logprobs[case.kept.rows == 2], torch.zeros(3))
    assert torch.count_nonzero(gradient(logits)[~select]) == 0
    assert torch.isfinite(gradient(logits)).all()


def test_with_nothing_to_score_backward_still_runs() -> None:
    case = make_case([5, 0])
    logits = case.logits.clone().requires_grad_()
    none = torch.zeros(2, dtype=torch.bool)
    score_support(logits, case.targets, case.kept, case.temperatures, WHOLE, none).logprobs_T.sum().backward()
    assert torch.equal(gradient(logits), torch.zeros_like(logits))


def test_the_full_softmax_is_taken_only_over_selected_rows_without_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case([5, 0, 3, 0, 12, 0])
    seen = []

    def spy(*args, **kwargs):
        seen.append(kwargs["rows_R"].tolist())
        return full.score_full(*args, **kwargs)

    monkeypatch.setattr(support, "score_full", spy)
    select = torch.tensor([True, True, True, False, True, True])
    score_support(case.logits, case.targets, case.kept, case.temperatures, WHOLE, select)
    assert seen == [[1, 5]]


def test_the_logits_are_not_written_to() -> None:
    case = make_case(MIXES["mixed"])
    before = case.logits.clone()
    logits = case.logits.requires_grad_()
    score_support(logits, case.targets, case.kept, case.temperatures, WHOLE).logprobs_T.sum().backward()
    assert torch.equal(case.logits, before)


def test_a_listed_set_without_its_target_is_refused() -> None:
    case = make_case([3, 4])
    row_ids = case.kept.ids[case.kept.rows == 1]
    case.targets[1] = next(token for token in range(VOCAB) if token not in row_ids)
    with pytest.raises(ContractError, match="target_not_in_kept_set"):
        score_support(case.logits, case.targets, case.kept, case.temperatures, WHOLE)


def test_a_listed_padding_column_is_refused() -> None:
    case = make_case([3])
    kept = kept_rows([np.array([int(case.targets[0]), VOCAB], np.int32)])
    with pytest.raises(ContractError, match="kept_id_outside_vocabulary"):
        score_support(case.logits, case.targets, kept, case.temperatures, WHOLE)


@pytest.mark.parametrize("row", [0, 1])
def test_a_scored_row_with_temperature_zero_is_refused(row: int) -> None:
    case = make_case([3, 0])
    case.temperatures[row] = 0.0
    with pytest.raises(ContractError, match="temperature_not_positive"):
        score_support(case.logits, case.targets, case.kept, case.temperatures, WHOLE)


def test_per_row_tensors_of_another_microbatch_are_refused() -> None:
    case = make_case([3, 0])
    with pytest.raises(ContractError, match="rows_differ"):
        score_support(case.logits, case.targets, make_case([3]).kept, case.temperatures, WHOLE)
