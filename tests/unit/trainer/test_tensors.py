from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_moe
import torch
from families import FAMILIES
from ranks import Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.models.description import read_model
from moerl.trainer.tensors import bypassed_tensors, dequantise, is_bypassed, read_weights

Tensors = dict[str, Tensor]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weight and the scales of its 128 x 128 blocks, block by block."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, quantised = torch.empty(rows, columns), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448.0
            quantised[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return quantised, scales


def rewrite(path: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """Changes the tensors and the config of a checkpoint."""
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))
    return path


def load_and_export(layout: Any, path: Path, dtype: str = "float32", run: bool = False) -> Tensors:
    from moerl.trainer.losses import Scorer
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    spec = FAMILIES["deepseek_v3"].spec()
    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(dtype=dtype), None)
    if run:
        (batches,) = tiny_moe.pack(families.make_samples(spec, 1, (9, 12)))
        trainer.score(batches, Scorer(batches, keep_mask=False), enforce=False)
    return {name: tensor.clone() for name, tensor in trainer.export()}


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    return families.write_model(tmp_path / "deepseek", FAMILIES["deepseek_v3"], seed=4)


# --- FP8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (1, 257)])
def test_an_fp8_weight_is_multiplied_by_the_scale_of_its_block(shape: tuple[int, int]):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised, scales = quantise(weight)
    restored = dequantise(quantised, scales)
    for i in range(shape[0]):
        for j in range(0, shape[1], 37):
            assert restored[i, j] == quantised[i, j].float() * scales[i // 128, j // 128]
    assert (restored - weight).abs().max() < 0.05 * weight.abs().max()


def test_an_fp8_weight_without_scales_of_its_blocks_is_refused():
    weight, scales = quantise(torch.ones(200, 100))
    for state in ({"w": weight}, {"w": weight, "w_scale_inv": scales.T.contiguous()}):
        with pytest.raises(CheckpointError, match="cannot be dequantised"):
            read_weights({"gate": "w"}, state)


def test_an_fp8_checkpoint_is_dequantised_on_load(deepseek: Path, one_process: Ranks):
    expected: Tensors = {}

    def quantise_linears(tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            expected[name] = tensor
            out[name] = tensor
            if "_proj" in name:
                out[name], out[f"{name}_scale_inv"] = quantise(tensor)
                expected[name] = dequantise(out[name], out[f"{name}_scale_inv"])
        return out

    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    rewrite(deepseek, quantise_linears, quantization_config=quantisation)
    (exported,) = one_process.run(load_and_export, deepseek)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


# --- what is left out, and what must not be --------------------------------------------------------------------------


def add_prediction_head(tensors: Tensors) -> Tensors:
    head = {name.replace("layers.3.", "layers.4."): t + 1 for name, t in tensors.items() if "layers.3." in name}
    return tensors | head | {"model.layers.4.eh_proj.weight": torch.ones(3, 5)}


def test_multi_token_prediction_heads_are_left_out_and_can_be_copied(deepseek: Path, one_process: Ranks):
    original = load_file(deepseek / "model.safetensors")
    rewrite(deepseek, add_prediction_head, num_nextn_predict_layers=1)
    (exported,) = one_process.run(load_and_export, deepseek)
    assert exported.keys() == original.keys()
    config = json.loads((deepseek / "config.json").read_text())
    copied = dict(bypassed_tensors(deepseek, config))
    whole = load_file(deepseek / "model.safetensors")
    assert exported.keys() | copied.keys() == whole.keys()
    assert not exported.keys() & copied.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in copied.items())


def test_only_the_layers_behind_the_last_one_are_prediction_heads():
    config = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    assert is_bypassed("model.layers.4.mlp.gate.weight", config)
    assert not is_bypassed("model.layers.3.mlp.gate.weight", config)
    assert not is_bypassed("model.layers.5.mlp.gate.weight", config)
    assert not is_bypassed("model.layers.4.mlp.gate.weight", {"num_hidden_layers": 4, "num_nextn_predict_layers": None})


@pytest.mark.parametrize("name", ["model.layers.4.mlp.gate.weight", "model.layers.1.self_attn.lora_A.weight"])
def test_a_tensor_that_would_be_lost_is_refused(name: str, deepseek: Path, one_process: Ranks):
    rewrite(deepseek, lambda tensors: tensors | {name: torch.ones(2)})
    with pytest.raises(CheckpointError, match="would lose"):
        one_process.run(load_and_export, deepseek)


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.gate.e_score_correction_bias", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
)
def test_a_checkpoint_without_a_parameter_is_refused(name: str, deepseek: Path, one_process: Ranks):
    rewrite(deepseek, lambda tensors: {other: t for other, t in tensors.items() if other != name})
    with pytest.raises(CheckpointError, match="does not have every parameter"):
        one_process.run(load_and_export, deepseek)


# --- precision of the expert bias ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [False, True], ids=["loaded", "after a forward pass"])
def test_a_bfloat16_model_keeps_the_bits_of_float32_expert_biases(run: bool, deepseek: Path, one_process: Ranks):
    original = load_file(deepseek / "model.safetensors")
    (exported,) = one_process.run(load_and_export, deepseek, "bfloat16", run)
    biases = [name for name in original if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name, tensor in exported.items():
        if name in biases:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, original[name])
        else:
            assert torch.equal(tensor.float(), original[name].bfloat16().float())
