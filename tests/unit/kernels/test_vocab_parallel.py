"""Vocabulary shards and the gather of kept logits, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moerl.errors import ContractError
from moerl.kernels.vocab_parallel import VocabShard, gather_kept_logits


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def test_a_pair_listed_twice_gets_both_gradients() -> None:
    logits = torch.arange(12.0).reshape(2, 6).requires_grad_()
    shard = VocabShard.from_group(5, 6, None)
    rows, ids = torch.tensor([0, 1, 1]), torch.tensor([4, 2, 2])
    values = gather_kept_logits(logits, rows, ids, shard)
    (values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.tolist() == [4.0, 8.0, 8.0]
    expected = torch.zeros(2, 6)
    expected[0, 4], expected[1, 2] = 1.0, 5.0
    assert torch.equal(gradient(logits), expected)


def test_half_precision_logits_are_gathered_in_float32() -> None:
    logits = torch.ones(2, 6, dtype=torch.bfloat16)
    shard = VocabShard.from_group(6, 6, None)
    assert gather_kept_logits(logits, torch.tensor([0]), torch.tensor([1]), shard).dtype == torch.float32


def test_strided_logits_are_read_in_place() -> None:
    wide = torch.arange(24.0).reshape(2, 12)
    logits = wide[:, ::2].requires_grad_()
    shard = VocabShard.from_group(6, 6, None)
    values = gather_kept_logits(logits, torch.tensor([0, 1]), torch.tensor([5, 0]), shard)
    (grad,) = torch.autograd.grad(values.sum(), logits)
    assert values.tolist() == [10.0, 12.0]
    assert grad.nonzero().tolist() == [[0, 5], [1, 0]]


def test_padding_columns_count_as_no_token() -> None:
    assert VocabShard.from_group(5, 8, None).num_real_columns == 5
    shard = VocabShard.from_group(8, 8, None)
    assert shard.num_real_columns == shard.num_columns == 8


@pytest.mark.parametrize("bounds", [(4, 4, 8), (-1, 4, 8), (0, 4, 0)])
def test_a_shard_without_sensible_bounds_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ContractError, match="vocab_shard_bounds"):
        VocabShard(*bounds)


@pytest.mark.parametrize("bounds", [(4, 8, 8), (0, 4, 8)])
def test_part_of_a_vocabulary_without_a_group_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ContractError, match="vocab_shard_without_group"):
        VocabShard(*bounds)


def test_logits_of_another_width_are_refused() -> None:
    with pytest.raises(ContractError, match="logits_shape"):
        gather_kept_logits(torch.zeros(2, 5), torch.tensor([0]), torch.tensor([0]), VocabShard.from_group(6, 6, None))
