"""8-bit products of the embedded engine: what is rounded, how far, and that updates reach it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from full_updates import send

from moerl.errors import EngineError
from moerl.kernels.checksum import checksums
from moerl.models.spec import spec_from_hf_config
from moerl.rollout.capture import routers
from moerl.rollout.eight_bits import eight_bit_weight, has_eight_bit_products, round_operands, to_eight_bits
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.experts import experts_function
from moerl.rollout.loading import load_sampler
from moerl.rollout.rounding import emulate
from moerl.rollout.weight_staging import held_dtypes, held_tensors


def _engine(model: Any) -> EmbeddedEngine:
    spec = spec_from_hf_config(model.config.to_dict())
    return EmbeddedEngine(model, spec, engine_id="e", max_running=4, policy_version=0)


def _eight_bits(model: Any) -> Any:
    model = deepcopy(model).bfloat16()
    round_operands(model)
    return model


def _sampling(model: Any) -> Any:
    """The model as an engine has it, but for its attention, which can be called by the engine alone."""
    emulate(model, torch.bfloat16, routers(model))
    model.set_experts_implementation(experts_function(model, torch.bfloat16))
    return model


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    tokens = torch.arange(60).view(4, 15) * 7 % 61
    return model(input_ids=tokens).logits.float()


def test_each_row_keeps_its_largest_number_and_errs_by_half_a_step():
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    rounded = to_eight_bits(values)
    largest = values.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(rounded.abs().amax(-1, keepdim=True), largest)
    # Three bits of mantissa; below 2**-6 of e4m3, numbers are equally far apart.
    step = torch.maximum(values.abs() / 8, largest / 448 * 2**-9)
    assert ((rounded - values).abs() <= step / 2 * 1.0001).all()
    assert rounded[0].unique().numel() < values[0].unique().numel()
    assert torch.equal(to_eight_bits(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_eight_bits_are_further_from_float32_than_bfloat16_but_near(make_model):
    exact, half = make_model(), make_model(dtype=torch.bfloat16)
    eight = _eight_bits(exact)
    wanted = _logits(exact)
    errors = [(_logits(_sampling(model)) - wanted).abs().median().item() for model in (half, eight)]
    assert 2.0 < errors[1] / errors[0] < 50.0
    assert errors[1] < 0.2 * wanted.std()


@torch.no_grad()
def test_linear_maps_and_experts_are_rounded_and_routers_and_head_are_not(make_model):
    model = _sampling(_eight_bits(make_model()))
    layer = model.model.layers[0]
    projection, router = layer.self_attn.q_proj, layer.mlp.gate
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    products = to_eight_bits(inputs) @ to_eight_bits(projection.weight.detach()).T
    assert torch.equal(projection(inputs), products.bfloat16().float())
    assert torch.equal(model.lm_head(inputs), (inputs @ model.lm_head.weight.T).bfloat16().float())
    experts = layer.mlp.experts
    ids, weights = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    gate, up = (to_eight_bits(inputs) @ to_eight_bits(experts.gate_up_proj[0]).T).chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
    wanted = to_eight_bits(inner) @ to_eight_bits(experts.down_proj[0]).T
    torch.testing.assert_close(experts(inputs, ids, weights), wanted, rtol=2**-7, atol=1e-4)
    half = _sampling(make_model(dtype=torch.bfloat16))
    assert torch.equal(router(inputs)[0], half.model.layers[0].mlp.gate(inputs)[0])


def test_an_update_is_held_in_bfloat16_and_computed_with_in_eight_bits(make_model):
    engine, update = _engine(_eight_bits(make_model())), make_model(seed=1)
    before = _logits(engine._model)
    send(engine, 1, held_tensors(update, held_dtypes(update)))
    halves = deepcopy(update).bfloat16()
    assert set(engine.held_dtypes().values()) == {"bfloat16"}
    engine.verify(checksums(held_tensors(halves, held_dtypes(halves))))
    fresh = _sampling(_eight_bits(update))
    assert torch.equal(_logits(engine._model), _logits(fresh))
    assert not torch.equal(_logits(fresh), before)


def test_a_weight_is_rounded_once_per_change():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    first = eight_bit_weight(weight)
    assert eight_bit_weight(weight) is first
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(eight_bit_weight(weight), 2 * first)


def test_a_model_elsewhere_than_on_a_cpu_is_refused(make_model):
    with pytest.raises(EngineError, match="8 bits are emulated on a CPU alone"):
        round_operands(make_model().to("meta"))


def test_the_precision_of_a_run_is_that_of_its_engine(untied: Path):
    eight, half = load_sampler(untied, "float8"), load_sampler(untied, "bfloat16")
    assert {model.dtype for model in (eight, half)} == {torch.bfloat16}
    assert has_eight_bit_products(eight)
    assert not has_eight_bit_products(half)
    assert load_sampler(untied, "float32").dtype == torch.float32
