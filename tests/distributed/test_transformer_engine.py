"""The layers of a GPU, built on a CPU: Transformer Engine's modules with grouped experts, for every family.

What runs is Transformer Engine's own Python code with Megatron's spec for it; its kernels are not there
(`transformer_engine_on_cpu`). So weights come and go, routers choose and tell dispatchers, and no layer computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import families
import pytest
import tiny_moe
import torch
import transformer_engine_on_cpu
import weight_sync
from families import FAMILIES
from ranks import Ranks
from safetensors.torch import load_file
from torch import Tensor

from moerl.contract.parallel import ParallelDims
from moerl.machine.torch_start import cuda_variables
from moerl.models.description import read_model
from moerl.weights.manifest import model_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(transformer_engine_on_cpu.missing()), reason=transformer_engine_on_cpu.missing()),
]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "ETP2": (2, {"tensor": 2, "expert_tensor": 2}),
    "VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2-EP2": (4, {"tensor": 2, "expert": 2}),
}
EVERY_LAYOUT = ("qwen3_moe-dense", "deepseek_v3", "glm4_moe")
CASES = [
    pytest.param(name, *LAYOUTS[layout], id=f"{name}-{layout}")
    for name in FAMILIES
    for layout in LAYOUTS
    if layout in ("one", "EP2") or name in EVERY_LAYOUT
]
SETTINGS = [
    pytest.param("bfloat16", "selective", "on", id="bfloat16"),
    pytest.param("bfloat16", "full", "overlap", id="bfloat16-overlap"),
    pytest.param("float32", "none", "off", id="float32"),
]


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[int], Ranks]]:
    """`gpu_ranks(2)`: so many ranks with Transformer Engine, started by their first call."""
    ranks = {number: Ranks(number, first="transformer_engine_on_cpu") for number in (1, 2, 4)}
    yield ranks.__getitem__
    for each in ranks.values():
        each.close()


def trainer_of(layout: Any, path: Path, dtype: str = "float32") -> Any:
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    return MegatronTrainer(read_model(path), layout, ModelOptions(dtype=dtype), None)


def moe_layers(trainer: Any) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [module for chunk in trainer.model.chunks for module in chunk.modules() if isinstance(module, MoELayer)]


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that one of two lacks, and those of tensors that are not the same in dtype, shape and bits."""
    both = sorted(found.keys() & expected.keys())
    wrong = [n for n in both if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])]
    return sorted(found.keys() ^ expected.keys()) + wrong


# --- start -----------------------------------------------------------------------------------------------------------


def deterministic_mode(layout: Any, path: Path, variables: dict[str, str]) -> bool:
    from moerl.trainer.model import ModelOptions, PolicyModel

    with mock.patch.dict(os.environ, variables):
        model = PolicyModel(read_model(path), ModelOptions(deterministic=True), layout)
    return model.config.deterministic_mode


def test_deterministic_attention_starts_with_the_variables_of_a_rank(
    tmp_path: Path, gpu_ranks: Callable[[int], Ranks]
) -> None:
    families.write_model(tmp_path, FAMILIES["qwen3_moe"], seed=3)
    variables = cuda_variables("on", deterministic=True)
    assert gpu_ranks(1).run(deterministic_mode, tmp_path, variables) == [True]


# --- weights ---------------------------------------------------------------------------------------------------------


def publish_and_export(layout: Any, path: Path, dtype: str) -> dict[str, Any]:
    """The classes of a rank's layers, and what it publishes and exports after it has loaded a checkpoint."""
    trainer = trainer_of(layout, path, dtype)
    attention = [layer.self_attention for chunk in trainer.model.chunks for layer in chunk.decoder.layers]
    plan = weight_sync.plan_for(trainer, path)
    sink = weight_sync.KeepingSink() if layout.rank in plan.options.senders else None
    weight_sync.publish(trainer, plan, sink)
    return {
        "classes": {
            *(type(layer.experts).__name__ for layer in moe_layers(trainer)),
            *(type(module).__name__ for each in attention for module in (each.core_attention, each.linear_proj)),
        },
        "parameters": [name for chunk in trainer.model.chunks for name, _ in chunk.named_parameters()],
        "manifest": plan.manifest,
        "published": sink.tensors if sink is not None else {},
        "exported": {name: tensor.clone() for name, tensor in trainer.export()},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "world_size", "sizes"), CASES)
