"""Model directories: written from an export, and refused where the tokenizer is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.contract.sealed import find_damage
from moerl.errors import ConfigError
from moerl.orchestration.models import read_tokenizer
from moerl.trainer.hf_directory import checkpoint_shapes, write_model


def test_a_written_model_of_a_quantised_checkpoint_is_whole_and_no_longer_quantised(tmp_path: Path) -> None:
    like, folder = tmp_path / "like", tmp_path / "written"
    like.mkdir()
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    (like / "config.json").write_text(json.dumps(config))
    head = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    stored = {
        "model.layers.0.mlp.gate.weight": torch.zeros(2, 2),
        "model.layers.1.mlp.up_proj.weight": head.to(torch.float8_e4m3fn),
        "model.layers.1.mlp.up_proj.weight_scale_inv": torch.tensor([[3.0]]),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.tensor([1.0 + 2**-20]),
    }
    save_file(stored, like / "model.safetensors")
    # An update of an engine brings what is trained, and neither heads that only draft nor scales.
    assert checkpoint_shapes(like, config) == {"model.layers.0.mlp.gate.weight": (2, 2)}
    trained = torch.full((2, 2), 7.0, dtype=torch.bfloat16)
    write_model(folder, like, iter([("model.layers.0.mlp.gate.weight", trained)]))
    written = load_file(folder / "model.safetensors")
    assert torch.equal(written.pop("model.layers.0.mlp.gate.weight"), trained)
    assert torch.equal(written.pop("model.layers.1.mlp.up_proj.weight"), (head * 3).bfloat16())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(written.pop(bias), stored[bias])
    assert not written
    assert find_damage(folder) is None
    new = json.loads((folder / "config.json").read_text())
    assert new == {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer_config.json": "{}"}, "no tokenizer"),
        ({"tokenizer.json": '{"version": "1.0", "trunc'}, "tokenizer.json cannot be used"),
        ({"tokenizer.json": "[]"}, "tokenizer.json cannot be used"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "no"}, "tokenizer_config.json cannot be used"),
        ({"tokenizer.json": "{}"}, "the tokenizer cannot be read"),
        ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "the tokenizer cannot be read"),
    ],
)
def test_a_tokenizer_that_is_none_is_named(files: dict[str, str], problem: str, untied: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((untied / "config.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_tokenizer(tmp_path)
    assert problem in caught.value.what
    assert str(tmp_path) in caught.value.what
