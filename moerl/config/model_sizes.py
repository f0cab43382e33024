"""The sizes of a model that parallel sizes, lengths and memory depend on, of a model to build or of a directory.

Pure functions; any process. Read from the plain content of a Hugging Face config by the names that Qwen3-MoE,
DeepSeek-V3, GLM-4.5 and OLMoE use; which families can be trained at all is decided in `moerl.contract.spec`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.config.trainable import refuse_untrainable
from moerl.contract.spec import MAX_SIZE, spec_from_hf_config
from moerl.errors import ConfigError

if TYPE_CHECKING:
    from moerl.config.schema import ArchitectureConfig


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): ranks of the compressed queries (0 = not compressed) and of keys and
    values, and widths per head."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the decoder is made of.

    origin: where the sizes stand: ``model.architecture``, or the path of a config.json. is_fixed: they cannot be
    changed by keys. intermediate_size: inner width of the dense layers. shared_size: inner width of all shared
    experts of a layer together, 0 = none. moe_layers: indices of the layers with experts. max_positions: tokens.
    qk_norm_size: weights of the norms of a layer's queries and keys, 0 = none. attention_biases: which projections have
    a bias. has_expert_bias: the routers keep a bias per expert, which decides the choice alone.
    """

    origin: str
    is_fixed: bool
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    latent: LatentAttention | None
    qk_norm_size: int
    attention_biases: tuple[str, ...]
    has_expert_bias: bool
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_positions: int

    @property
    def has_dense_layers(self) -> bool:
        return len(self.moe_layers) < self.num_layers

    def where(self, name: str) -> str:
        """How to name a size in a message."""
        return f"{name} of {self.origin}" if self.is_fixed else f"{self.origin}.{name}"


def architecture_sizes(architecture: ArchitectureConfig) -> ModelSizes:
    """The sizes of a model to build: a Qwen3-MoE without dense layers."""
    return ModelSizes(
        origin="model.architecture",
        is_fixed=False,
        hidden_size=architecture.hidden_size,
        num_layers=architecture.num_layers,
        moe_layers=tuple(range(architecture.num_layers)),
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        latent=None,
        qk_norm_size=2 * architecture.head_dim,
        attention_biases=(),
        has_expert_bias=False,
        intermediate_size=0,
        num_experts=architecture.num_experts,
        experts_per_token=architecture.experts_per_token,
        moe_intermediate_size=architecture.moe_intermediate_size,
        shared_size=0,
        vocab_size=architecture.vocab_size,
        tie_word_embeddings=architecture.tie_word_embeddings,
        max_positions=architecture.max_positions,
    )


def directory_sizes(folder: Path) -> ModelSizes:
    """The sizes of a Hugging Face directory, read from its config.json.

    Raises:
        ConfigError: There is no such file, it is not a model that can be trained, or a size is missing.
    """
    file = folder / "config.json"
    values = read_config(file)
    try:
        spec_from_hf_config(values)
        refuse_untrainable(values)
        return sizes_from_hf_config(values, str(file))
    except ConfigError as error:
        what = error.what if error.what.startswith("model.path") else f"model.path: {file}: {error.what}"
        raise ConfigError(what, seen=error.seen, expected=error.expected, remedy=error.remedy) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value of a type that no config of the family has.
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error


def sizes_from_hf_config(config: Mapping[str, Any], origin: str) -> ModelSizes:
    """The sizes that a Hugging Face config names.

    Args:
        config: content of a config.json, or `config.to_dict()`.
        origin: where it stands, for messages.

    Raises:
        ConfigError: A size is missing or impossible.
    """
    read = _Reader(config, origin)
    num_layers, hidden_size = read.size("num_hidden_layers"), read.size("hidden_size")
    heads = read.size("num_attention_heads")
    # OLMoE has no dense layers and calls the width of its experts just that.
    expert_size = read.size("intermediate_size" if config.get("model_type") == "olmoe" else "moe_intermediate_size")
    head_dim = config.get("head_dim") or hidden_size // heads
    moe_layers = _moe_layers(config, num_layers)
    latent = _latent(read) if config.get("kv_lora_rank") else None
    return ModelSizes(
        origin=origin,
        is_fixed=True,
        hidden_size=hidden_size,
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_attention_heads=heads,
        num_key_value_heads=read.size("num_key_value_heads"),
        head_dim=head_dim,
        latent=latent,
        qk_norm_size=_qk_norm_size(config, head_dim),
        attention_biases=_attention_biases(config, latent),
        has_expert_bias=config.get("model_type") in ("deepseek_v3", "glm4_moe"),
        intermediate_size=read.size("intermediate_size") if len(moe_layers) < num_layers else 0,
        num_experts=read.size("num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=read.size("num_experts_per_tok"),
        moe_intermediate_size=expert_size,
        shared_size=expert_size * int(config.get("n_shared_experts") or 0),
        vocab_size=read.size("vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        max_positions=read.size("max_position_embeddings"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    config: Mapping[str, Any]
    origin: str

    def size(self, *names: str, least: int = 1) -> int:
        """The value of the first name that is there, an integer of at least `least`."""
        name = next((name for name in names if name in self.config), names[0])
        value = self.config.get(name)
        most = MAX_SIZE.get(name, MAX_SIZE[""])
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"model.path: {self.origin}: {name}",
                seen=f"{value!r:.200}",
                expected=f"an integer from {least} to {most}",
                remedy="correct the model's config.json",
            )
        return value


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """First dense layers are counted by DeepSeek-V3 and GLM-4.5, listed or spaced by Qwen3-MoE."""
    first = int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(first, num_layers) if i not in dense and (i + 1) % step == 0)


def _latent(read: _Reader) -> LatentAttention:
    return LatentAttention(
        q_rank=read.size("q_lora_rank", least=0) if read.config.get("q_lora_rank") else 0,
        kv_rank=read.size("kv_lora_rank"),
        nope_dim=read.size("qk_nope_head_dim"),
        rope_dim=read.size("qk_rope_head_dim"),
        value_dim=read.size("v_head_dim"),
    )


def _qk_norm_size(config: Mapping[str, Any], head_dim: int) -> int:
    """Qwen3-MoE and some of GLM-4.5 normalise each head, OLMoE all heads at once."""
    if config.get("model_type") == "olmoe":
        return (config["num_attention_heads"] + config["num_key_value_heads"]) * head_dim
    return 2 * head_dim if config.get("use_qk_norm", config.get("model_type") == "qwen3_moe") else 0


def _attention_biases(config: Mapping[str, Any], latent: LatentAttention | None) -> tuple[str, ...]:
    """The switch means all four projections, but GLM-4.5 leaves the output without; latent attention has none in the
    released models, and its few biases are left out."""
    if not config.get("attention_bias") or latent is not None:
        return ()
    return ("qkv",) if config.get("model_type") == "glm4_moe" else ("qkv", "output")


def read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json. Raises `ConfigError` where there is none, or none that is a JSON object."""
    if not file.is_file():
        raise ConfigError(
            "model.path: not a Hugging Face model directory",
            seen=file.parent,
            expected="a directory with config.json",
            remedy="give the directory that holds config.json and the weights",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(values, dict):
        raise _unreadable(file, f"a JSON {type(values).__name__}")
    return values


def _unreadable(file: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"model.path: {file} cannot be read", seen=seen, expected="the config of a model", remedy="restore the file"
    )
