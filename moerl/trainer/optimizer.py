"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule for one model. Runs in every trainer rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.config.schema import OptimizerConfig
from moerl.contract.trainer import UpdateReport
from moerl.trainer.offload import OffloadedState
from moerl.trainer.rest import DeviceMemory
from moerl.trainer.sharded_state import optimizers_of


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Places of the optimizer's state."""

    sharding: str = "off"
    """One of off; on: state and master weights are split over data-parallel ranks; overlap: also, communication
    overlaps with computation."""
    offload: float = 0.0
    """Share of the state in host memory, 0 to 1; above 0 needs sharding."""


RESIDENT = StateOptions()


class Optimizer:
    """Optimizer of a model's chunks, which it wraps for data parallelism.

    Args:
        chunks: this rank's parts of the model, in float32 or wrapped for bfloat16.
        config: their TransformerConfig; gets the hooks that Megatron's schedules call.
        options: the user's settings.
        total_steps: updates over which the learning rate decays.
        state: places of its state.

    Attributes:
        modules: the wrapped chunks.
        gradients: their memory; a step takes it back.
        megatron: Megatron's optimizer: one, or a chain of one for dense and one for expert parameters.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], config: Any, options: OptimizerConfig, total_steps: int, state: StateOptions
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self._config, self._overlaps = config, state.sharding == "overlap"
        self._skipped_in_a_row = 0
        wrap = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=state.sharding != "off",
            overlap_grad_reduce=self._overlaps,
            overlap_param_gather=self._overlaps,
        )
        # Later chunks of an interleaved pipeline have nothing to overlap with.
        self.modules: list[Any] = [
            DistributedDataParallel(config, wrap, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for module in self.modules:
            module.broadcast_params()
            fuse_gradients(module)
        self.gradients = DeviceMemory((buffer.grad_data for buffer in self._buffers()), kept=False)
        if state.offload:
            # Megatron makes all master weights on the device, before they move: they need the memory of gradients.
            self.gradients.give_back()
        adam = _adam(options, config.params_dtype, state.sharding)
        self.megatron: Any = get_megatron_optimizer(adam, self.modules)
        parts = optimizers_of(self.megatron) if state.offload else []
        self._offloaded = [OffloadedState(each, state.offload) for each in parts]
        self._scheduler: Any = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr * options.min_lr_ratio,
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
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Sets the functions that Megatron's schedules call; again before each step, because a schedule that failed
        half-way leaves some of them switched off."""
        from megatron.core.distributed import finalize_model_grads

        config, one = self._config, len(self.modules) == 1

        def of_every_chunk(name: str) -> Any:
            functions = [getattr(module, name) for module in self.modules]
            return functions[0] if one else functions

        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.megatron.scale_loss
        config.no_sync_func = of_every_chunk("no_sync")
        if self._overlaps:
            config.grad_sync_func = of_every_chunk("start_grad_sync")
            config.param_sync_func = of_every_chunk("start_param_sync")

    def zero_grad(self) -> None:
        """Clears gradients and temporary tensors for a step, including those of an earlier step that failed."""
        from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

        self.gradients.take_back()
        self._install_hooks()
        reset_model_temporary_tensors(self._config, self.modules)
        for module in self.modules:
            module.zero_grad_buffer()
        self.megatron.zero_grad()

    def _buffers(self) -> list[Any]:
        return [buffer for module in self.modules for buffer in (*module.buffers, *module.expert_parallel_buffers)]

    def update(self) -> UpdateReport:
        """Clips, updates, advances the schedule; skips all three if any rank's gradient is not finite."""
        learning_rate = float(self.megatron.param_groups[0]["lr"])
        # One value is read from the device, however many buffers there are.
        norms = torch.stack([buffer.grad_data.norm() for buffer in self._buffers()])
        is_bad = (~norms.isfinite().all()).int()
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if int(is_bad):
            self._skipped_in_a_row += 1
            return UpdateReport(0.0, learning_rate, skipped=True, skipped_in_a_row=self._skipped_in_a_row)
        with contextlib.ExitStack() as stack:
            for each in self._offloaded:
                stack.enter_context(each.updating())
            _, grad_norm, _ = self.megatron.step()
        self._scheduler.step(1)
        self._skipped_in_a_row = 0
        # Transformer Engine clips by a norm that stays on the device: it is read when all kernels are launched.
        return UpdateReport(0.0 if grad_norm is None else float(grad_norm), learning_rate)

    @property
    def host_bytes(self) -> int:
        """Bytes of its state that `StateOptions.offload` puts in host memory."""
        return sum(each.host_bytes for each in self._offloaded)

    def finish_weights(self) -> None:
        """Completes the gathering of updated weights that would otherwise run during the next forward pass."""
        if self._overlaps:
            for module in self.modules:
                module.start_param_sync(force_sync=True)

    def progress(self) -> dict[str, Any]:
        """Returns the state of the schedule and the count of skipped updates; plain data, the same on every rank."""
        return {"schedule": self._scheduler.state_dict(), "skipped_in_a_row": self._skipped_in_a_row}

    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """Returns the float32 sum of gradients of a parameter, which a pass backward may add to instead of making a
        gradient. None for a frozen parameter, and with `sharding=overlap`: Megatron waits for the gradient itself."""
        return None if self._overlaps else getattr(parameter, "main_grad", None)

    def settle(self) -> None:
        """Copies offloaded state to its place in host memory, after a load."""
        for each in self._offloaded:
            each.settle()

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Goes on from `progress`, on the schedule of this optimizer: a run that was made longer has the learning rate
        of a run of its new length. (Megatron's `load_state_dict` would keep the old length.)"""
        self._skipped_in_a_row = progress["skipped_in_a_row"]
        self._scheduler.num_steps = 0
        self._scheduler.step(progress["schedule"]["num_steps"])


def fuse_gradients(module: nn.Module) -> None:
    """Makes layers of Transformer Engine add gradients of their weights to ``main_grad`` inside of the matrix product.

    Without it each microbatch writes every such gradient once and adds it afterwards, a launch for each expert. Other
    layers, among them the embedding, keep autograd's gradients; our kernels may add that of the head
    (`Optimizer.main_grad`).

    Args:
        module: wrapped for data parallelism, which gives parameters their ``main_grad``.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _adam(options: OptimizerConfig, dtype: torch.dtype, sharding: str) -> Any:
    """Returns Megatron's settings of AdamW. dtype: of the parameters."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.lr * options.min_lr_ratio,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharding != "off",
        overlap_param_gather=sharding == "overlap",
    )
