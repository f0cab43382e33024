"""The trainer: one Megatron model, its optimizer, Keep Routing, and the schedule that runs them.

Runs in every trainer rank; every method is called by all ranks together. Shape legend: T = packed rows of this rank's
share of a microbatch, V = vocabulary (this rank's shard of it), H = hidden width, L = MoE layers, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.kernels.head import Head, VocabShard
from moerl.kernels.kept import KeptRows
from moerl.models.description import ModelDescription
from moerl.trainer import balance, batch_checksums, groups, platform, profiling, sharded_state, transfers
from moerl.trainer.model import ModelOptions, PolicyModel
from moerl.trainer.optimizer import RESIDENT, Optimizer, StateOptions, UpdateReport
from moerl.trainer.replay import KeepRouting, Replay, ReplaySchedule
from moerl.trainer.replay_rows import RecordedRouting, TracedRows
from moerl.trainer.rest import DeviceMemory
from moerl.trainer.sharded_state import StagedState
from moerl.trainer.shards import local_shards


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """Detached per-row results of one microbatch; on the device until the step is proved, then on the CPU."""

    logprobs_T: Tensor
    """float32, nats; the trainer's log-prob of each target under the distribution it was drawn from."""
    entropy_T: Tensor
    """float32, nats; entropy of that distribution."""
    clipped_T: Tensor | None = None
    """bool; True if the loss cut the token's gradient. None if the loss does not report it."""
    full_logprobs_T: Tensor | None = None
    """float32, nats; over the full vocabulary. None unless asked for."""
    losses_T: Tensor | None = None
    """float32; loss of each token before any denominator. None without a loss."""
    weights_T: Tensor | None = None
    """float32; correction of each token. None if the loss does not report it."""
    kl_T: Tensor | None = None
    """float32, nats; KL to the reference. None without a reference."""
    layers_differing_T: Tensor | None = None
    """int32; MoE layers whose natural choice differs from the recorded one (0 without routing). None until the schedule
    has ended."""
    kept: KeptRows | None = None
    """Sets that rows were scored in; None outside of sets, and once the trainer has their checksum."""


