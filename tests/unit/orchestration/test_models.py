"""Model directories: written from an export, and refused where the tokenizer is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from disks import full_disk, power_may_go
from safetensors.torch import load_file, save_file

from moerl.config.load import load_config
from moerl.contract.sealed import find_damage
from moerl.errors import ConfigError, MoerlError
from moerl.orchestration.models import build_model, read_tokenizer
from moerl.orchestration.tokenizer import make_tokenizer
from moerl.trainer.hf_directory import checkpoint_shapes, new_directory, write_model


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


def a_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    save_file({"model.layers.0.mlp.gate.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    return folder


def test_a_model_has_its_name_only_once_all_of_it_is_on_the_disk(tmp_path: Path) -> None:
    like, folder = a_model(tmp_path / "like"), tmp_path / "written"
    with power_may_go() as disk:
        for _ in range(2):
            write_model(folder, like, iter([("model.layers.0.mlp.gate.weight", torch.ones(2, 2))]))
    assert [path for path in disk.renamed if path.parent == tmp_path] == [folder, folder]
    assert disk.lost() == []


def test_a_model_that_a_full_disk_refuses_is_named_and_its_parts_are_gone(tmp_path: Path) -> None:
    like, folder = a_model(tmp_path / "like"), tmp_path / "written"
    with full_disk(4096), pytest.raises(MoerlError, match=f"cannot write {folder}; seen: .*File too large"):
        write_model(folder, like, iter([("model.layers.0.mlp.gate.weight", torch.ones(64, 64))]))
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


def test_whatever_of_a_built_model_a_full_disk_refuses_the_model_is_named(tmp_path: Path) -> None:
    """Settings, weights and tokenizer are written by libraries that each have their own words for it."""
    folder, config = tmp_path / "built", load_config(["recipe=tiny"], command="train")
    architecture = config.model.architecture
    assert architecture is not None
    tokenizer = make_tokenizer(config.task.open(), architecture.vocab_size)
    said = f"cannot write {folder}; seen: .*File too large"
    for room in (0, 3000):
        with full_disk(room), pytest.raises(MoerlError, match=said):
            build_model(architecture, tokenizer, 0, folder)
    with full_disk(3000), pytest.raises(MoerlError, match=said), new_directory(folder) as partial:
        tokenizer.save_pretrained(partial)
    assert list(tmp_path.iterdir()) == []


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
