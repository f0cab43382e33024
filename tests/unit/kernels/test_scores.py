"""Scores from hidden states and head, against a dense masked log-softmax in float64.

The sparse products run in torch; `test_sparse_triton.py` runs this file again with Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ALWAYS,
    AT_LENGTH,
    BFLOAT16,
    INTERPRETED,
    NEVER,
    VOCAB,
    WHOLE,
    Case,
    assert_close,
    at_length,
    exact,
    gradients,
    make_case,
    masked,
    row_weights,
    set_advantage,
)
from torch import Tensor

from moerl.errors import ContractError
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, VocabShard
from moerl.kernels.kept import kl_kept
from moerl.kernels.plan import plan_full, plan_rows
from moerl.kernels.scores import listed_logprobs, score_kept


def assert_scores_are_exact(case: Case) -> None:
    scores = case.score()
    hidden, weight, logits = exact(case)
    dense = masked(case, logits)
    expected = dense.gather(1, case.targets[:, None])[:, 0]
    # Entropies and log-probs are differences of numbers as large as the logits, and those are rounded.
    scale = max(1.0, float(logits.detach().abs().max()))
    weights = row_weights(len(expected))
    assert_close(scores.logprobs_T, expected, floor=scale)
    entropy = -(dense.exp() * dense.masked_fill(~case.keep, 0.0)).sum(-1)
    assert_close(scores.entropy_T, entropy, floor=scale)
    # A gradient is a sum of `(1 - p) * factor`; of an entropy, of `p (log p + entropy) * factor`. In both log-probs are
    # rounded as above.
    factors = [float(x.detach().abs().max() / case.temperatures.min()) for x in (weight[:VOCAB], hidden)]
    both = scores.logprobs_T - scores.entropy_T, expected - entropy
    for ours, theirs in ((scores.logprobs_T, expected), (scores.entropy_T, entropy), both):
        actual = gradients(ours, weights, case.hidden, case.weight)
        wanted = gradients(theirs, weights, hidden, weight)
        for mine, others, factor in zip(actual, wanted, factors, strict=True):
            if mine.dtype == torch.bfloat16:
                # Of the head, listed and open rows are rounded one after the other.
                assert_close(mine, others, BFLOAT16 if ours is scores.logprobs_T else 2 * BFLOAT16)
            else:
                assert_close(mine, others, floor=scale * factor)
        assert torch.count_nonzero(actual[1][VOCAB:]) == 0


MIXES = {
    "all_listed": [5, 1, 12, 37, 2],
    "all_open": [0, 0, 0],
    "mixed": [4, 0, 1, 0, 30, 0, 37],
    "open_tail": [3, 8, 0, 0],
    "one_row": [6],
}


# Each way of adding with one mix that has it all, and each mix once.
PAIRS = {
    *(("mixed", each) for each in (NEVER, ALWAYS)),
    *(("one_row", NEVER), ("open_tail", 4), ("all_listed", ALWAYS), ("all_open", 4)),
}


RARE_AND_COMMON = [NEVER, pytest.param(ALWAYS, marks=AT_LENGTH)]


@pytest.mark.parametrize(
    ("sizes", "advantage"),
    [
        pytest.param(sizes, each, id=f"{name}-{each}", marks=() if (name, each) in PAIRS else AT_LENGTH)
        for name, sizes in MIXES.items()
        for each in (NEVER, 4, ALWAYS)
    ],
)
def test_scores_and_gradients_equal_a_dense_masked_log_softmax(
    sizes: list[int], advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_advantage(monkeypatch, advantage)
    assert_scores_are_exact(make_case(sizes))


@pytest.mark.parametrize("advantage", RARE_AND_COMMON)
def test_bfloat16_is_scored_in_float32_and_gradients_are_rounded_once(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_advantage(monkeypatch, advantage)
    assert_scores_are_exact(make_case([4, 0, 1, 9, 0, 37], dtype=torch.bfloat16))


ragged = st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, VOCAB)), min_size=1, max_size=9)


@at_length
@settings(max_examples=10 if INTERPRETED else 40, deadline=None)
@given(ragged, st.integers(0, 2**20), st.sampled_from([NEVER, 3, ALWAYS]))
def test_any_ragged_microbatch_is_exact(sizes: list[int], seed: int, advantage: float) -> None:
    with pytest.MonkeyPatch.context() as patches:
        set_advantage(patches, advantage)
        assert_scores_are_exact(make_case(sizes, seed))


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_a_singleton_scores_zero_with_exactly_zero_gradient(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    set_advantage(monkeypatch, advantage)
    case = make_case([1, 1, 1])
    scores = case.score()
    assert torch.equal(scores.logprobs_T, torch.zeros(3))
    for grad in gradients(scores.logprobs_T, row_weights(3), case.hidden, case.weight):
        assert torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("advantage", RARE_AND_COMMON)
def test_listing_the_whole_vocabulary_equals_the_full_score(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    set_advantage(monkeypatch, advantage)
    case = make_case([VOCAB] * 3)
    listed = case.score()
    full = case.score_full()
    assert_close(listed.logprobs_T, full.logprobs_T, 2e-6)
    assert_close(listed.entropy_T, full.entropy_T, 2e-6)
    leaves = case.hidden, case.weight
    ours = gradients(listed.logprobs_T, row_weights(3), *leaves)
    for mine, other in zip(ours, gradients(full.logprobs_T, row_weights(3), *leaves), strict=True):
        assert_close(mine, other, 2e-6)


@at_length
def test_gradients_pass_a_float64_gradcheck() -> None:
    case = make_case([3, 0, 1, 6], dtype=torch.float64)
    plan = plan_rows(case.rows(full=torch.tensor([True, False, False, False])), case.inputs())

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        inputs = Head(weight, WHOLE).enter(hidden)
        scores = score_kept(inputs, plan)
        assert scores.full is not None
        return scores.logprobs_T, scores.kept_logprobs_N, scores.full.logprobs_T

    assert torch.autograd.gradcheck(run, (case.hidden, case.weight), fast_mode=True)


def test_both_scores_in_one_call_equal_two_calls() -> None:
    case = make_case([5, 0, 1, 12, 0])
    sample = torch.tensor([True, True, False, True, False])
    both = case.score(full=sample)
    alone = case.score_full()
    assert both.full is not None
    asked = torch.tensor([True, True, False, True, True])
    assert_close(both.full.logprobs_T, alone.logprobs_T.where(asked, 0.0))
    assert_close(both.full.entropy_T, alone.entropy_T.where(asked, 0.0))
    total = both.logprobs_T + both.full.logprobs_T
    kept = case.score().logprobs_T
    leaves = case.hidden, case.weight
    expected = gradients(kept + alone.logprobs_T.where(asked, 0.0), row_weights(5), *leaves)
    for ours, theirs in zip(gradients(total, row_weights(5), *leaves), expected, strict=True):
        assert_close(ours, theirs, 2e-6)


def test_rows_not_selected_are_zero_and_get_no_gradient() -> None:
    case = make_case([5, 0, 3, 0, 12])
    case.temperatures[2] = 0.0
    case.targets[3] = -1
    select = torch.tensor([True, True, False, False, True])
    scores = case.score(select)
    assert torch.equal(scores.logprobs_T[~select], torch.zeros(2))
    assert torch.equal(scores.entropy_T[~select], torch.zeros(2))
    assert torch.equal(scores.kept_logprobs_N[case.kept.rows == 2], torch.zeros(3))
    grad_hidden, grad_weight = gradients(scores.logprobs_T, torch.ones(5), case.hidden, case.weight)
    assert torch.count_nonzero(grad_hidden[~select]) == 0
    assert torch.isfinite(grad_weight).all()
    case.temperatures[2], case.targets[3] = 1.0, 0
    expected = masked(case, exact(case)[2]).gather(1, case.targets[:, None])[:, 0]
    assert_close(scores.logprobs_T, expected * select, 2e-6)


def test_with_nothing_to_score_backward_still_runs() -> None:
    case = make_case([5, 0])
    none = torch.zeros(2, dtype=torch.bool)
    scores = case.score(none)
    for grad in gradients(scores.logprobs_T, torch.ones(2), case.hidden, case.weight):
        assert torch.count_nonzero(grad) == 0


def test_a_frozen_head_gets_no_gradient() -> None:
    case = make_case([5, 0, 2])
    case.weight.requires_grad_(False)
    case.score().logprobs_T.sum().backward()
    assert case.weight.grad is None
    assert case.hidden.grad is not None


@at_length  # the interpreter runs one program after the other
@pytest.mark.parametrize("advantage", [NEVER, 4, ALWAYS])
def test_the_same_inputs_give_the_same_bits(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    set_advantage(monkeypatch, advantage)
    case = make_case([30, 0, 30, 30, 7, 30, 1, 30], dtype=torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        scores = case.score()
        return scores.logprobs_T, *gradients(scores.logprobs_T, row_weights(8), case.hidden, case.weight)

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


def test_the_kept_kl_equals_a_dense_masked_kl_with_its_gradient() -> None:
    case, reference = make_case([5, 1, 12, 37, 2]), make_case([5, 1, 12, 37, 2], seed=0)
    reference.hidden = reference.hidden.detach().flip(0)
    scores = case.score()
    with torch.no_grad():
        other = listed_logprobs(reference.inputs(), plan_rows(case.rows(), case.inputs()))
    kl = kl_kept(scores.kept_logprobs_N, other, case.kept)
    hidden, weight, logits = exact(case)
    p, q = masked(case, logits), masked(case, exact(reference)[2]).detach()
    expected = (p.exp() * (p - q).masked_fill(~case.keep, 0.0)).sum(-1)
    assert_close(kl, expected, 2e-6)
    ours = gradients(kl, row_weights(5), case.hidden, case.weight)
    for mine, theirs in zip(ours, gradients(expected, row_weights(5), hidden, weight), strict=True):
        assert_close(mine, theirs, 2e-6)


def test_the_whole_kl_equals_a_dense_kl_with_its_gradient() -> None:
    case, reference = make_case([0] * 6), make_case([0] * 6, seed=1)
    select = torch.tensor([True, True, False, True, True, True])
    kl = kl_full(case.inputs(), reference.inputs(), plan_full(case.rows(), select.numpy(), case.inputs()))
    reference.temperatures = case.temperatures
    hidden, weight, logits = exact(case)
    p, q = torch.log_softmax(logits, -1), torch.log_softmax(exact(reference)[2], -1).detach()
    expected = (p.exp() * (p - q)).sum(-1) * select
    assert_close(kl, expected, 2e-6)
    ours = gradients(kl, row_weights(6), case.hidden, case.weight)
    for mine, theirs in zip(ours, gradients(expected, row_weights(6), hidden, weight), strict=True):
        assert_close(mine, theirs, 2e-6)
    assert torch.count_nonzero(ours[0][2]) == 0


def test_a_kl_to_a_model_of_another_shard_is_refused() -> None:
    case = make_case([0, 0])
    other = Head(case.weight[:VOCAB], VocabShard.from_group(VOCAB, VOCAB, None)).enter(case.hidden)
    with pytest.raises(ContractError, match="rows_differ"):
        kl_full(case.inputs(), other, plan_full(case.rows(), np.ones(2, bool), case.inputs()))


def test_huge_logits_do_not_overflow() -> None:
    case = make_case([5, 0, 1, 12])
    case.hidden = (1e4 * case.hidden.detach()).requires_grad_()
    scores = case.score()
    for values in (scores.logprobs_T, scores.entropy_T, *gradients(scores.logprobs_T, torch.ones(4), case.hidden)):
        assert torch.isfinite(values).all()


@at_length
@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_a_head_stored_by_columns_is_scored_alike(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    set_advantage(monkeypatch, advantage)
    case, same = make_case([4, 0, 1, 12]), make_case([4, 0, 1, 12])
    case.weight = case.weight.detach().t().contiguous().t().requires_grad_()
    assert_scores_are_exact(case)
    ours, theirs = (
        gradients(
            each.score().logprobs_T,
            row_weights(len(each.targets)), each.weight,
        )[0]
        for each in (case, same)
    )  # fmt: skip
    assert_close(ours, theirs)


def test_the_inputs_are_not_written_to() -> None:
    case, same = make_case(MIXES["mixed"]), make_case(MIXES["mixed"])
    case.score().logprobs_T.sum().backward()
    assert torch.equal(case.hidden, same.hidden)
    assert torch.equal(case.weight, same.weight)