class LossFunction(Protocol):
    """Function from the last hidden states of one microbatch to its share of the batch's loss and its per-row results.

    Called on the last pipeline stage alone, with this rank's rows (T / tensor of them under sequence parallelism) and
    the head over the ids that are sampled. The loss of a step is the sum over microbatches, data-parallel and
    context-parallel ranks, so denominators are global.
    """

    def __call__(self, hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step of this rank."""

    rows: list[RowScores]
    """Results per microbatch, on the last pipeline stage; empty on others."""
    update: UpdateReport | None
    """Report of the update; None after a forward-only pass."""
    rows_verified: int
    """Routing rows proved on this rank (rows x layers x phases)."""
    expert_load_LE: Tensor
    """int64; tokens per expert of this rank's rows and layers. The sum over all ranks counts every token once."""
    agreement_LS: Tensor
    """float64; sums of `moerl.contract.trainer.STATISTICS` over those of these rows that have recorded routing."""
    live_rows_L: Tensor
    """int64; rows left to the router."""


class MegatronTrainer:
    """Trainer and scorer of one policy.

    Args:
        model: of the Hugging Face directory whose weights the policy starts from.
        layout: this rank's coordinates.
        options: of building the model.
        optimizer: optimizer settings; None for a model that is only read (a reference).
        total_steps: updates of the learning-rate schedule.
        state: places of the optimizer's state.

    Attributes:
        layout: this rank's coordinates, with the MoE layers that it holds.
        watch: called when a microbatch begins, with the number of those before it and of all in the pass; None = not.
    """

    def __init__(
        self,
        model: ModelDescription,
        layout: RankCoordinates,
        options: ModelOptions,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        state: StateOptions = RESIDENT,
    ) -> None:
        self.spec, self.options = model.spec, options
        self.model = PolicyModel(model, options, layout)
        config = self.model.config
        modules: list[nn.Module] = self.model.chunks
        if config.bf16:
            from megatron.core.transformer.module import Float16Module

            with balance.float32_expert_bias(modules):
                modules = [Float16Module(config, chunk) for chunk in modules]
        self.keep_routing = KeepRouting(modules, config, model.spec, layout)
        self.layout = self.keep_routing.layout
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            self.optimizer = Optimizer(modules, config, optimizer, total_steps, state)
        self._modules = modules if self.optimizer is None else self.optimizer.modules
        self.watch: Callable[[int, int], None] | None = None
        self._weights = DeviceMemory((each for chunk in self.model.chunks for each in chunk.parameters()), kept=True)

    def give_back(self) -> None:
        """Frees the memory of gradients, and memory that torch caches, for other processes on the device."""
        if self.optimizer is not None:
            self.optimizer.gradients.give_back()
        torch.cuda.empty_cache()

    def rest(self) -> None:
        """Frees the memory of weights and gradients; weights are in host memory until a method needs them."""
        self._weights.give_back()
        self.give_back()

    @property
    def head(self) -> Head:
        """The language-model head, on the last pipeline stage. Ids never sampled belong to no support."""
        weight_VpH = self.model.head_weight()
        main_grad_VpH = None if self.optimizer is None else self.optimizer.main_grad(weight_VpH)
        group = groups.tensor_group() if self.layout.dims.tensor > 1 else None
        shard = VocabShard.from_group(self.spec.vocab_size, len(weight_VpH), group)
        return Head(weight_VpH, shard, self.layout.dims.tensor > 1, main_grad_VpH)

    def score(
        self,
        batches: Sequence[Microbatch],
        loss: LossFunction,
        *,
        enforce: bool,
        prove: bool = True,
        in_sets: bool = False,
    ) -> list[RowScores]:
        """Runs a forward-only pass. Leaves gradients, optimizer and replay state as they were. Arguments as in `step`.

        Returns:
            Results per microbatch on the last pipeline stage; empty on others.
        """
        report, _ = self._run(batches, loss, Replay(enforce, prove, in_sets=in_sets), training=False)
        return report.rows

    def score_and_record(
        self, batches: Sequence[Microbatch], loss: LossFunction, *, in_sets: bool = False
    ) -> tuple[StepReport, RecordedRouting]:
        """Does `score` with the trainer's own routing; returns a report, and that routing for later passes to
        enforce."""
        report, recorded = self._run(batches, loss, Replay(record=True, in_sets=in_sets), training=False)
        assert recorded is not None
        return report, recorded

    def trace(self, batches: Sequence[Microbatch], microbatch: int) -> TracedRows:
        """Returns the rows that reach this rank's dispatchers for one of the microbatches: a slow pass after a proof
        that failed. `microbatch` is the same on all ranks."""
        self._weights.take_back()
        what = Replay(enforce=True, prove=False, trace=True)
        with self.keep_routing.schedule(batches, what, training=False) as schedule:
            self._forward_backward(schedule, batches, _no_loss, {})
            return schedule.traced(microbatch)

    def step(
        self,
        batches: Sequence[Microbatch],
        loss: LossFunction,
        *,
        enforce: bool,
        prove: bool = True,
        in_sets: bool = False,
    ) -> StepReport:
        """Runs forward and backward, proof, and update.

        Args:
            batches: this rank's shares; equally many on every rank.
            enforce: replay recorded routing. prove: and prove, before the update, that it reached the dispatchers.
            in_sets: tokens have to be scored in their kept sets; a loss that does not return the sets is refused.

        Raises:
            UnprovedError: on every rank, if on one of them routing was not enforced as recorded, or sequences attended
                to other tokens or were scored in other sets than those recorded. No update was applied.
            ReplayError: a router bypassed the hook on this rank.
        """
        assert self.optimizer is not None
        self._weights.take_back()
        self.optimizer.zero_grad()
        # Megatron divides every gradient by the global sum of `num_tokens`; the load-balancing loss needs these to be
        # the packed rows. The loss has its global denominator already, so it is multiplied by them here.
        # It stays on the device: the host goes on to the first microbatch without waiting for other ranks.
        num_rows = torch.full((), sum(int((~batch.is_pad).sum()) for batch in batches), device=platform.device())
        dist.all_reduce(num_rows, group=groups.data_and_context_group())
        report, _ = self._run(batches, loss, Replay(enforce, prove, in_sets=in_sets), training=True, scale=num_rows)
        with profiling.named("update"):
            update = self.optimizer.update()
        if self.options.expert_bias == "update" and not update.skipped:
            layers = [hook.moe_layer for hook in self.keep_routing.hooks]
            balance.update_expert_bias(self.model.chunks, report.expert_load_LE[layers])
        return replace(report, update=update)

    def _run(
        self,
        batches: Sequence[Microbatch],
        loss: LossFunction,
        what: Replay,
        *,
        training: bool,
        scale: Tensor | float = 0.0,
    ) -> tuple[StepReport, RecordedRouting | None]:
        """Runs one schedule, without the update; returns its report, and the routing if `what` has it recorded."""
        self._weights.take_back()
        rows: dict[int, RowScores] = {}
        with self.keep_routing.schedule(batches, what, training=training) as schedule:
            with profiling.named("forward and backward" if training else "forward"):
                self._forward_backward(schedule, batches, loss, rows, scale=scale)
            with profiling.named("proof"):
                verified = schedule.verify()
            recorded = schedule.recorded() if what.record else None
            differing = schedule.layers_differing()
        scored = [replace(rows[i], layers_differing_T=differing[i]) for i in sorted(rows)]
        scored, (load_LE, agreement_LS) = _on_host(scored, [schedule.expert_load_LE, schedule.agreement()])
        return StepReport(scored, None, verified, load_LE, agreement_LS, schedule.live_rows_L), recorded

    def _forward_backward(
        self,
        schedule: ReplaySchedule,
        batches: Sequence[Microbatch],
        loss: LossFunction,
        rows: dict[int, RowScores],
        *,
        scale: Tensor | float = 0.0,
    ) -> None:
        """Runs Megatron's schedule for this layout: none, 1F1B or interleaved. Fills `rows` by microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(microbatches: Iterator[int], module: Any) -> tuple[Tensor, Any]:
            index = next(microbatches)
            if self.watch is not None:
                self.watch(index, len(batches))
            with profiling.named("replay"):
                schedule.begin(index)

            def loss_function(hidden_1tH: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                total, scored = loss(hidden_1tH[0], self.head, index)
                if scored.kept is not None:
                    schedule.kept_sums[index] = batch_checksums.kept_sum(scored.kept, batches[index], self.layout)
                rows[index] = replace(scored, kept=None)
                num_rows = torch.full((), int((~batches[index].is_pad).sum()), device=hidden_1tH.device)
                return total * scale, num_rows, {}

            return self.model.forward(module, batches[index]), loss_function

        iterators = [iter(range(len(batches))) for _ in self._modules]
        interleaved = len(self._modules) > 1
        with torch.set_grad_enabled(schedule.training):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if interleaved else iterators[0],
                model=self._modules if interleaved else self._modules[0],
                num_microbatches=len(batches),
                seq_length=max(batch.num_rows_of_all for batch in batches),
                micro_batch_size=1,
                forward_only=not schedule.training,
            )

    def last_hidden(self, batches: Sequence[Microbatch], *, enforce: bool, prove: bool = True) -> list[Tensor]:
        """Returns the inputs of the language-model head, per microbatch, without gradient. A reference model is used
        for these alone.

        [T / tensor, H] each on the last pipeline stage; empty on others. Losses pass them to `Head.enter` one
        microbatch at a time.
        """
        kept: list[Tensor] = []

        def keep(hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]:
            kept.append(hidden_tH.detach())
            return _no_loss(hidden_tH, head, microbatch)

        self.score(batches, keep, enforce=enforce, prove=prove)
        return kept

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights under Hugging Face names. A collective: every rank must iterate to the end."""
        self._finish_weights()
        return self.model.export()

    def shards(self) -> dict[str, Tensor]:
        """Returns this rank's own weights, as `moerl.trainer.shards` names them; not copies. A collective."""
        self._finish_weights()
        return local_shards(self.model.chunks, self.layout)

    def stage(self) -> StagedState:
        """Copies model, optimizer, schedule and random state to host memory, for `Saver.save`. A collective."""
        assert self.optimizer is not None
        self._finish_weights()
        optimizer = self.optimizer
        return sharded_state.stage(self.model.chunks, optimizer.megatron, self.layout.dims, optimizer.progress())

    def _finish_weights(self) -> None:
        """Has the weights on the device, with the last update."""
        self._weights.take_back()
        if self.optimizer is not None:
            self.optimizer.finish_weights()

    def restore(self, folder: Path) -> None:
        """Loads a checkpoint of trainers of this or another parallel layout, and goes on from it. A collective.

        Raises:
            CheckpointError: the checkpoint is of another model; parts of it may have been loaded, so this trainer is
                of no use any more.
        """
        assert self.optimizer is not None
        self._weights.take_back()
        progress = sharded_state.load(folder, self.model.chunks, self.optimizer.megatron, self.layout.dims)
        self.optimizer.load_progress(progress)
        self.optimizer.settle()


def _on_host(scored: Sequence[RowScores], others: Sequence[Tensor]) -> tuple[list[RowScores], list[Tensor]]:
    """Returns results of a step in host memory, copied at once."""
    names = [field.name for field in fields(RowScores) if field.name != "kept"]
    places = [(at, name) for at, rows in enumerate(scored) for name in names if getattr(rows, name) is not None]
    values = transfers.to_host([*(getattr(scored[at], name) for at, name in places), *others])
    moved: list[dict[str, Tensor]] = [{} for _ in scored]
    for (at, name), value in zip(places, values, strict=False):
        moved[at][name] = value
    return [replace(rows, **each) for rows, each in zip(scored, moved, strict=True)], values[len(places) :]


def _no_loss(hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]:
    """Scores nothing: for passes of which only the routing or the hidden states are used."""
    nothing = torch.zeros(0)
    return hidden_tH.new_zeros(()), RowScores(nothing, nothing)
