from __future__ import annotations

import pytest
import torch
from torch import nn

from moerl.errors import EngineError
from moerl.rollout.attention import decode_mask, grouped_query_attention, prefill_mask


def _reference(query, key, value, mask, scaling):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _states(num_rows: int, num_queries: int, num_keys: int):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, 6, num_queries, 8), (num_rows, 2, num_keys, 8), (num_rows, 2, num_keys, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_a_decoding_row_attends_to_its_own_tokens_only():
    query, key, value = _states(4, 1, 10)
    positions = torch.tensor([0, 3, 9, 5])
    mask = decode_mask(positions, 10)
    assert mask.sum((1, 2, 3)).tolist() == [1, 4, 10, 6]
    out, _ = grouped_query_attention(nn.Identity(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, _reference(query, key, value, mask, 0.3))


def test_a_prompt_attends_causally():
    query, key, value = _states(3, 7, 7)
    mask = prefill_mask(7, torch.device("cpu"))
    assert mask[0, 0].sum(-1).tolist() == list(range(1, 8))
    out, _ = grouped_query_attention(nn.Identity(), query, key, value, mask, scaling=0.5)
    torch.testing.assert_close(out, _reference(query, key, value, mask, 0.5))


def test_a_call_without_a_mask_is_refused():
    query, key, value = _states(1, 3, 3)
    with pytest.raises(EngineError, match="without a mask"):
        grouped_query_attention(nn.Identity(), query, key, value, None)
