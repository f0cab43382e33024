from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import attention, host
from moerl.rollout.attention import decode_mask, grouped_query_attention, prefill_mask
from moerl.rollout.embedded import EmbeddedEngine


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


def test_a_prompt_on_a_device_attends_causally_without_a_mask(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def record(*states: Any, **options: Any) -> Tensor:
        asked.append(options)
        return nn.functional.scaled_dot_product_attention(*states, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    query, key, value = (each.double() for each in _states(3, 7, 7))  # the kernels of a CPU take float32 alone
    mask = prefill_mask(7, torch.device("cpu"))
    out, _ = grouped_query_attention(nn.Identity(), query, key, value, mask, scaling=0.5)
    assert asked == [{"is_causal": True, "scale": 0.5, "enable_gqa": True}]
    torch.testing.assert_close(out, _reference(query, key, value, mask, 0.5))


def test_several_queries_that_are_no_whole_prompt_are_refused_on_a_device():
    query, key, value = (each.double() for each in _states(1, 3, 7))
    mask = prefill_mask(7, torch.device("cpu"))[:, :, 4:]
    with pytest.raises(AssertionError):
        grouped_query_attention(nn.Identity(), query, key, value, mask)


def test_an_engine_on_a_device_attends_without_cudnn(make_model, monkeypatch: pytest.MonkeyPatch):
    model, before = make_model(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        EmbeddedEngine(deepcopy(model), spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=1)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setattr(host, "is_host", lambda model: False)
        EmbeddedEngine(model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=1)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
