"""A plain training step to compare ours with: cross-entropy, no replay, no masks, no proof.

The model is that of megatron-bridge's provider with the settings that the bridge ships, wrapped for data parallelism,
with Megatron-Core's schedule and optimizer. Megatron-Bridge's own `train_step` needs the state of its whole training
loop (data sets, checkpoints, timers); of what it calls, the schedule and the optimizer are the same. Three settings
differ: dropout is off, sequences are packed, and gradients are fused layer by layer as ours are
(`moerl.trainer.optimizer.fuse_gradients`), since Megatron's head is not built with gradient fusion without Apex.
Runs in trainer ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims
from moerl.trainer import platform
from moerl.trainer.bridge import import_bridge, quiet
from moerl.trainer.optimizer import fuse_gradients


class PlainTrainer:
    """The model of a Hugging Face directory in bfloat16, and its optimizer, on one rank.

    Args:
        path: Hugging Face directory.
        options: learning rate, moments and clipping, as ours.
    """

    def __init__(self, path: Path, options: OptimizerConfig) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        with quiet():
            config, model = _provided(path)
        wrap = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._model: Any = DistributedDataParallel(config, wrap, Float16Module(config, model))
        fuse_gradients(self._model)
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        self._optimizer: Any = get_megatron_optimizer(settings, [self._model])
        self._install_hooks(config)

    def _install_hooks(self, config: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.no_sync_func = self._model.no_sync

    def make_step(self, batches: Sequence[Microbatch]) -> Callable[[], list[float]]:
        """One optimizer step over the microbatches; returns the mean loss, in nats, of each."""

        def step() -> list[float]:
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            losses = self._forward_backward(batches)
            self._optimizer.step()
            return [float(loss) for loss in losses]

        return step

    def _forward_backward(self, batches: Sequence[Microbatch]) -> list[Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(microbatches: Iterator[Microbatch], module: Any) -> tuple[Tensor, Any]:
            batch = next(microbatches)
            losses_1T = module(**_inputs(batch))
            counts_T = torch.from_numpy(batch.loss_mask).to(losses_1T.device, losses_1T.dtype)

            def mean(found_1T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                loss = (found_1T[0] * counts_T).sum() / counts_T.sum().clamp(min=1)
                return loss, {"loss": loss.detach()}

            return losses_1T, mean

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            seq_length=max(batch.num_rows for batch in batches),
            micro_batch_size=1,
            forward_only=False,
        )
        return [each["loss"] for each in found]


def _provided(path: Path) -> tuple[Any, nn.Module]:
    """The bridge's provider of a model, which is its config too, and the model with its weights."""
    bridge = import_bridge().from_hf_pretrained(str(path), torch_dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "autocast_dtype": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **platform.model_overrides(ParallelDims()),
    }
    if not torch.cuda.is_available():
        settings["transformer_layer_spec"] = platform.layer_spec
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    model = provider.provide(pre_process=True, post_process=True).to(platform.device())
    bridge.load_hf_weights([model], hf_path=str(path))
    return provider, model


def _inputs(batch: Microbatch) -> dict[str, Any]:
    """A packed microbatch without padding, for Megatron's GPTModel; it returns the loss of each row, [1, T]."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from moerl.trainer import attention

    to = platform.device()
    cu_seqlens = torch.from_numpy(batch.cu_seqlens.copy()).to(to)
    if to.type == "cpu":
        attention.describe(cu_seqlens, batch, size=1, rank=0)
    longest = int(np.diff(batch.cu_seqlens).max())
    input_ids, labels, position_ids = (
        torch.from_numpy(array.copy()).to(to)[None] for array in (batch.input_ids, batch.target_ids, batch.position_ids)
    )
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    }
