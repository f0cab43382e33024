"""The policy model: a Megatron-Core GPTModel built, loaded and exported through Megatron-Bridge.

Runs in every trainer rank. Weights enter and leave under their Hugging Face checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims, RankCoordinates, stage_layers
from moerl.errors import ConfigError, WeightSyncError
from moerl.models.description import ModelDescription, refuse_untrainable
from moerl.trainer import attention, balance, platform, tensors, transfers
from moerl.trainer.bridge import import_bridge, quiet
from moerl.trainer.provider import finalize, passed_on, provider_settings

_VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""Tensors whose rows are the vocabulary: padded in the trainer, not in a checkpoint."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of building the model."""

    dtype: str = "float32"
    """Name of the parameter dtype: a key of `DTYPES`."""
    recompute: str = "none"
    """One of none, selective (attention and MoE blocks) or full."""
    moe_aux_loss_coef: float = 0.0
    """Weight of the Switch load-balancing loss; 0 leaves it out."""
    expert_bias: str = "frozen"
    """One of frozen, or update: a step towards equal load after every applied update."""
    train_router: bool = True
    """False freezes the routers' weights."""
    deterministic: bool = False
    """True for deterministic kernels only."""
    megatron: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the provider that are passed on as they are, by name."""


class PolicyModel:
    """This rank's chunks of a Megatron GPTModel, and the bridge that loads and exports it.

    Args:
        model: of a Hugging Face directory (config and safetensors).
        options: see `ModelOptions`.
        layout: this rank's coordinates.

    Attributes:
        chunks: the rank's parts of the model, first to last: one, or one per virtual pipeline stage.
        config: their common TransformerConfig.

    Raises:
        CheckpointError: the checkpoint lacks a parameter, or holds a tensor that would be lost.
    """

    def __init__(self, model: ModelDescription, options: ModelOptions, layout: RankCoordinates) -> None:
        assert model.folder is not None
        self.description, self.layout = model, layout
        self._build(import_bridge(), model.folder, options)

    @quiet()
    def _build(self, auto_bridge: Any, hf_path: Path, options: ModelOptions) -> None:
        if options.deterministic:
            platform.use_deterministic_kernels()
        self.bridge: Any = auto_bridge.from_hf_pretrained(str(hf_path), torch_dtype=DTYPES[options.dtype])
        tensors.adapt(type(self.bridge._model_bridge))
        provider = self.bridge.to_megatron_provider(load_weights=False)
        settings = {
            **_settings(options),
            **_parallel_settings(self.layout.dims, provider.num_layers),
            **platform.model_overrides(self.layout.dims),
        }
        refuse_untrainable(self.description.hf_config)
        settings |= provider_settings(
            self.description, moe_aux_loss_coef=options.moe_aux_loss_coef, tensor=self.layout.dims.tensor
        )
        settings |= passed_on(options.megatron, settings, provider)
        for name, value in settings.items():
            if not hasattr(provider, name):
                raise ConfigError(
                    f"Megatron provider {type(provider).__name__} has no setting '{name}'",
                    remedy="install the megatron-core and megatron-bridge versions that `make setup` pins",
                )
            setattr(provider, name, value)
        finalize(provider, options.megatron)
        self.config: Any = provider
        self.chunks: list[nn.Module] = [self._chunk(stage) for stage in range(self.layout.dims.virtual_pipeline)]
        balance.install(self.chunks)
        _end_before_head(self.chunks[-1])
        self.bridge.load_hf_weights(self.chunks, hf_path=str(hf_path))
        tensors.refuse_unknown(hf_path, self.description.hf_config, self.bridge._model_bridge)
        if not options.train_router:
            for router in balance.routers_of(self.chunks):
                router.requires_grad_(False)

    def _chunk(self, virtual_stage: int) -> nn.Module:
        layout = self.layout
        last = layout.dims.virtual_pipeline - 1
        chunk: nn.Module = self.config.provide(
            pre_process=layout.pipeline_rank == 0 and virtual_stage == 0,
            post_process=layout.is_last_stage and virtual_stage == last,
            vp_stage=virtual_stage if layout.dims.virtual_pipeline > 1 else None,
        )
        # Megatron makes the weights of routers, for one, on the host and expects its caller to move the model.
        return chunk.to(platform.device())

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors under Hugging Face names, on the CPU. A collective: every rank must iterate to the
        end."""
        for name, tensor in self.bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False):
            if not torch.isfinite(tensor).all():
                raise WeightSyncError(
                    f"weight '{name}' holds values that are not finite",
                    remedy="lower optimizer.lr or resume from an earlier checkpoint",
                )
            yield name, tensor[: self.description.vocab_size] if name.endswith(_VOCABULARY_TENSORS) else tensor

    def forward(self, module: nn.Module, batch: Microbatch) -> Tensor:
        """Runs one packed microbatch through one chunk of the model.

        Args:
            module: one of `chunks` or a wrapper of it.
            batch: this rank's share of the microbatch.

        Returns:
            From the last chunk of the model the inputs of its head, [1, t / tensor, H] in the dtype of the parameters;
            from any other the hidden states for the next one.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        cu_seqlens = transfers.to_device(batch.cu_seqlens)
        longest = int((np.diff(batch.cu_seqlens) + batch.rows_before).max())
        if not cu_seqlens.is_cuda:
            attention.describe(cu_seqlens, batch, size=self.layout.dims.context, rank=self.layout.context_rank)
        elif batch.prefix_of is not None:
            # The attention of Transformer Engine knows no shared rows.
            raise ConfigError(
                "prompts cannot be shared on a GPU",
                seen="trainer.share_prompts=true",
                expected="false, if Transformer Engine computes attention",
                remedy="set trainer.share_prompts=false",
            )
        is_pad_t = transfers.to_device(batch.is_pad)
        if not bare(module).pre_process:
            # Megatron slices it for sequence parallelism in the stage with the embedding alone.
            is_pad_t = is_pad_t.chunk(self.layout.dims.tensor)[self.layout.tensor_rank]
        return module(
            input_ids=transfers.to_device(batch.input_ids)[None],
            position_ids=transfers.to_device(batch.position_ids)[None],
            attention_mask=None,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            padding_mask=is_pad_t[None],
            # Megatron's wrapper for bfloat16 would widen what the last chunk returns.
            **({"fp32_output": False} if self.config.bf16 else {}),
        )

    def head_weight(self) -> Tensor:
        """Returns this rank's rows of the language-model head, [V / tensor, H]; on the last pipeline stage."""
        last: Any = self.chunks[-1]
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        return last.output_layer.weight


