"""Routers of a live model that are tapped, as which MoE layers; and routers that are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_moe
from ranks import Ranks

from moerl.errors import ReplayError


def plain_config(**changes: Any) -> SimpleNamespace:
    """Makes the part of a TransformerConfig that hooks read."""
    settings = {
        "moe_router_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_expert_capacity_factor": None,
        "moe_router_force_load_balancing": False,
    }
    return SimpleNamespace(**settings, **changes)


def bare_layer(number: int) -> Any:
    """An MoE layer of which there is nothing but its number and an untapped router."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from torch import nn

    layer: Any = MoELayer.__new__(MoELayer)
    router: Any = TopKRouter.__new__(TopKRouter)
    for module in (layer, router):
        nn.Module.__init__(module)
    router.is_mtp_layer, router.router_replay = False, None
    layer.layer_number, layer.router = number, router
    layer.token_dispatcher = SimpleNamespace(dispatch_preprocess=None)
    return layer


def untapped(path: Path, layout: Any) -> Any:
    """A model that nobody has tapped yet."""
    model = tiny_moe.build(layout, path, optimizer=None).model
    for layer in model.chunks[0].decoder.layers:
        layer.mlp.router.router_replay = None
        del layer.mlp.token_dispatcher.dispatch_preprocess
    return model


# --- layers ----------------------------------------------------------------------------------------------------------


def numbers(layout: Any, frequency: Any, num_layers: int, chunks: list[list[int]]) -> list[list[int]]:
    """(MoE layer, Megatron's number) of the hooks of a model whose chunks have MoE layers of these numbers."""
    from torch import nn

    from moerl.trainer.routers import hook_routers

    config = plain_config(moe_layer_freq=frequency, num_layers=num_layers)
    modules = [nn.ModuleList(bare_layer(number) for number in chunk) for chunk in chunks]
    return [[hook.moe_layer, hook.layer_number] for hook in hook_routers(modules, config)]


@pytest.mark.parametrize(
    ("frequency", "num_layers", "chunks", "expected"),
    [
        ([0, 1, 1, 1], 4, [[2, 3, 4]], [[0, 2], [1, 3], [2, 4]]),
        # The second pipeline stage of two, with two virtual stages; three dense layers in front.
        ([0, 0, 0, 1, 1, 1, 1, 1], 8, [[], [7, 8]], [[3, 7], [4, 8]]),
        ([0, 0, 0, 1, 1, 1, 1, 1], 8, [[4], [7, 8]], [[0, 4], [3, 7], [4, 8]]),
        ([1, 0, 1, 0, 0, 1], 6, [[1], [3], [6]], [[0, 1], [1, 3], [2, 6]]),
        (1, 3, [[1, 2, 3]], [[0, 1], [1, 2], [2, 3]]),
        (2, 6, [[3], [5]], [[1, 3], [2, 5]]),
    ],
    ids=["dense prefix", "late stage", "virtual stages", "pattern", "every layer", "every second layer"],
)
def test_moe_layers_are_counted_over_the_whole_model_without_its_dense_layers(
    frequency: Any, num_layers: int, chunks: list[list[int]], expected: list[list[int]], one_process: Ranks
) -> None:
    assert one_process.run(numbers, frequency, num_layers, chunks) == [expected]


def hook_beside_a_prediction_head(layout: Any, path: Path) -> dict[str, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from moerl.trainer.routers import hook_routers

    model = untapped(path, layout)
    model.config.mtp_num_layers = 1
    layer = get_gpt_layer_local_spec(num_experts=tiny_moe.SPEC.num_experts, qk_layernorm=True)
    spec: Any = get_gpt_mtp_block_spec(model.config, layer, use_transformer_engine=False)
    head = MultiTokenPredictionBlock(model.config, spec=spec)
    hooks = hook_routers([*model.chunks, head], model.config)
    layers: list[Any] = [module for module in head.modules() if isinstance(module, MoELayer)]
    return {
        "hooks": [(hook.moe_layer, hook.layer_number) for hook in hooks],
        "numbers": [layer.layer_number for layer in layers],
        "replays": [layer.router.router_replay for layer in layers],
        "observed": ["dispatch_preprocess" in vars(layer.token_dispatcher) for layer in layers],
    }


def test_routers_of_multi_token_prediction_are_bypassed_although_their_numbers_are_those_of_the_first_layers(
    untied: Path, one_process: Ranks
) -> None:
    (seen,) = one_process.run(hook_beside_a_prediction_head, untied)
    assert seen["numbers"] == [1]
    assert seen["hooks"] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert seen["replays"] == [None]
    assert seen["observed"] == [False]


# --- refused ---------------------------------------------------------------------------------------------------------


def keep_routing_of(layout: Any, path: Path, kind: str) -> str:
    from megatron.core.transformer.moe.router import TopKRouter

    from moerl.trainer.replay import KeepRouting

    class OtherRouter(TopKRouter):
        pass

    model = untapped(path, layout)
    if kind == "fused":
        model.config.moe_router_fusion = True
    else:
        model.chunks[0].decoder.layers[2].mlp.router.__class__ = OtherRouter
    with pytest.raises(ReplayError) as caught:
        KeepRouting(model.chunks, model.config, tiny_moe.SPEC, layout)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("fused", "the router setting moe_router_fusion"), ("class", "the router of layer 3 is of an unknown class")],
)
def test_a_model_whose_routers_may_not_ask_the_hook_is_refused_at_start_up(
    kind: str, said: str, untied: Path, one_process: Ranks
) -> None:
    (refusal,) = one_process.run(keep_routing_of, untied, kind)
    assert said in refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
        ("moe_expert_capacity_factor", 1.25),
        ("moe_router_force_load_balancing", True),
    ],
)
def test_routers_that_return_before_the_hook_or_drop_tokens_after_it_are_refused(name: str, value: object) -> None:
    from moerl.trainer.routers import refuse_unsupported_routers

    config = plain_config()
    refuse_unsupported_routers(config)
    setattr(config, name, value)
    with pytest.raises(ReplayError, match=name):
        refuse_unsupported_routers(config)
