"""The description of one model: made once from its config and the record of its family, and passed on.

Torch-free; any process. Everything that depends on a model reads it here: parallel sizes, lengths, memory, tensors,
packing costs, handshakes, the trainer's settings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError
from moerl.models.family import Config, Family, QKNorm, Rule, is_rule
from moerl.models.spec import family_of, read_size, spec_from_hf_config
from moerl.reading import find_irregular, read_json

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): sizes of its projections."""

    q_rank: int
    """Rank of the compressed queries; 0 = not compressed."""
    kv_rank: int
    """Rank of the compressed keys and values."""
    nope_dim: int
    """Width per head of queries and keys without rotation."""
    rope_dim: int
    """Width per head of queries and keys with rotation."""
    value_dim: int
    """Width per head of values."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """One model: its sizes, and the config and the record of the family that they come from."""

    origin: str
    """Place of its config, for messages: ``model.architecture``, or the path of a config.json."""
    folder: Path | None
    """Hugging Face directory; None for a model to build, whose sizes can be changed by keys."""
    family: Family = field(repr=False)
    """Record that the description was made from."""
    spec: ModelSpec
    """Facts that trainer and engines compare; its vocabulary is that of the ids that can be sampled."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Decoder layers, dense ones included."""
    moe_layers: tuple[int, ...]
    """Indices of the decoder layers with experts."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Heads of keys and of values."""
    head_dim: int
    """Width of a head, unless `latent` is set."""
    latent: LatentAttention | None
    """None for a model without latent attention."""
    qk_norm: QKNorm
    """Norms of queries and keys, as in `Family`."""
    attention_biases: tuple[str, ...]
    """Projections with a bias, as in `Family`."""
    intermediate_size: int
    """Inner width of the dense layers; 0 = there are none."""
    num_experts: int
    """Experts of an MoE layer, shared ones not counted."""
    experts_per_token: int
    """Experts that the router chooses for a token."""
    moe_intermediate_size: int
    """Inner width of an expert."""
    shared_size: int
    """Inner width of all shared experts of a layer together; 0 = none."""
    vocab_size: int
    """Rows of the embedding in a checkpoint."""
    tie_word_embeddings: bool
    """True if the head uses the embedding's weights."""
    max_positions: int
    """Longest sequence, in tokens."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Content of the config."""

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Weights of the norm of a layer's queries and of that of its keys; 0 without a norm."""
        heads = {"none": (0, 0), "head": (1, 1), "all_heads": (self.num_attention_heads, self.num_key_value_heads)}
        queries, keys = heads[self.qk_norm]
        return queries * self.head_dim, keys * self.head_dim

    def where(self, name: str) -> str:
        """Returns the name of a size for messages."""
        return f"{self.origin}.{name}" if self.folder is None else f"{name} of {self.origin}"

    def with_vocabulary(self, num_ids: int) -> ModelDescription:
        """Returns the description with a tokenizer of `num_ids` ids: ids that the tokenizer lacks are never sampled."""
        return replace(self, spec=replace(self.spec, vocab_size=min(num_ids, self.vocab_size)))


def read_model(folder: Path) -> ModelDescription:
    """Returns the model of a Hugging Face directory, from its config.json.

    Raises:
        ConfigError: There is no such file, it is not a model that can be trained, or a size is missing.
    """
    file = folder / CONFIG_FILE
    values = read_config(file)
    try:
        model = describe(values, str(file), folder)
        refuse_untrainable(values)
        return model
    except ConfigError as error:
        what = error.what if error.what.startswith("model.path") else f"model.path: {file}: {error.what}"
        raise ConfigError(what, seen=error.seen, expected=error.expected, remedy=error.remedy) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value of a type that no config of the family has.
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error


