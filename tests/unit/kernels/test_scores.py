"""Scores from hidden states and head, against a dense masked log-softmax in float64.

The sparse products run in torch; `test_sparse_triton.py` runs this file again with Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError
from moerl.kernels import pairs, products, whole
from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.kept import KeptRows, kl_kept
from moerl.kernels.scores import score_full, score_kept
from moerl.kernels.vocab_parallel import VocabShard
from moerl.kernels.whole_kl import kl_whole

VOCAB, PADDED, WIDTH = 37, 40, 24
WHOLE = VocabShard.from_group(VOCAB, PADDED, None)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEVER, ALWAYS = 0.001, 1000
"""Values of DENSE_ADVANTAGE that make all ids rare, or all common."""
BFLOAT16 = 2**-7 if INTERPRETED else 2**-8
"""Relative error of one rounding to bfloat16: Triton's interpreter truncates, a GPU rounds to nearest."""


@pytest.fixture(autouse=True)
def implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slabs, so that every loop runs more than once; Triton where it is interpreted."""
    monkeypatch.setattr(products, "SLAB_ELEMENTS", 5 * WIDTH)
    if INTERPRETED:
        from moerl.kernels import sparse_triton

        monkeypatch.setattr(sparse_triton, "BLOCK_WIDTH", 16)
        monkeypatch.setattr(pairs, "sparse_products", lambda inputs: sparse_triton)


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperatures: Tensor
    keep: Tensor
    kept: KeptRows

    def inputs(self) -> HeadInputs:
        return Head(self.weight, WHOLE).enter(self.hidden)


def make_case(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """Random rows; row t lists `sizes[t]` ids, its target among them; 0 leaves the vocabulary open."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(sizes)
    hidden = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
    weight = (0.6 * torch.randn(PADDED, WIDTH, generator=generator)).to(dtype)
    weight[VOCAB:] *= 100
    keep = torch.zeros(num_rows, VOCAB, dtype=torch.bool)
    listed, targets = [], torch.zeros(num_rows, dtype=torch.int64)
    for row, size in enumerate(sizes):
        ids = torch.randperm(VOCAB, generator=generator)[: size or VOCAB].sort().values
        targets[row] = ids[int(torch.randint(len(ids), (1,), generator=generator))]
        keep[row, ids] = True
        listed.append(ids.numpy().astype(np.int32) if size else np.zeros(0, np.int32))
    temperatures = 0.5 + torch.rand(num_rows, generator=generator)
    return Case(hidden.requires_grad_(), weight.requires_grad_(), targets, temperatures, keep, kept_rows(listed))


def kept_rows(listed: list[np.ndarray]) -> KeptRows:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in listed])]).astype(np.int64)
    sets = KeptSets(offsets, np.concatenate([np.zeros(0, np.int32), *listed]).astype(np.int32))
    return KeptRows.from_csr(sets, sets.sizes > 0, "cpu")


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """float64 leaves of hidden states and head, and the dense log-softmax without a mask, [T, V]."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    logits = (hidden @ weight.t())[:, :VOCAB] / case.temperatures.double()[:, None]
    return hidden, weight, logits


def masked(case: Case, logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.masked_fill(~case.keep, float("-inf")), -1)


def row_weights(num_rows: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, num_rows)


def gradients(values: Tensor, weights: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((values * weights.to(values.dtype)).sum(), leaves, retain_graph=True)


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-6, floor: float = 1e-3) -> None:
    """Largest error relative to the largest value, or to `floor` where that is larger."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.numel():
        assert float((actual - expected).abs().max()) <= relative * max(floor, float(expected.abs().max()))


