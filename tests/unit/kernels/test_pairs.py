"""Listed pairs as sparse and as dense products, and slabs. `test_sparse_triton.py` runs this file again."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ALWAYS, NEVER, VOCAB, WHOLE, WIDTH, Case, assert_close, make_case, set_advantage
from torch import Tensor

from moerl.kernels import full, pairs, products
from moerl.kernels.head import VocabShard
from moerl.kernels.pairs import SortedPairs


def sorted_pairs(case: Case) -> SortedPairs:
    return SortedPairs.of(case.kept.rows.numpy(), case.kept.ids.numpy(), WHOLE)


def test_ids_of_many_rows_become_columns_of_a_product_and_others_stay_sparse() -> None:
    shard = VocabShard.from_group(1000, 1000, None)
    num_rows = 4 * pairs.DENSE_ADVANTAGE
    often, seldom = torch.tensor([7, 900]), torch.arange(100, 96 + num_rows)
    rows = torch.cat([torch.arange(4).repeat_interleave(2), torch.arange(4, num_rows)])
    ids = torch.cat([often.repeat(4), seldom])
    plan = pairs.plan_pairs(SortedPairs.of(rows.numpy(), ids.numpy(), shard), num_rows)
    assert plan.common.columns_U.tolist() == often.tolist()
    assert plan.rare.columns_U.tolist() == seldom.tolist()


@pytest.mark.parametrize("advantage", [NEVER, ALWAYS])
def test_the_gradient_of_hidden_states_is_added_to_what_is_there(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_advantage(monkeypatch, advantage)
    case = make_case([5, 3, 12])
    inputs = case.inputs().detach()
    plan = pairs.plan_pairs(sorted_pairs(case), 3)
    grad_N = torch.linspace(-1.0, 1.0, len(case.kept.rows))
    fresh, added = torch.zeros(3, WIDTH), torch.ones(3, WIDTH)
    for grad_TH in (fresh, added):
        pairs.add_pair_gradients(inputs, plan, grad_N, grad_TH, None)
    assert torch.count_nonzero(fresh) == fresh.numel()
    assert_close(added - 1.0, fresh)


def test_no_pair_is_sparse_where_all_rows_list_everything() -> None:
    case = make_case([VOCAB] * 5)
    plan = pairs.plan_pairs(sorted_pairs(case), 5)
    assert len(plan.rare) == 0
    assert len(plan.common) == 5 * VOCAB


@pytest.mark.parametrize(("num_rows", "width"), [(1, 2048), (512, 2048), (2048, 2048), (100_000, 64), (0, 8)])
def test_a_slab_is_no_larger_than_its_bound_or_the_hidden_states(num_rows: int, width: int) -> None:
    columns = products.slab_columns(num_rows, width)
    assert columns >= 1
    assert columns * num_rows <= max(products.SLAB_ELEMENTS, num_rows * width)


@pytest.mark.parametrize("width", [2048, 4096, 7168])
def test_rows_of_a_slab_begin_at_addresses_that_fast_products_read(width: int) -> None:
    columns = {products.slab_columns(num_rows, width) for num_rows in range(65, 16_384)}
    assert all(each % products.SLAB_MULTIPLE == 0 for each in columns)


def test_slabs_are_no_larger_than_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(a: Tensor, b: Tensor) -> Tensor:
        out = products.matmul(a, b)
        seen.append(out.numel())
        return out

    for module in (pairs, full):
        monkeypatch.setattr(module, "matmul", spy)
    case = make_case([0, 30, 0, 37, 37, 37])
    case.score().logprobs_T.sum().backward()
    assert len(seen) > 4
    assert max(seen) <= 6 * WIDTH
