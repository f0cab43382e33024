"""The trainer: one Megatron model, its optimizer, Keep Routing, and the schedule that runs them.

Runs in every trainer rank; every method is called by all ranks together. Shape legend: T = packed rows of a
microbatch, V = vocabulary (this rank's shard of it), L = MoE layers, E = experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import Microbatch
from moerl.contract.trajectory import ModelSpec
from moerl.kernels.vocab_parallel import VocabShard
from moerl.trainer import layout, platform, sharded_state
from moerl.trainer.layout import Layout
from moerl.trainer.model import ModelOptions, PolicyModel
from moerl.trainer.optimizer import Optimizer, UpdateReport
from moerl.trainer.replay import KeepRouting
from moerl.trainer.sharded_state import StagedState


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """Detached per-row results of one microbatch, on the CPU.

    logprobs_T: float32, nats; the trainer's log-prob of each target under the distribution it was drawn from.
    entropy_T: float32, nats. clipped_T: bool or None. full_logprobs_T: float32 over the whole vocabulary, or None.
    losses_T: float32 or None.
    layers_differing_T: int32; MoE layers whose natural choice differs from the recorded one (0 without routing).
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    clipped_T: Tensor | None = None
    full_logprobs_T: Tensor | None = None
    losses_T: Tensor | None = None
    layers_differing_T: Tensor | None = None


class LossFunction(Protocol):
    """Turns the logits of one microbatch into its share of the batch's loss and its per-row results.

    The loss of a step is the sum over microbatches and data-parallel ranks, so denominators are global.
    """

    def __call__(self, logits_TV: Tensor, microbatch: int) -> tuple[Tensor, RowScores]: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step of this rank.

    rows: per microbatch. update: None after a forward-only pass. rows_verified: routing rows proved.
    expert_load_LE: int64, tokens per expert on this rank.
    """

    rows: list[RowScores]
    update: UpdateReport | None
    rows_verified: int
    expert_load_LE: Tensor


class MegatronTrainer:
    """Trains and scores one policy.

    Args:
        hf_path: Hugging Face directory whose weights the policy starts from.
        spec: the model facts, as in the engine's handshake.
        where: this rank's place.
        options: how to build the model.
        optimizer: optimizer settings; None for a model that is only read (a reference).
        total_steps: updates of the learning-rate schedule.
    """

    def __init__(
        self,
        hf_path: Path,
        spec: ModelSpec,
        where: Layout,
        options: ModelOptions,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> None:
        self.where, self.spec, self.options = where, spec, options
        self.model = PolicyModel(hf_path, options)
        config = self.model.config
        module = self.model.module
        if config.bf16:
            from megatron.core.transformer.module import Float16Module

            module = Float16Module(config, module)
        self.keep_routing = KeepRouting(module, config, spec, layout.tensor_group())
        self.optimizer = None if optimizer is None else Optimizer(module, config, optimizer, total_steps)
        self._module = module if self.optimizer is None else self.optimizer.module

    @property
    def shard(self) -> VocabShard:
        """The vocabulary columns of this rank. Ids that the engine never samples belong to no support."""
        return self._columns(self.spec.vocab_size)

    @property
    def embedding_shard(self) -> VocabShard:
        """The same with every id of the Hugging Face model: supervised training makes unused ids unlikely."""
        return self._columns(self.model.vocab_size)

    def _columns(self, vocab_size: int) -> VocabShard:
        module: Any = self.model.module
        group = layout.tensor_group() if self.where.tensor > 1 else None
        return VocabShard.from_group(vocab_size, module.vocab_size // self.where.tensor, group)

    def score(self, batches: Sequence[Microbatch], loss: LossFunction, *, enforce: bool) -> list[RowScores]:
        """A forward-only pass. Leaves gradients, optimizer and replay state as they were."""
        return self._run(batches, loss, enforce=enforce, scale=0.0, forward_only=True).rows

    def step(self, batches: Sequence[Microbatch], loss: LossFunction, *, enforce: bool) -> StepReport:
        """Forward, backward, proof, update.

        Args:
            batches: this rank's microbatches; the same number on every data-parallel rank.
            enforce: replay recorded routing, and prove it before the update.

        Raises:
            ReplayError: routing was not enforced as recorded. No update was applied.
        """
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        # Megatron divides every gradient by the global sum of `num_tokens`; the load-balancing loss needs these to be
        # the packed rows. The loss has its global denominator already, so it is multiplied by them here.
        num_rows = torch.tensor([sum(int((~batch.is_pad).sum()) for batch in batches)], device=platform.device())
        dist.all_reduce(num_rows, group=layout.data_group())
        report = self._run(batches, loss, enforce=enforce, scale=float(num_rows), forward_only=False)
        return replace(report, update=self.optimizer.update())

    def _run(
        self,
        batches: Sequence[Microbatch],
        loss: LossFunction,
        *,
        enforce: bool,
        scale: float,
        forward_only: bool,
    ) -> StepReport:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows: list[RowScores] = []
        with self.keep_routing.schedule(batches, enforce=enforce, training=not forward_only) as schedule:

            def forward_step(microbatches: Iterator[int], module: Any) -> tuple[Tensor, Any]:
                index = next(microbatches)
                schedule.begin(index)
                logits_TV = self.model.forward(module, batches[index])

                def loss_function(logits_TV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                    total, scores = loss(logits_TV, index)
                    rows.append(replace(scores, layers_differing_T=schedule.layers_differing(index).cpu()))
                    num_rows = torch.tensor(int((~batches[index].is_pad).sum()), device=logits_TV.device)
                    return total * scale, num_rows, {}

                return logits_TV, loss_function

            with torch.set_grad_enabled(not forward_only):
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iter(range(len(batches))),
                    model=self._module,
                    num_microbatches=len(batches),
                    seq_length=max(batch.num_rows for batch in batches),
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
            verified = schedule.verify() if enforce else 0
        return StepReport(rows, None, verified, schedule.expert_load_LE)

    def logits(self, batch: Microbatch, *, enforce: bool) -> Tensor:
        """[T, V] logits of one microbatch, without gradient and without a schedule: what a reference model is for."""
        with (
            self.keep_routing.schedule([batch], enforce=enforce, training=False) as schedule,
            torch.no_grad(),
        ):
            schedule.begin(0)
            return self.model.forward(self._module, batch)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights under Hugging Face names. A collective: every rank must iterate to the end."""
        return self.model.export()

    def stage(self) -> StagedState:
        """A copy of model, optimizer, schedule and random state in host memory, for `Saver.save`. A collective."""
        assert self.optimizer is not None
        extra = {"schedule": self.optimizer.schedule_state()}
        return sharded_state.stage([self.model.module], self.optimizer.megatron, extra)

    def restore(self, folder: Path) -> None:
        """Goes on where a checkpoint was staged, by trainers of this or another parallel layout. A collective.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        assert self.optimizer is not None
        extra = sharded_state.load(folder, [self.model.module], self.optimizer.megatron)
        self.optimizer.load_schedule_state(extra["schedule"])