def assert_scores_are_exact(case: Case) -> None:
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
    hidden, weight, logits = exact(case)
    dense = masked(case, logits)
    expected = dense.gather(1, case.targets[:, None])[:, 0]
    # Entropies and log-probs are differences of numbers as large as the logits, and those are rounded.
    scale = max(1.0, float(logits.detach().abs().max()))
    weights = row_weights(len(expected))
    assert_close(scores.logprobs_T, expected, floor=scale)
    entropy = -(dense.exp() * dense.masked_fill(~case.keep, 0.0)).sum(-1)
    assert_close(scores.entropy_T, entropy, floor=scale)
    actual = gradients(scores.logprobs_T, weights, case.hidden, case.weight)
    # A gradient is a sum of `(1 - p) * factor`, in which p is rounded relative to 1 however close to 1 it is.
    floors = [float(x.detach().abs().max() / case.temperatures.min()) for x in (weight[:VOCAB], hidden)]
    for ours, theirs, floor in zip(actual, gradients(expected, weights, hidden, weight), floors, strict=True):
        if ours.dtype == torch.bfloat16:
            assert_close(ours, theirs, BFLOAT16)
        else:
            assert_close(ours, theirs, floor=floor)
    assert torch.count_nonzero(actual[1][VOCAB:]) == 0


MIXES = {
    "all_listed": [5, 1, 12, 37, 2],
    "all_open": [0, 0, 0],
    "mixed": [4, 0, 1, 0, 30, 0, 37],
    "open_tail": [3, 8, 0, 0],
    "one_row": [6],
}


@pytest.mark.parametrize("advantage", [NEVER, 4, ALWAYS])
@pytest.mark.parametrize("sizes", MIXES.values(), ids=MIXES.keys())
def test_scores_and_gradients_equal_a_dense_masked_log_softmax(
    sizes: list[int], advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    assert_scores_are_exact(make_case(sizes))


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_bfloat16_is_scored_in_float32_and_gradients_are_rounded_once(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    assert_scores_are_exact(make_case([4, 0, 1, 9, 30, 0, 37], dtype=torch.bfloat16))


ragged = st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, VOCAB)), min_size=1, max_size=9)


@settings(max_examples=10 if INTERPRETED else 40, deadline=None)
@given(ragged, st.integers(0, 2**20), st.sampled_from([NEVER, 3, ALWAYS]))
def test_any_ragged_microbatch_is_exact(sizes: list[int], seed: int, advantage: float) -> None:
    before, pairs.DENSE_ADVANTAGE = pairs.DENSE_ADVANTAGE, advantage
    try:
        assert_scores_are_exact(make_case(sizes, seed))
    finally:
        pairs.DENSE_ADVANTAGE = before


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_a_singleton_scores_zero_with_exactly_zero_gradient(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    case = make_case([1, 1, 1])
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
    assert torch.equal(scores.logprobs_T, torch.zeros(3))
    for grad in gradients(scores.logprobs_T, row_weights(3), case.hidden, case.weight):
        assert torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_listing_the_whole_vocabulary_equals_the_full_score(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    case = make_case([VOCAB] * 6)
    listed = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
    full = score_full(case.inputs(), case.targets, case.temperatures)
    assert_close(listed.logprobs_T, full.logprobs_T, 2e-6)
    assert_close(listed.entropy_T, full.entropy_T, 2e-6)
    leaves = case.hidden, case.weight
    ours = gradients(listed.logprobs_T, row_weights(6), *leaves)
    for mine, other in zip(ours, gradients(full.logprobs_T, row_weights(6), *leaves), strict=True):
        assert_close(mine, other, 2e-6)


def test_gradients_pass_a_float64_gradcheck() -> None:
    case = make_case([3, 0, 1, 6], dtype=torch.float64)
    full = torch.tensor([True, False, False, False])

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        inputs = Head(weight, WHOLE).enter(hidden)
        scores = score_kept(inputs, case.targets, case.kept, case.temperatures, full_T=full)
        assert scores.full is not None
        return scores.logprobs_T, scores.kept_logprobs_N, scores.full.logprobs_T

    assert torch.autograd.gradcheck(run, (case.hidden, case.weight), fast_mode=True)


def test_both_scores_in_one_call_equal_two_calls() -> None:
    case = make_case([5, 0, 1, 12, 0])
    sample = torch.tensor([True, True, False, True, False])
    both = score_kept(case.inputs(), case.targets, case.kept, case.temperatures, full_T=sample)
    alone = score_full(case.inputs(), case.targets, case.temperatures)
    assert both.full is not None
    asked = torch.tensor([True, True, False, True, True])
    assert_close(both.full.logprobs_T, alone.logprobs_T.where(asked, 0.0))
    assert_close(both.full.entropy_T, alone.entropy_T.where(asked, 0.0))
    total = both.logprobs_T + both.full.logprobs_T
    kept = score_kept(case.inputs(), case.targets, case.kept, case.temperatures).logprobs_T
    leaves = case.hidden, case.weight
    expected = gradients(kept + alone.logprobs_T.where(asked, 0.0), row_weights(5), *leaves)
    for ours, theirs in zip(gradients(total, row_weights(5), *leaves), expected, strict=True):
        assert_close(ours, theirs, 2e-6)


def test_rows_not_selected_are_zero_and_get_no_gradient() -> None:
    case = make_case([5, 0, 3, 0, 12])
    case.temperatures[2] = 0.0
    case.targets[3] = -1
    select = torch.tensor([True, True, False, False, True])
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures, select)
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
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures, none)
    for grad in gradients(scores.logprobs_T, torch.ones(2), case.hidden, case.weight):
        assert torch.count_nonzero(grad) == 0


