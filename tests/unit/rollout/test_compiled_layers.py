"""Decoding steps that Numba compiled, against transformers' modules, torch and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import embedded
from moerl.rollout import layer_kernels as kernels
from moerl.rollout.compiled_layers import knows_layers_of
from moerl.rollout.eight_bits import round_operands
from moerl.rollout.embedded import EmbeddedEngine


def _records(model: Any, count: int = 6, new_tokens: int = 20) -> dict[str, RolloutRecord]:
    """Greedily sampled, so that both ways of a step see the same tokens for as long as they agree."""
    engine = EmbeddedEngine(
        model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=count, policy_version=0
    )
    requests = [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i}", "g"), (i + 1, 7, (3 * i + 2) % 61), SamplingParams(top_k=5, seed=i), new_tokens
        )
        for i in range(count)
    ]
    return {record.rollout_id: record for record in engine.generate(requests)}


def _through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "knows_layers_of", lambda model, dtype: False)


SIZES: list[dict[str, Any]] = [
    {},
    {"num_experts": 7, "moe_intermediate_size": 20, "hidden_size": 36, "head_dim": 6, "num_experts_per_tok": 3},
    {"num_key_value_heads": 1, "norm_topk_prob": False, "mlp_only_layers": []},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
]


@pytest.mark.parametrize("changes", SIZES, ids=["a dense layer", "odd sizes", "one key-value head", "linear RoPE"])
def test_in_float32_a_step_is_that_of_transformers(
    make_model, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
):
    ours = _records(make_model(**changes))
    _through_transformers(monkeypatch)
    for name, theirs in _records(make_model(**changes)).items():
        values = ours[name].values
        assert values["token_ids"].tolist() == theirs.values["token_ids"].tolist()
        assert values["expert_ids"].tolist() == theirs.values["expert_ids"].tolist()
        np.testing.assert_allclose(values["rollout_logprobs"], theirs.values["rollout_logprobs"], atol=1e-5)


def test_in_bfloat16_a_step_rounds_where_transformers_does(make_model, monkeypatch: pytest.MonkeyPatch):
    """Until a number on the edge of two is rounded the other way: then they differ as two engines do."""
    ours = _records(make_model(dtype=torch.bfloat16), count=48)
    _through_transformers(monkeypatch)
    exact = _records(make_model(dtype=torch.bfloat16).float(), count=48)
    equal = nearer = 0
    for name, theirs in _records(make_model(dtype=torch.bfloat16), count=48).items():
        a, b, c = (each.values["rollout_logprobs"] for each in (ours[name], theirs, exact[name]))
        # The first decoded token: what comes after it may be another text.
        equal += int(a[4] == b[4])
        nearer += int(abs(a[4] - b[4]) < abs(a[4] - c[4]))
    assert equal > 24
    assert nearer > 40


def test_numbers_do_not_depend_on_how_many_threads_there_are(make_model):
    alone = _records(make_model(dtype=torch.bfloat16), count=13)
    try:
        torch.set_num_threads(3)
        together = _records(make_model(dtype=torch.bfloat16), count=13)
    finally:
        torch.set_num_threads(1)
    for name, record in alone.items():
        for field in ("token_ids", "expert_ids", "rollout_logprobs"):
            assert np.array_equal(record.values[field], together[name].values[field])


BROKEN = ["self_attn.q_proj.weight", "self_attn.k_norm.weight", "mlp.gate.weight", "mlp.experts.down_proj"]


@pytest.mark.parametrize("where", BROKEN)
def test_weights_that_are_not_finite_are_seen(make_model, monkeypatch: pytest.MonkeyPatch, where: str):
    """They come between prompt and first step, which is the only one that meets them."""
    model = make_model()
    prefill = EmbeddedEngine._prefill

    def then_break(self: EmbeddedEngine, *arguments: Any) -> None:
        prefill(self, *arguments)
        self._model.get_parameter(f"model.layers.2.{where}").data.view(-1)[0] = torch.nan

    monkeypatch.setattr(EmbeddedEngine, "_prefill", then_break)
    with pytest.raises(EngineError, match="without a finite normaliser"):
        _records(model)


def test_steps_of_other_models_are_left_to_transformers(make_model):
    assert knows_layers_of(make_model(), None)
    assert knows_layers_of(make_model(), torch.bfloat16)
    assert not knows_layers_of(make_model(), torch.float16)
    assert not knows_layers_of(make_model(dtype=torch.float64), None)
    assert not knows_layers_of(make_model(attention_bias=True), None)
    assert not knows_layers_of(make_model(hidden_act="gelu"), None)
    assert not knows_layers_of(make_model(use_sliding_window=True, sliding_window=8, max_window_layers=0), None)

    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not knows_layers_of(make_model(rope_parameters=dynamic), None)
    model = make_model()
    model.__class__ = type("Another", (Qwen3MoeForCausalLM,), {})
    assert not knows_layers_of(model, None)


def test_steps_of_eight_bit_products_are_left_to_transformers(make_model):
    model = make_model()
    round_operands(model)
    assert not knows_layers_of(model, torch.bfloat16)


def test_rounding_is_that_of_torch():
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    edges = np.array([0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 1, 0x8000], np.uint32)
    numbers = np.concatenate([bits, edges]).view(np.float32)
    found = np.array([kernels.rounded(number, True) for number in numbers], np.float32)
    wanted = torch.from_numpy(numbers).bfloat16().float().numpy()
    assert np.array_equal(found, wanted, equal_nan=True)
    assert kernels.rounded(numbers[0], False) == numbers[0]


def test_of_equal_experts_those_with_smaller_numbers_are_chosen():
    logits = np.array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]], np.float32)
    ids, weights = np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32)
    kernels.choose(logits, ids, weights, True, False)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
