"""The policy model: a Megatron-Core GPTModel built, loaded and exported through Megatron-Bridge.

Runs in every trainer rank. Weights enter and leave under their Hugging Face checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moerl.config.trainable import refuse_untrainable
from moerl.contract.batch import Microbatch
from moerl.errors import ConfigError, WeightSyncError
from moerl.trainer import families, platform
from moerl.trainer.bridge import import_bridge, quiet

_VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""Tensors whose rows are the vocabulary: padded in the trainer, not in a checkpoint."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to build the model.

    dtype: name of the parameter dtype. recompute: none, selective (attention and MoE blocks) or full.
    moe_aux_loss_coef: weight of the Switch load-balancing loss; 0 leaves it out.
    """

    dtype: str = "float32"
    recompute: str = "none"
    moe_aux_loss_coef: float = 0.0
    tensor: int = 1
    expert: int = 1


class PolicyModel:
    """A Megatron GPTModel and the bridge that loads and exports it.

    Args:
        hf_path: Hugging Face model directory (config and safetensors).
        options: see `ModelOptions`.
    """

    def __init__(self, hf_path: Path, options: ModelOptions) -> None:
        auto_bridge = import_bridge()
        self.hf_path = hf_path
        self.options = options
        with quiet():
            self._build(auto_bridge)

    def _build(self, auto_bridge: Any) -> None:
        hf_path, options = self.hf_path, self.options
        self.bridge: Any = auto_bridge.from_hf_pretrained(str(hf_path), torch_dtype=DTYPES[options.dtype])
        self._hf_config = self.bridge.hf_pretrained.config
        families.adapt(type(self.bridge._model_bridge))
        provider = self.bridge.to_megatron_provider(load_weights=False)
        for name, value in {**_settings(options), **platform.model_overrides(), **self._family_settings()}.items():
            if not hasattr(provider, name):
                raise ConfigError(
                    f"Megatron provider {type(provider).__name__} has no setting '{name}'",
                    remedy="install the megatron-core and megatron-bridge versions that `make setup` pins",
                )
            setattr(provider, name, value)
        provider.finalize()
        self.config: Any = provider
        self.module: nn.Module = provider.provide(pre_process=True, post_process=True)
        self.load(hf_path)

    def _family_settings(self) -> dict[str, Any]:
        config, options = self._hf_config.to_dict(), self.options
        refuse_untrainable(config)
        return families.provider_overrides(
            config, moe_aux_loss_coef=options.moe_aux_loss_coef, tensor=options.tensor
        )

    @property
    def vocab_size(self) -> int:
        return int(self._hf_config.vocab_size)

    def load(self, hf_path: Path) -> None:
        """Loads Hugging Face weights into this rank's shards."""
        self.bridge.load_hf_weights([self.module], hf_path=str(hf_path))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, on the CPU. A collective: every rank must iterate to the end."""
        for name, tensor in self.bridge.export_hf_weights([self.module], cpu=True, show_progress=False):
            if not torch.isfinite(tensor).all():
                raise WeightSyncError(
                    f"weight '{name}' holds values that are not finite",
                    remedy="lower optimizer.lr or resume from an earlier checkpoint",
                )
            yield name, tensor[: self.vocab_size] if name.endswith(_VOCABULARY_TENSORS) else tensor

    def forward(self, module: nn.Module, batch: Microbatch) -> Tensor:
        """Logits of one packed microbatch.

        Args:
            module: `self.module` or a wrapper of it.

        Returns:
            [T, V / tensor], this rank's vocabulary shard.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        to = platform.device()
        cu_seqlens = torch.from_numpy(batch.cu_seqlens.copy()).to(to)
        longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
        logits_1TV = module(
            input_ids=torch.from_numpy(batch.input_ids.copy()).to(to)[None],
            position_ids=torch.from_numpy(batch.position_ids.copy()).to(to)[None],
            attention_mask=None,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            padding_mask=torch.from_numpy(batch.is_pad.copy()).to(to)[None],
        )
        return logits_1TV[0]


def _settings(options: ModelOptions) -> dict[str, Any]:
    dtype = DTYPES[options.dtype]
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": options.tensor,
        "expert_model_parallel_size": options.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": options.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Every tensor-parallel rank holds equally many rows of the embedding; scores leave the padding out.
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "autocast_dtype": None,
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The loss function divides by a global count (see `moerl.trainer.trainer`).
        "calculate_per_token_loss": True,
    }
    if options.recompute == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif options.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    return settings