def test_a_frozen_head_gets_no_gradient() -> None:
    case = make_case([5, 0, 2])
    case.weight.requires_grad_(False)
    score_kept(case.inputs(), case.targets, case.kept, case.temperatures).logprobs_T.sum().backward()
    assert case.weight.grad is None
    assert case.hidden.grad is not None


@pytest.mark.parametrize("advantage", [NEVER, 4, ALWAYS])
def test_the_same_inputs_give_the_same_bits(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    case = make_case([30, 0, 30, 30, 7, 30, 1, 30], dtype=torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
        return scores.logprobs_T, *gradients(scores.logprobs_T, row_weights(8), case.hidden, case.weight)

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


def test_the_kept_kl_equals_a_dense_masked_kl_with_its_gradient() -> None:
    case, reference = make_case([5, 1, 12, 37, 2]), make_case([5, 1, 12, 37, 2], seed=0)
    reference.hidden = reference.hidden.detach().flip(0)
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
    with torch.no_grad():
        other = score_kept(reference.inputs(), case.targets, case.kept, case.temperatures)
    kl = kl_kept(scores.kept_logprobs_N, other.kept_logprobs_N, case.kept)
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
    kl = kl_whole(case.inputs(), reference.inputs(), case.temperatures, select)
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
        kl_whole(case.inputs(), other, case.temperatures)


def test_huge_logits_do_not_overflow() -> None:
    case = make_case([5, 0, 1, 12])
    case.hidden = (1e4 * case.hidden.detach()).requires_grad_()
    scores = score_kept(case.inputs(), case.targets, case.kept, case.temperatures)
    for values in (scores.logprobs_T, scores.entropy_T, *gradients(scores.logprobs_T, torch.ones(4), case.hidden)):
        assert torch.isfinite(values).all()


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_a_head_stored_by_columns_is_scored_alike(advantage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    case, same = make_case(MIXES["mixed"]), make_case(MIXES["mixed"])
    case.weight = case.weight.detach().t().contiguous().t().requires_grad_()
    assert_scores_are_exact(case)
    ours, theirs = (
        gradients(
            score_kept(each.inputs(), each.targets, each.kept, each.temperatures).logprobs_T,
            row_weights(len(each.targets)), each.weight,
        )[0]
        for each in (case, same)
    )  # fmt: skip
    assert_close(ours, theirs)


def test_the_inputs_are_not_written_to() -> None:
    case, same = make_case(MIXES["mixed"]), make_case(MIXES["mixed"])
    score_kept(case.inputs(), case.targets, case.kept, case.temperatures).logprobs_T.sum().backward()
    assert torch.equal(case.hidden, same.hidden)
    assert torch.equal(case.weight, same.weight)


def test_slabs_are_no_larger_than_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(a: Tensor, b: Tensor) -> Tensor:
        out = products.matmul(a, b)
        seen.append(out.numel())
        return out

    for module in (pairs, whole):
        monkeypatch.setattr(module, "matmul", spy)
    case = make_case([0, 30, 0, 37, 37, 37])
    score_kept(case.inputs(), case.targets, case.kept, case.temperatures).logprobs_T.sum().backward()
    assert len(seen) > 4
    assert max(seen) <= 6 * WIDTH


def test_a_listed_set_without_its_target_is_refused() -> None:
    case = make_case([3, 4])
    row_ids = case.kept.ids[case.kept.rows == 1]
    case.targets[1] = next(token for token in range(VOCAB) if token not in row_ids)
    with pytest.raises(ContractError, match="target_not_in_kept_set"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


def test_a_listed_padding_column_is_refused() -> None:
    case = make_case([3])
    kept = kept_rows([np.array([int(case.targets[0]), VOCAB], np.int32)])
    with pytest.raises(ContractError, match="kept_id_outside_vocabulary"):
        score_kept(case.inputs(), case.targets, kept, case.temperatures)


@pytest.mark.parametrize("target", [-1, VOCAB, PADDED + 3])
def test_an_open_row_whose_target_is_no_token_is_refused(target: int) -> None:
    case = make_case([3, 0])
    case.targets[1] = target
    with pytest.raises(ContractError, match="target_outside_vocabulary"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


@pytest.mark.parametrize("row", [0, 1])
def test_a_scored_row_with_temperature_zero_is_refused(row: int) -> None:
    case = make_case([3, 0])
    case.temperatures[row] = 0.0
    with pytest.raises(ContractError, match="temperature_not_positive"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


def test_per_row_tensors_of_another_microbatch_are_refused() -> None:
    case = make_case([3, 0])
    with pytest.raises(ContractError, match="rows_differ"):
        score_kept(case.inputs(), case.targets, make_case([3]).kept, case.temperatures)


def test_a_head_of_another_shape_or_dtype_is_refused() -> None:
    case = make_case([3])
    for head in (Head(case.weight[:-1], WHOLE), Head(case.weight[:, :-1], WHOLE), Head(case.weight.double(), WHOLE)):
        with pytest.raises(ContractError, match="wrong_shape"):
            head.enter(case.hidden)


def test_ids_of_many_rows_become_columns_of_a_product_and_others_stay_sparse() -> None:
    shard = VocabShard.from_group(1000, 1000, None)
    num_rows = 4 * pairs.DENSE_ADVANTAGE
    often, seldom = torch.tensor([7, 900]), torch.arange(100, 160)
    rows = torch.cat([torch.arange(4).repeat_interleave(2), 4 + torch.arange(60)])
    plan = pairs.plan_pairs(rows, torch.cat([often.repeat(4), seldom]), num_rows, shard)
    assert plan.common.columns_U.tolist() == often.tolist()
    assert plan.rare.columns_U.tolist() == seldom.tolist()


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_the_gradient_of_hidden_states_is_added_to_what_is_there(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "DENSE_ADVANTAGE", advantage)
    case = make_case([5, 3, 12])
    inputs = case.inputs().detach()
    plan = pairs.plan_pairs(case.kept.rows, case.kept.ids, 3, WHOLE)
    grad_N = torch.linspace(-1.0, 1.0, len(case.kept.rows))
    fresh, added = torch.zeros(3, WIDTH), torch.ones(3, WIDTH)
    for grad_TH in (fresh, added):
        pairs.add_pair_gradients(inputs, plan, grad_N, grad_TH, None)
    assert torch.count_nonzero(fresh) == fresh.numel()
    assert_close(added - 1.0, fresh)


def test_no_pair_is_sparse_where_all_rows_list_everything() -> None:
    case = make_case([VOCAB] * 5)
    plan = pairs.plan_pairs(case.kept.rows, case.kept.ids, 5, WHOLE)
    assert len(plan.rare) == 0
    assert len(plan.common) == 5 * VOCAB


@pytest.mark.parametrize(("num_rows", "width"), [(1, 2048), (512, 2048), (2048, 2048), (100_000, 64), (0, 8)])
def test_a_slab_is_no_larger_than_its_bound_or_the_hidden_states(num_rows: int, width: int) -> None:
    columns = products.slab_columns(num_rows, width)
    assert columns >= 1
    assert columns * num_rows <= max(products.SLAB_ELEMENTS, num_rows * width)
