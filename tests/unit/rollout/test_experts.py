from __future__ import annotations

import pytest
import torch

from moerl.rollout import experts, host
from moerl.rollout.capture import experts_by_layer
from moerl.rollout.experts import every_expert, experts_function, sorted_experts


@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_sorted_experts_are_those_of_transformers(make_model, num_rows: int):
    model = make_model()
    model.set_experts_implementation("eager")
    for module in experts_by_layer(model).values():
        torch.manual_seed(num_rows)
        hidden = torch.randn(num_rows, 32)
        ids = torch.stack([torch.randperm(6)[:2] for _ in range(num_rows)])
        weights = torch.rand(num_rows, 2)
        with torch.no_grad():
            torch.testing.assert_close(sorted_experts(module, hidden, ids, weights), module(hidden, ids, weights))


def test_experts_of_another_shape_stay_with_the_stock_function(make_model):
    model = make_model()
    assert experts_function(model, None) == "moerl_sorted"
    assert experts_function(model, torch.bfloat16) == "moerl_sorted_bfloat16"
    for module in experts_by_layer(model).values():
        module.is_transposed = True
    assert experts_function(model, None) == "grouped_mm"


@pytest.mark.parametrize("elements", [1, 2**26], ids=["one by one", "together"])
def test_all_experts_for_all_rows_are_those_of_transformers(make_model, monkeypatch, elements: int):
    monkeypatch.setattr(experts, "_EVERY_ELEMENTS", elements)
    model = make_model()
    model.set_experts_implementation("eager")
    for module in experts_by_layer(model).values():
        hidden, weights = torch.randn(17, 32), torch.rand(17, 2)
        ids = torch.stack([torch.randperm(6)[:2] for _ in range(17)])
        with torch.no_grad():
            torch.testing.assert_close(every_expert(module, hidden, ids, weights), module(hidden, ids, weights))


def test_on_a_device_only_16_bits_are_for_the_stock_function(make_model, monkeypatch):
    monkeypatch.setattr(host, "is_host", lambda model: False)
    assert experts_function(make_model(), None) == "moerl_every"
    assert experts_function(make_model(dtype=torch.bfloat16), None) == "grouped_mm"
