"""Tensors that a model's config needs; refuses a Hugging Face directory without them. Torch-free; any process.

Names and shapes are those of published checkpoints. A directory may hold more than is needed if nothing is lost:
multi-token-prediction heads, which are kept and not trained; rotary frequencies, which follow from the config; scales
of FP8 weights; a head that is tied to the embedding. Anything else belongs to a model that would not be computed, and
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError
from moerl.machine.model_files import StoredTensor, check_tokenizer, stored_tensors
from moerl.models.description import CONFIG_FILE, ModelDescription, describe, read_config

Shape = tuple[int, ...]

SCALES = "_scale_inv"
"""Behind the name of an FP8 weight: its scales, one per block of 128 x 128."""
FP8_BLOCK = 128
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Tensor that a checkpoint leaves out if its model ties its embeddings -> tensor that it is a copy of."""

_HEAD = "lm_head.weight"
_FLOATS = ("F32", "BF16", "F16")
_FP8 = ("F8_E4M3", "F8_E5M2")


def check_model(folder: Path) -> None:
    """Refuses a model directory that is not whole: `check_weights`, and a tokenizer."""
    check_weights(folder)
    check_tokenizer(folder)


def check_weights(folder: Path) -> None:
    """Refuses a model directory whose files do not hold the tensors that its config.json needs.

    Raises:
        ConfigError: a tensor is missing, unknown, or has another shape or dtype; a file is missing or cut.
    """
    file = folder / CONFIG_FILE
    sizes = describe(read_config(file), str(file), folder)
    config = sizes.hf_config
    stored = stored_tensors(folder)
    num_experts = len(sizes.moe_layers) * sizes.num_experts
    if num_experts > len(stored):
        raise _unfit(folder, f"{len(stored)} tensors", f"those of {num_experts} experts and more, by its config.json")
    needed = needed_tensors(sizes)
    optional = {_HEAD} if sizes.tie_word_embeddings else set()
    missing = sorted(needed.keys() - stored.keys() - optional)
    if missing:
        raise _unfit(
            folder,
            f"{len(missing)} of {len(needed.keys() - optional)} tensors are missing, first {missing[0]!r}",
            "every tensor of the model that config.json describes",
        )
    unknown = sorted(name for name in stored if not _is_known(name, stored, needed, config))
    if unknown:
        raise _unfit(
            folder,
            f"{len(unknown)} tensors that config.json has no place for, first {unknown[0]!r}",
            "the plain model that config.json describes, without adapters or other additions",
        )
    for name, shape in needed.items():
        if name in stored:
            _check_tensor(folder, name, shape, stored)


def needed_tensors(sizes: ModelDescription) -> dict[str, Shape]:
    """Returns the names and shapes of the tensors of a model."""
    hidden, vocab = sizes.hidden_size, sizes.vocab_size
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        _HEAD: (vocab, hidden),
    }
    for layer in range(sizes.num_layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = (hidden,)
        tensors[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        attention = _latent_attention(sizes) if sizes.latent else _attention(sizes)
        tensors |= {f"{at}.self_attn.{name}": shape for name, shape in attention}
        mlp = _experts(sizes) if layer in sizes.moe_layers else _gated("", sizes.intermediate_size, hidden)
        tensors |= {f"{at}.mlp.{name}": shape for name, shape in mlp}
    return tensors


def is_bypassed(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint tensor is of multi-token-prediction heads: layers behind the last decoder layer."""
    layer = re.match(r"^model\.layers\.(\d+)\.", name)
    first = config["num_hidden_layers"]
    return layer is not None and first <= int(layer[1]) < first + int(config.get("num_nextn_predict_layers") or 0)


def checkpoint_shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of the tensors that an export writes for the model of a directory, by name.

    Args:
        config: content of its Hugging Face config.
    """
    return {
        name: tensor.shape
        for name, tensor in stored_tensors(folder).items()
        if not is_bypassed(name, config) and not name.endswith(SCALES)
    }


def _attention(sizes: ModelDescription) -> Iterator[tuple[str, Shape]]:
    queries = sizes.num_attention_heads * sizes.head_dim
    keys = sizes.num_key_value_heads * sizes.head_dim
    for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.weight", (width, sizes.hidden_size)
        if "qkv" in sizes.attention_biases:
            yield f"{name}.bias", (width,)
    yield "o_proj.weight", (sizes.hidden_size, queries)
    if "output" in sizes.attention_biases:
        yield "o_proj.bias", (sizes.hidden_size,)
    for name, size in zip("qk", sizes.qk_norm_sizes, strict=True):
        if size:
            yield f"{name}_norm.weight", (size,)


def _latent_attention(sizes: ModelDescription) -> Iterator[tuple[str, Shape]]:
    latent, hidden, heads = sizes.latent, sizes.hidden_size, sizes.num_attention_heads
    assert latent is not None
    queries = heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield "q_a_proj.weight", (latent.q_rank, hidden)
        yield "q_a_layernorm.weight", (latent.q_rank,)
        yield "q_b_proj.weight", (queries, latent.q_rank)
    else:
        yield "q_proj.weight", (queries, hidden)
    yield "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_dim, hidden)
    yield "kv_a_layernorm.weight", (latent.kv_rank,)
    yield "kv_b_proj.weight", (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield "o_proj.weight", (hidden, heads * latent.value_dim)


def _experts(sizes: ModelDescription) -> Iterator[tuple[str, Shape]]:
    yield "gate.weight", (sizes.num_experts, sizes.hidden_size)
    if sizes.family.has_expert_bias:
        yield "gate.e_score_correction_bias", (sizes.num_experts,)
    for expert in range(sizes.num_experts):
        yield from _gated(f"experts.{expert}.", sizes.moe_intermediate_size, sizes.hidden_size)
    if sizes.shared_size:
        yield from _gated("shared_experts.", sizes.shared_size, sizes.hidden_size)


def _gated(at: str, inner: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}gate_proj.weight", (inner, hidden)
    yield f"{at}up_proj.weight", (inner, hidden)
    yield f"{at}down_proj.weight", (hidden, inner)


def _is_known(
    name: str, stored: Mapping[str, StoredTensor], needed: Mapping[str, Shape], config: Mapping[str, Any]
) -> bool:
    if name in needed or is_bypassed(name, config) or name.endswith("rotary_emb.inv_freq"):
        return True
    weight = name.removesuffix(SCALES)
    return weight in needed and weight in stored and stored[weight].dtype in _FP8


def _check_tensor(folder: Path, name: str, shape: Shape, stored: Mapping[str, StoredTensor]) -> None:
    tensor = stored[name]
    if tensor.shape != shape:
        raise _unfit(folder, f"{name!r} of shape {list(tensor.shape)}", f"{list(shape)}, by its config.json")
    if tensor.dtype in _FLOATS:
        return
    if tensor.dtype not in _FP8:
        raise _unfit(folder, f"{name!r} in {tensor.dtype}", f"{', '.join(_FLOATS)}, or FP8 with scales")
    blocks = [-(-size // FP8_BLOCK) for size in shape]
    scales = stored.get(f"{name}{SCALES}")
    if scales is None or list(scales.shape) != blocks:
        seen = "none" if scales is None else f"shape {list(scales.shape)}"
        raise _unfit(folder, f"{name!r} in {tensor.dtype}, its scales: {seen}", f"{name}{SCALES} of shape {blocks}")


def _unfit(folder: Path, seen: str, expected: str) -> ConfigError:
    return ConfigError(
        f"model.path: {folder}: weights and config.json do not fit",
        seen=seen,
        expected=expected,
        remedy="copy or download the whole directory again; all its files must be of one model",
    )
