from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout.capture import RoutingCapture

TOKENS = torch.tensor([[1, 5, 9, 2], [7, 7, 3, 0]])


@torch.inference_mode()
def _expert_ids_by_layer(model) -> torch.Tensor:
    """Expert ids [rows, L, K] from the router logits that transformers itself reports."""
    logits = model(TOKENS, output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, -1).indices for layer in logits], 1)


@torch.inference_mode()
def test_every_input_row_of_every_moe_layer_is_captured(make_model):
    model = make_model()
    capture = RoutingCapture(model, spec_from_hf_config(model.config.to_dict()))
    capture.begin()
    model(TOKENS)
    taken = capture.take(8)
    assert taken.shape == (8, 2, 2)
    capture.close()
    assert torch.equal(taken.sort(-1).values, _expert_ids_by_layer(model).sort(-1).values)


@torch.inference_mode()
def test_a_router_that_ran_twice_or_not_at_all_is_an_error(make_model):
    model = make_model()
    capture = RoutingCapture(model, spec_from_hf_config(model.config.to_dict()))
    with pytest.raises(EngineError, match="MoE layer 0 of 2"):
        capture.take(8)
    capture.begin()
    model(TOKENS)
    model(TOKENS)
    with pytest.raises(EngineError, match="exactly once"):
        capture.take(8)


@torch.inference_mode()
def test_a_router_that_is_bypassed_is_an_error(make_model):
    model = make_model()
    capture = RoutingCapture(model, spec_from_hf_config(model.config.to_dict()))
    model.model.layers[2].mlp.forward = lambda x: x
    capture.begin()
    model(TOKENS)
    with pytest.raises(EngineError, match="MoE layer 1 of 2"):
        capture.take(8)


@torch.inference_mode()
def test_a_pass_over_another_number_of_rows_is_an_error(make_model):
    model = make_model()
    capture = RoutingCapture(model, spec_from_hf_config(model.config.to_dict()))
    capture.begin()
    model(TOKENS)
    with pytest.raises(EngineError, match=r"\(7, 2\)"):
        capture.take(7)


@pytest.mark.parametrize("change", [{"num_moe_layers": 3}, {"num_experts": 8}, {"experts_per_token": 1}], ids=str)
def test_a_model_that_is_not_what_the_spec_says_is_refused(make_model, change: dict[str, int]):
    model = make_model()
    spec = replace(spec_from_hf_config(model.config.to_dict()), **change)
    with pytest.raises(EngineError, match="do not match the spec"):
        RoutingCapture(model, spec)


def test_models_whose_routers_are_unknown_are_refused():
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    spec = ModelSpec(num_moe_layers=1, experts_per_token=2, num_experts=4, vocab_size=20)
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    for model in (mixtral, llama):
        with pytest.raises(EngineError, match="no known router"):
            RoutingCapture(model, spec)
