"""Model directories: written from an export, built with a tokenizer, and refused if the tokenizer is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from chat_models import CHATML_THINKING
from disks import full_disk, power_may_go
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from moerl.config.load import load_config
from moerl.config.schema import ModelConfig
from moerl.contract.ports import Task
from moerl.contract.sealed import find_damage
from moerl.contract.tokenizer import num_ids
from moerl.errors import ConfigError, MoerlError
from moerl.machine.model_tensors import checkpoint_shapes
from moerl.models.description import read_model
from moerl.orchestration.ends import read_ends
from moerl.rollout.tokenizers import make_tokenizer, new_tokenizer, read_tokenizer
from moerl.trainer.hf_directory import new_directory, write_model
from moerl.trainer.new_model import build_model


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


@pytest.fixture
def task() -> Iterator[Task]:
    with closing(load_config(["recipe=tiny"], command="train").task.open()) as task:
        yield task


def own_tokenizer(folder: Path, *, end: str | None = "<|done|>") -> Path:
    """Writes a tokenizer of 14 entries whose ids have gaps: digits and signs, then special tokens from id 40 on."""
    words = {sign: number for number, sign in enumerate("0123456789+=")}
    tokenizer = Tokenizer(models.BPE(vocab={**words, "<|done|>": 40, "<|begin|>": 42}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|done|>", "<|begin|>")])
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token=end)
    own.chat_template = CHATML_THINKING
    own.save_pretrained(folder)
    return folder


def model_with(tokenizer: Path, vocab_size: int = 512) -> ModelConfig:
    size = f"model.architecture.vocab_size={vocab_size}"
    return load_config(["recipe=tiny", f"model.tokenizer='{tokenizer}'", size], command="train").model


def test_a_built_model_has_the_ids_and_the_chat_template_of_the_tokenizer_that_is_given(
    task: Task, tmp_path: Path
) -> None:
    model = model_with(own_tokenizer(tmp_path / "own"))
    assert model.architecture is not None
    tokenizer = new_tokenizer(model, task)
    # Its entries are fewer than its largest id says.
    assert (len(tokenizer), num_ids(tokenizer)) == (14, 43)
    build_model(model.architecture, tokenizer, 0, tmp_path / "built")
    config = json.loads((tmp_path / "built" / "config.json").read_text())
    assert {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {"bos": 42, "eos": 40, "pad": None}
    assert config["vocab_size"] == 48
    again = read_tokenizer(tmp_path / "built")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == CHATML_THINKING
    assert read_ends(tmp_path / "built", again, num_ids(again)) == (40,)
    assert read_model(tmp_path / "built").with_vocabulary(num_ids(again)).spec.vocab_size == 43
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "built")
    assert loaded(torch.tensor([[42, 0, 40]])).logits.shape == (1, 3, 48)


@pytest.mark.parametrize(
    ("vocab_size", "end", "what"),
    [
        (42, "<|done|>", "model.tokenizer: more ids than the model may have"),
        (43, None, "model.tokenizer: it names no token that ends a response"),
    ],
)
def test_a_tokenizer_that_a_built_model_cannot_take_is_refused(
    vocab_size: int, end: str | None, what: str, task: Task, tmp_path: Path
) -> None:
    model = model_with(own_tokenizer(tmp_path / "own", end=end), vocab_size)
    with pytest.raises(ConfigError) as caught:
        new_tokenizer(model, task)
    assert caught.value.what.startswith(what)
    if end is not None:
        assert "model.architecture.vocab_size=43" in caught.value.remedy


def test_the_key_of_a_tokenizer_that_cannot_be_read_is_named(task: Task, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model\.tokenizer: .*the tokenizer cannot be read"):
        new_tokenizer(model_with(tmp_path), task)
