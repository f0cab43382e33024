"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule for one model. Runs in every trainer rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moerl.config.schema import OptimizerConfig
from moerl.errors import MoerlError
from moerl.trainer import platform


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update did. grad_norm: before clipping. learning_rate: the one that was used."""

    grad_norm: float
    learning_rate: float


class Optimizer:
    """Wraps `module` for data parallelism and updates it.

    Args:
        module: the model, in float32 or wrapped for bfloat16.
        config: its TransformerConfig; gets the hooks that Megatron's schedules call.
        options: the user's settings.
        total_steps: updates over which the learning rate decays.
    """

    def __init__(self, module: nn.Module, config: Any, options: OptimizerConfig, total_steps: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.module: Any = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
            module,
        )
        self.module.broadcast_params()
        min_lr = options.lr * options.min_lr_ratio
        self._optimizer: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=min_lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.beta1,
                adam_beta2=options.beta2,
                adam_eps=options.eps,
                clip_grad=options.clip_grad,
                bf16=config.params_dtype == torch.bfloat16,
                params_dtype=config.params_dtype,
            ),
            [self.module],
        )
        self._scheduler: Any = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=min_lr,
            lr_warmup_steps=options.warmup_steps,
            lr_decay_steps=max(total_steps, options.warmup_steps + 1),
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        # The scheduler's step 0 has learning rate 0 under warm-up: the first update uses step 1.
        self._scheduler.step(1)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.no_sync_func = self.module.no_sync

    def zero_grad(self) -> None:
        self.module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def update(self) -> UpdateReport:
        """Clips, updates, advances the schedule.

        Raises:
            MoerlError: on every rank, where any rank's gradient is not finite; weights are unchanged.
        """
        self._refuse_bad_gradients()
        learning_rate = self.learning_rate
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(1)
        return UpdateReport(float(grad_norm or 0.0), learning_rate)

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _refuse_bad_gradients(self) -> None:
        buffers = [*self.module.buffers, *self.module.expert_parallel_buffers]
        bad = torch.tensor(
            [int(not all(bool(torch.isfinite(buffer.grad_data.norm())) for buffer in buffers))],
            device=platform.device(),
        )
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if int(bad):
            raise MoerlError(
                "the gradient is not finite",
                seen="NaN or infinity in the gradient buffers",
                expected="finite gradients",
                remedy="the weights are unchanged; resume with a lower optimizer.lr or inspect the dumped rollouts",
            )

    @property
    def megatron(self) -> Any:
        """Megatron's optimizer: one, or a chain of one for dense and one for expert parameters."""
        return self._optimizer

    def schedule_state(self) -> dict[str, Any]:
        """Where the learning-rate schedule stands; plain data."""
        return self._scheduler.state_dict()

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Goes on where `schedule_state` was taken."""
        # Megatron's scheduler adds the loaded steps to its own.
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state)