def bare(module: nn.Module) -> Any:
    """Returns the GPTModel inside of Megatron's wrappers (precision, data parallelism)."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def _end_before_head(last: nn.Module) -> None:
    """Makes the head return its input: losses read the rows of its matrix that they need.

    The module stays, so that hooks that Megatron adds to it (gathering of sharded weights) still run.
    """
    output_layer: Any = getattr(last, "output_layer", None)
    if output_layer is None:
        return
    if output_layer.bias is not None:
        raise ConfigError(
            "the model's language-model head has a bias",
            seen=f"bias {tuple(output_layer.bias.shape)}",
            expected="a head of one matrix",
            remedy="use another model; this one can be sampled from, not trained",
        )
    output_layer.forward = lambda hidden, *_, **__: (hidden, None)


def _parallel_settings(dims: ParallelDims, num_layers: int) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": dims.tensor,
        "pipeline_model_parallel_size": dims.pipeline,
        "virtual_pipeline_model_parallel_size": dims.virtual_pipeline if dims.virtual_pipeline > 1 else None,
        "pipeline_model_parallel_layout": _uneven_stages(dims, num_layers),
        "context_parallel_size": dims.context,
        "expert_model_parallel_size": dims.expert,
        "expert_tensor_parallel_size": dims.expert_tensor,
        "sequence_parallel": dims.tensor > 1,
        # Packed microbatches differ in length, so stages send one another the shapes first.
        "variable_seq_lengths": dims.pipeline > 1,
        # Batched operations do not tell the two directions of an interleaved two-stage pipeline apart.
        "batch_p2p_comm": dims.virtual_pipeline == 1,
    }


def _uneven_stages(dims: ParallelDims, num_layers: int) -> list[list[str]] | None:
    """Returns Megatron's list of the layers of every stage; None if the layers divide evenly: Megatron then divides
    them itself."""
    if num_layers % dims.pipeline == 0:
        return None
    stages = [["decoder"] * count for count in stage_layers(num_layers, dims.pipeline, dims.virtual_pipeline)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _settings(options: ModelOptions) -> dict[str, Any]:
    dtype = DTYPES[options.dtype]
    settings: dict[str, Any] = {
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
        "deterministic_mode": options.deterministic,
    }
    if options.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    return settings