def test_grouped_experts_and_fused_norms_are_published_as_the_tensors_of_the_checkpoint(
    name: str, world_size: int, sizes: dict[str, int], dtype: str, tmp_path: Path, gpu_ranks: Callable[[int], Ranks]
):
    families.write_model(tmp_path, FAMILIES[name], seed=3)
    results = gpu_ranks(world_size).run(publish_and_export, tmp_path, dtype, **sizes)
    original = {
        # The bias of experts stays what it was.
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    data = world_size // (sizes.get("tensor", 1) * sizes.get("pipeline", 1))
    manifest = model_manifest(read_model(tmp_path), ParallelDims(**sizes, data=data))
    for result in results:
        assert result["classes"] == {"TEGroupedMLP", "TEDotProductAttention", "TERowParallelLinear"}
        assert any(parameter.endswith("mlp.experts.linear_fc1.weight0") for parameter in result["parameters"])
        assert result["manifest"] == manifest
        assert differences(result["exported"], original) == []
    assert differences({name: tensor for each in results for name, tensor in each["published"].items()}, original) == []


# --- routers ---------------------------------------------------------------------------------------------------------


def worst_experts(moe_layer: int, num_experts: int, topk: int) -> list[int]:
    """Experts that no router would choose from logits that rise with the expert, others in every layer."""
    return [(moe_layer + i) % (num_experts // 2) for i in range(topk)]


class Chooser:
    """Takes the place of a schedule: makes every router choose `worst_experts`, and keeps what is dispatched."""

    def __init__(self) -> None:
        self.dispatched: dict[int, set[tuple[int, ...]]] = {}

    def route(self, hook: Any, scores_tE: Tensor, own_topk: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
        topk = own_topk(scores_tE)[1].shape[1]
        ids_tK = torch.tensor([worst_experts(hook.moe_layer, scores_tE.shape[1], topk)]).expand(len(scores_tE), -1)
        return scores_tE.gather(1, ids_tK), ids_tK

    def observe(self, hook: Any, routing_map_tE: Tensor) -> None:
        self.dispatched[hook.moe_layer] = {tuple(row.nonzero().flatten().tolist()) for row in routing_map_tE}


def choose_for_routers(layout: Any, path: Path) -> dict[str, Any]:
    """Returns what reaches the dispatchers of this rank's MoE layers if a hook chooses the experts."""
    trainer, chooser = trainer_of(layout, path), Chooser()
    for hook in trainer.keep_routing.hooks:
        hook.schedule = chooser
    layers = moe_layers(trainer)
    # What follows in the dispatcher would be a kernel.
    trainer.model.config.moe_permute_fusion = False
    for layer in layers:
        config = layer.config
        logits = torch.linspace(-2, 2, config.num_moe_experts).expand(6, 1, -1).contiguous().requires_grad_()
        probs, routing_map = layer.router.routing(logits)
        layer.token_dispatcher.dispatch_preprocess(torch.zeros(6, 1, config.hidden_size), routing_map, probs)
    return {
        "layers": [layer.layer_number for layer in layers],
        "hooks": [hook.layer_number for hook in trainer.keep_routing.hooks],
        "dispatched": chooser.dispatched,
    }


@pytest.mark.parametrize(("name", "world_size", "sizes"), CASES)
def test_every_router_asks_its_hook_and_dispatches_what_that_chose(
    name: str, world_size: int, sizes: dict[str, int], tmp_path: Path, gpu_ranks: Callable[[int], Ranks]
):
    spec = FAMILIES[name].spec()
    families.write_model(tmp_path, FAMILIES[name], seed=3)
    results = gpu_ranks(world_size).run(choose_for_routers, tmp_path, **sizes)
    dispatched = {}
    for result in results:
        assert result["hooks"] == result["layers"]
        dispatched |= result["dispatched"]
    wanted = {
        layer: worst_experts(layer, spec.num_experts, spec.experts_per_token) for layer in range(spec.num_moe_layers)
    }
    assert dispatched == {layer: {tuple(sorted(experts))} for layer, experts in wanted.items()}


# --- checkpoints -----------------------------------------------------------------------------------------------------


MOMENTS = ("exp_avg", "exp_avg_sq")


def held_by(trainer: Any, optimizers: list[Any]) -> dict[str, Tensor]:
    """The live weights and moments of a rank."""
    states = [state for each in optimizers for state in each.state.values()]
    moments = {f"{number}.{name}": state[name] for number, state in enumerate(states) for name in MOMENTS}
    return {**trainer.shards(), **moments}


def save_and_restore(layout: Any, path: Path, folder: Path, dtype: str, recompute: str, sharding: str) -> list[str]:
    """Writes weights and moments, sets them to 0, restores them. Returns differences and the optimizers' classes."""
    import torch.distributed as dist

    from moerl.trainer import sharded_state
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.optimizer import StateOptions
    from moerl.trainer.trainer import MegatronTrainer

    options = ModelOptions(dtype=dtype, recompute=recompute)
    trainer = MegatronTrainer(read_model(path), layout, options, tiny_moe.OPTIMIZER, 8, StateOptions(sharding))
    assert trainer.optimizer is not None
    megatron = trainer.optimizer.megatron
    inner = [each.optimizer for each in getattr(megatron, "chained_optimizers", [megatron])]
    # Moments are made by the first step, or for a checkpoint.
    trainer.stage()
    for number, state in enumerate(state for each in inner for state in each.state.values()):
        # Without sharding ranks hold the same moments.
        generator = torch.Generator().manual_seed(number + 1000 * layout.rank * (sharding != "off"))
        for moment in MOMENTS:
            state[moment].uniform_(generator=generator)
    before = {name: tensor.clone() for name, tensor in held_by(trainer, inner).items()}
    group: Any = dist.new_group(backend="gloo")
    sharded_state.write(trainer.stage(), folder, group)
    for tensor in held_by(trainer, inner).values():
        tensor.zero_()
    trainer.restore(folder)
    return [*differences(held_by(trainer, inner), before), *sorted({type(each).__name__ for each in inner})]


@pytest.mark.parametrize(("dtype", "recompute", "sharding"), SETTINGS)
@pytest.mark.parametrize("name", EVERY_LAYOUT)
def test_weights_and_moments_come_back_from_a_checkpoint(
    name: str, dtype: str, recompute: str, sharding: str, tmp_path: Path, gpu_ranks: Callable[[int], Ranks]
):
    families.write_model(tmp_path / "model", FAMILIES[name], seed=3)
    (tmp_path / "checkpoint").mkdir()
    arguments = (tmp_path / "model", tmp_path / "checkpoint", dtype, recompute, sharding)
    # The optimizer, too, is that of Transformer Engine.
    assert gpu_ranks(2).run(save_and_restore, *arguments, expert=2) == [["FusedAdam"]] * 2


def trainer_with_moments(layout: Any, path: Path) -> tuple[Any, list[Any]]:
    """A trainer and the states of its optimizer's parameters."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(dtype="float32"), tiny_moe.OPTIMIZER, 8)
    assert trainer.optimizer is not None
    trainer.stage()
    megatron = trainer.optimizer.megatron
    inner = [each.optimizer for each in getattr(megatron, "chained_optimizers", [megatron])]
    return trainer, [state for each in inner for state in each.state.values()]


def weights_and_moments(trainer: Any, states: list[Any]) -> dict[str, Tensor]:
    """Returns exported tensors, and values of moments in rising order: layers may hold tensors side by side."""
    exported = {name: tensor.clone() for name, tensor in trainer.export()}
    return exported | {each: torch.cat([state[each].flatten() for state in states]).sort().values for each in MOMENTS}


def write_checkpoint(layout: Any, path: Path, folder: Path) -> dict[str, Tensor]:
    import torch.distributed as dist

    from moerl.trainer import sharded_state

    trainer, states = trainer_with_moments(layout, path)
    for number, state in enumerate(states):
        for moment in MOMENTS:
            state[moment].uniform_(generator=torch.Generator().manual_seed(number))
    sharded_state.write(trainer.stage(), folder, dist.new_group(backend="gloo"))  # type: ignore[arg-type]
    return weights_and_moments(trainer, states)


def read_checkpoint(layout: Any, path: Path, folder: Path) -> dict[str, Tensor]:
    trainer, states = trainer_with_moments(layout, path)
    trainer.restore(folder)
    return weights_and_moments(trainer, states)


@pytest.mark.parametrize("writes", ["gpu", "cpu"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_one_kind_of_device_is_read_on_the_other(
    name: str, writes: str, tmp_path: Path, gpu_ranks: Callable[[int], Ranks], one_process: Ranks
) -> None:
    families.write_model(tmp_path / "written", FAMILIES[name], seed=3)
    families.write_model(tmp_path / "other", FAMILIES[name], seed=4)
    (tmp_path / "checkpoint").mkdir()
    writer, reader = (gpu_ranks(1), one_process) if writes == "gpu" else (one_process, gpu_ranks(1))
    (wanted,) = writer.run(write_checkpoint, tmp_path / "written", tmp_path / "checkpoint")
    (found,) = reader.run(read_checkpoint, tmp_path / "other", tmp_path / "checkpoint")
    assert differences(found, wanted) == []


# --- gradients -------------------------------------------------------------------------------------------------------


def fused_weights(layout: Any, path: Path, sharding: str) -> tuple[set[str], set[str], list[str]]:
    """Names of weights whose gradients are added up inside of products; of all others; of the first without a place
    for that."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.optimizer import StateOptions
    from moerl.trainer.trainer import MegatronTrainer

    options, state = ModelOptions(dtype="bfloat16"), StateOptions(sharding)
    trainer = MegatronTrainer(read_model(path), layout, options, tiny_moe.OPTIMIZER, 8, state)
    (chunk,) = trainer.model.chunks
    fusing = [(n, m) for n, m in chunk.named_modules() if getattr(m, "fuse_wgrad_accumulation", False)]
    fused: dict[str, Any] = {
        f"{name}.{own}": parameter
        for name, module in fusing
        for own, parameter in module.named_parameters(recurse=False)
        if own.startswith("weight")
    }
    without = [name for name, weight in fused.items() if weight.main_grad.dtype != torch.float32]
    return set(fused), {name for name, _ in chunk.named_parameters()} - set(fused), without


@pytest.mark.parametrize("sharding", ["off", "overlap"])
@pytest.mark.parametrize("name", ["qwen3_moe-dense", "deepseek_v3"])
def test_every_linear_layer_but_the_head_adds_its_gradient_up_in_float32(
    name: str, sharding: str, tmp_path: Path, gpu_ranks: Callable[[int], Ranks]
):
    families.write_model(tmp_path, FAMILIES[name], seed=3)
    ((fused, others, without),) = gpu_ranks(1).run(fused_weights, tmp_path, sharding)
    assert without == []
    assert any(".linear_proj.weight" in each for each in fused)
    assert any(".experts.linear_fc1.weight0" in each for each in fused)
    left = {each for each in others if "linear" in each and not each.endswith((".layer_norm_weight", ".bias"))}
    assert left == set()
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= others