def refuse_untrainable(config: Config) -> None:
    """Refuses a config of which Megatron and Hugging Face would compute two different models.

    Args:
        config: content of a Hugging Face config.

    Raises:
        ConfigError: the family is unknown, or a setting cannot be trained; names the setting and the reason.
    """
    for rule in (*_EVERY_FAMILY, *family_of(config).rules):
        if not rule.allowed(config):
            raise ConfigError(
                f"model config ({config['model_type']}): {', '.join(rule.keys)}: {rule.reason}",
                seen={key: config.get(key) for key in rule.keys},
                expected=rule.expected,
                remedy="use another model; this one can be sampled from, not trained",
            )


def describe(config: Mapping[str, Any], origin: str, folder: Path | None = None) -> ModelDescription:
    """Returns the description of the model that a Hugging Face config names.

    Args:
        config: content of a config.json, or `config.to_dict()`.
        origin, folder: as in `ModelDescription`.

    Raises:
        ConfigError: the family is unknown, or a size is missing or impossible.
    """
    # The sizes of the family are checked there.
    family, spec = family_of(config), spec_from_hf_config(config)
    size = functools.partial(
        read_size, config, origin=f"model.path: {origin}", remedy="correct the model's config.json"
    )
    num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    heads, expert_size = config["num_attention_heads"], config[family.expert_size]
    moe_layers, latent = family.moe_layers(config), None
    if config.get("kv_lora_rank"):
        latent = LatentAttention(
            q_rank=size("q_lora_rank", 0) if config.get("q_lora_rank") else 0,
            kv_rank=size("kv_lora_rank"),
            nope_dim=size("qk_nope_head_dim"),
            rope_dim=size("qk_rope_head_dim"),
            value_dim=size("v_head_dim"),
        )
    return ModelDescription(
        origin=origin,
        folder=folder,
        family=family,
        spec=spec,
        hidden_size=hidden_size,
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or hidden_size // heads,
        latent=latent,
        qk_norm=family.qk_norm(config),
        attention_biases=family.attention_biases(config),
        intermediate_size=config["intermediate_size"] if len(moe_layers) < num_layers else 0,
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        moe_intermediate_size=expert_size,
        shared_size=expert_size * int(config.get("n_shared_experts") or 0),
        vocab_size=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        max_positions=size("max_position_embeddings"),
        hf_config=config,
    )


def read_config(file: Path) -> dict[str, Any]:
    """Returns the content of a config.json. Raises `ConfigError` if there is none, or none that is a JSON object."""
    if not file.is_file():
        raise ConfigError(
            "model.path: not a Hugging Face model directory",
            seen=file.parent,
            expected="a directory with config.json",
            remedy="give the directory that holds config.json and the weights; of a run: RUN_DIR/final_model, or what"
            " `moerl export RUN_DIR --output DIR` writes of a checkpoint",
        )
    try:
        values, irregular = read_json(file), find_irregular(file.parent)
    except (OSError, ValueError) as error:
        raise _unreadable(file, str(error)) from error
    if irregular:
        raise ConfigError(
            "model.path: holds something else than files",
            seen=irregular,
            expected="files and folders: libraries wait for all else",
            remedy="remove it, or copy the model's files into a directory of their own",
        )
    if not isinstance(values, dict):
        raise _unreadable(file, f"a JSON {type(values).__name__}")
    return values


def _unreadable(file: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"model.path: {file} cannot be read", seen=seen, expected="the config of a model", remedy="restore the file"
    )


def _is_block_fp8(config: Config) -> bool:
    quantised = config.get("quantization_config")
    if quantised is None:
        return True
    return quantised.get("quant_method") == "fp8" and list(quantised.get("weight_block_size") or ()) == [128, 128]


_EVERY_FAMILY = (
    is_rule("hidden_act", "silu", "the bridge builds gated SiLU layers only"),
    Rule(
        ("quantization_config",),
        _is_block_fp8,
        "none, or quant_method fp8 with weight_block_size [128, 128]",
        "weights are dequantised on load, in this format alone",
    ),
)
