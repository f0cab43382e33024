"""A model directory holds the tensors that its config needs, in files that are whole; anything else is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from factories import StoredTensors as Tensors
from factories import hf_config, write_hf_model, write_safetensors

from moerl.errors import ConfigError
from moerl.machine.model_files import INDEX_FILE, SINGLE_FILE, read_header, stored_tensors
from moerl.machine.model_tensors import check_weights, needed_tensors
from moerl.models.description import describe, read_config, read_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def shard(folder: Path, tensors: Tensors) -> None:
    """The same in two files with an index."""
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in names if files[name] == file})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_weights(folder)
    assert str(folder) in caught.value.what
    assert caught.value.remedy
    return str(caught.value)


# --- what is needed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe-dense", "deepseek_v3", "glm4_moe", "glm4_moe-air", "olmoe"])
def test_what_a_config_needs_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    families.write_model(tmp_path, families.FAMILIES[name], seed=1)
    config = read_config(tmp_path / "config.json")
    needed = needed_tensors(describe(config, "config.json"))
    assert {name: tensor.shape for name, tensor in stored_tensors(tmp_path).items()} == needed
    check_weights(tmp_path)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_a_tied_head_are_as_transformers_writes_them(changes: dict[str, Any], tmp_path: Path) -> None:
    families.write_model(tmp_path, families.FAMILIES["qwen3_moe"], seed=1, **changes)
    config = read_config(tmp_path / "config.json")
    needed = needed_tensors(describe(config, "config.json"))
    assert needed.keys() - stored_tensors(tmp_path).keys() == ({HEAD} if "tie_word_embeddings" in changes else set())
    check_weights(tmp_path)


@pytest.mark.parametrize(
    "extra",
    [
        {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,))},
        {"model.layers.2.eh_proj.weight": ("BF16", (2, 2)), "model.layers.2.mlp.gate.weight": ("F8_E4M3", (2, 2))},
        {f"{EXPERT}_scale_inv": ("F32", (1, 1)), EXPERT: ("F8_E4M3", (4, 8))},
    ],
    ids=["rotary frequencies", "a multi-token-prediction head", "FP8 with its scales"],
)
def test_what_is_knowingly_left_out_may_be_there(extra: Tensors, tmp_path: Path) -> None:
    tensors = write_hf_model(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)
    write_safetensors(tmp_path / SINGLE_FILE, tensors | extra)
    check_weights(tmp_path)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [EXPERT, HEAD, EMBEDDING, "model.norm.weight", "model.layers.0.mlp.gate.weight"])
def test_a_missing_tensor_is_named(missing: str, tmp_path: Path) -> None:
    tensors = write_hf_model(tmp_path)
    write_safetensors(tmp_path / SINGLE_FILE, {name: facts for name, facts in tensors.items() if name != missing})
    assert f"1 of {len(tensors)} tensors are missing, first '{missing}'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({EXPERT: ("BF16", (8, 4))}, f"'{EXPERT}' of shape [8, 4]; expected: [4, 8]"),
        ({EMBEDDING: ("BF16", (23, 8))}, "of shape [23, 8]; expected: [24, 8]"),
        ({EXPERT: ("I64", (4, 8))}, f"'{EXPERT}' in I64"),
        ({EXPERT: ("F8_E4M3", (4, 8))}, f"'{EXPERT}' in F8_E4M3, its scales: none"),
        ({EXPERT: ("F8_E4M3", (4, 8)), f"{EXPERT}_scale_inv": ("F32", (1, 2))}, "its scales: shape [1, 2]"),
        ({f"{EXPERT}_scale_inv": ("F32", (1, 1))}, f"no place for, first '{EXPERT}_scale_inv'"),
        ({"model.layers.1.self_attn.q_proj.lora_A": ("BF16", (2, 8))}, "1 tensors that config.json has no place for"),
        ({"model.layers.9.mlp.gate.weight": ("BF16", (2, 8))}, "no place for, first 'model.layers.9.mlp.gate.weight'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: Tensors, seen: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE_FILE, write_hf_model(tmp_path) | change)
    assert seen in refusal(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def make_an_lfs_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def rewrite_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(file: Path) -> None:
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = json.dumps(change(json.loads(data[8:end]))).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return rewrite


def facts_of_head(**facts: Any) -> Callable[[Path], None]:
    return rewrite_header(lambda header: header | {HEAD: header[HEAD] | facts})


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (cut, "bytes: cut"),
    (lengthen, "bytes: too long"),
    (make_an_lfs_pointer, "a pointer of Git LFS"),
    (lambda file: file.write_bytes(b""), "0 bytes"),
    (lambda file: file.write_bytes(b"\1\0"), "2 bytes"),
    (lambda file: file.write_bytes(b"\xff" * 64), "the header alone would have 18446744073709551615"),
    (lambda file: file.write_bytes((9).to_bytes(8, "little") + b"{not json"), "a header that is no JSON"),
    (lambda file: file.write_bytes((90000).to_bytes(8, "little") + b"[" * 90000), "a header that is no JSON"),
    (rewrite_header(lambda header: list(header)), "a header that is a JSON list"),
    (rewrite_header(lambda header: header | {HEAD: 7}), f"'{HEAD}' is 7"),
    (facts_of_head(dtype="Q4"), f"'{HEAD}' is "),
    (facts_of_head(dtype=["BF16"]), f"'{HEAD}' is "),
    (facts_of_head(shape=[-1, -192]), f"'{HEAD}' is "),
    (facts_of_head(shape="24"), f"'{HEAD}' is "),
    (facts_of_head(data_offsets=[0]), f"'{HEAD}' is "),
    (facts_of_head(data_offsets=[0, 9]), f"'{HEAD}' is "),
]


@pytest.mark.parametrize(("harm", "seen"), DAMAGE)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_file_is_named(harm: Callable[[Path], object], seen: str, sharded: bool, tmp_path: Path) -> None:
    tensors = write_hf_model(tmp_path)
    file = tmp_path / SINGLE_FILE
    if sharded:
        shard(tmp_path, tensors)
        check_weights(tmp_path)
        file = stored_tensors(tmp_path)[HEAD].file
    harm(file)
    assert file.name in refusal(tmp_path)
    assert seen in refusal(tmp_path)


def test_a_missing_shard_and_an_index_that_does_not_fit_are_named(tmp_path: Path) -> None:
    shard(tmp_path, write_hf_model(tmp_path))
    second = tmp_path / "model-00002-of-00002.safetensors"
    moved = second.rename(tmp_path / "elsewhere")
    assert "model-00002-of-00002.safetensors is missing, with " in refusal(tmp_path)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", second)
    assert "is not in model-00002-of-00002.safetensors" in refusal(tmp_path)
    moved.rename(second)
    check_weights(tmp_path)
    index = tmp_path / INDEX_FILE
    for content in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'):
        index.write_text(content)
        assert INDEX_FILE in refusal(tmp_path)
    index.unlink()
    assert f"{INDEX_FILE} is missing" in refusal(tmp_path)


def test_files_that_the_index_does_not_name_are_not_the_models(tmp_path: Path) -> None:
    tensors = write_hf_model(tmp_path)
    shard(tmp_path, tensors)
    write_safetensors(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": ("BF16", (2, 2))})
    check_weights(tmp_path)
    assert stored_tensors(tmp_path).keys() == tensors.keys()


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    write_hf_model(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    assert "no safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin, a pickle" in refusal(tmp_path)


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, -1, 0, 1.5, "8", [], {}, [[]], {"a": {}}, True, 10**400, "\ud800", float("nan")]
)
def test_a_config_value_of_any_kind_is_taken_or_named(value: Any, tmp_path: Path) -> None:
    for key in (*hf_config(), "quantization_config", "rope_parameters", "rope_scaling", "first_k_dense_replace"):
        (tmp_path / "config.json").write_text(json.dumps(hf_config() | {key: value}))
        with contextlib.suppress(ConfigError):
            read_model(tmp_path)


def test_a_header_is_read_without_its_metadata(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"x": ("F32", (2,))})
    rewrite_header(lambda header: {"__metadata__": {"format": "pt"}, **header})(tmp_path / "a")
    assert read_header(tmp_path / "a").keys() == {"x"}
