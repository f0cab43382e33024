"""One rank of the trainer: runs the commands of a controller, one after the other.

A rank decides nothing: the controller chooses which pass is made, what is enforced and proved, when weights go out and
checkpoints are written. Runs in every trainer rank, which may be the controller's own process if there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.config.ranks import RankConfig, rank_threads
from moerl.contract import commands
from moerl.contract.batch import BatchTotals, Microbatch
from moerl.contract.batch_wire import decode_batches
from moerl.contract.commands import AnyCommand, Reply
from moerl.contract.frame import WireLimits
from moerl.contract.parallel import RankCoordinates
from moerl.contract.ports import PolicyEngine
from moerl.contract.trainer import PROFILES, STATISTICS, PassReport, Stage
from moerl.errors import UnprovedError
from moerl.models.description import read_model
from moerl.ranks.devices import device_notes, model_on_this_node, shares_prompts
from moerl.ranks.tables import as_words, local_rows, with_advantages, with_clipping
from moerl.ranks.weights import WeightSync
from moerl.trainer import platform, profiling
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointStore
from moerl.trainer.hf_directory import write_model
from moerl.trainer.losses import Drift, PolicyGradientLoss, Reference, Scorer, TextLoss
from moerl.trainer.model import ModelOptions, PolicyModel
from moerl.trainer.optimizer import StateOptions
from moerl.trainer.replay_rows import TracedRows
from moerl.trainer.saver import Saver
from moerl.trainer.sharded_state import StagedState, load_weights
from moerl.trainer.trainer import MegatronTrainer, RowScores, StepReport

_SHARES = WireLimits(max_frame_bytes=64 << 30, max_payload_bytes=128 << 30)
"""Limits of a frame that the controller made: thousands of long trajectories with the routing of every token."""


@dataclass(slots=True, eq=False)
class _Minibatch:
    """This rank's shares of a minibatch, and the results of its passes.

    given: as they came. batches: with the routing to keep. totals: of all ranks. proximal: scores before the first
    update on this batch. traces, recorded: if the trainer's own routing is kept, the rows that the pass that recorded
    it dispatched, per microbatch, and the report of this pass.
    """

    given: list[Microbatch]
    batches: list[Microbatch]
    totals: BatchTotals
    proximal: list[RowScores] = field(default_factory=list)
    traces: Sequence[TracedRows] = ()
    recorded: StepReport | None = None


class Worker:
    """One rank.

    Args:
        config: of the run, as ranks read it.
        layout: this rank's coordinates; the process groups are there.
        watch: called when a microbatch begins, with the number of those before it and of all in the pass.

    Raises:
        ConfigError: the device of this rank cannot do what the configuration asks for.
    """

    def __init__(self, config: RankConfig, layout: RankCoordinates, watch: Callable[[int, int], None]) -> None:
        if not platform.can_share_prompts():
            config.trainer.check_for_gpus()
        self._config, self._layout, self._watch = config, layout, watch
        self._store = CheckpointStore(config.run_dir / CHECKPOINTS, config.checkpoint.keep)
        self._saver = Saver(self._store)
        self._profiler = profiling.Profiler(config.run_dir / PROFILES)
        self._stage: Stage = "sft"
        self._policy: MegatronTrainer | None = None
        self._reference: MegatronTrainer | None = None
        self._weights: WeightSync | None = None
        self._minibatches: list[_Minibatch] = []
        # The pass whose proof failed: the model, its shares, and the traces that it was compared with, if any.
        self._unproved: tuple[MegatronTrainer, list[Microbatch], Sequence[TracedRows]] | None = None
        self._staged: StagedState | None = None

    def run(self, command: AnyCommand, frame: bytes = b"", engine: PolicyEngine | None = None) -> Reply:
        """Runs one command and returns its reply; called on all ranks, in the same order.

        Args:
            frame: that follows `Load`.
            engine: with `Build`, if the engine is in this process: gets the buckets that this rank sends.

        Raises:
            MoerlError: as the method of `moerl.contract.trainer.Trainer` with the command's name.
        """
        match command:
            case commands.Build():
                return self._build(command, engine)
            case commands.Load():
                self._profiler.end_rollout()
                batches, facts = decode_batches(frame, spec=self._trained.spec, limits=_SHARES)
                self._minibatches[command.number :] = [_Minibatch(batches, batches, BatchTotals.read(facts))]
            case commands.Score():
                with profiling.named("scoring"):
                    return Reply(report=self._score(command))
            case commands.Prepare():
                with profiling.named("scoring"):
                    return Reply(report=self._prepare(command))
            case commands.Step():
                with profiling.named("training"):
                    return Reply(report=self._step(command))
            case commands.UseOfDevice():
                return Reply(device=platform.device_use())
            case commands.Profile() if self._layout.rank > 0:
                pass  # all ranks do the same at the same time
            case commands.Profile(step=0):
                self._profiler.end()
            case commands.Profile():
                self._profiler.begin(command.step)
            case commands.Trace():
                return Reply(tables=tuple(self._trace(command)))
            case commands.Publish() | commands.KeepWeights() | commands.Resend():
                return self._sync(command)
            case commands.GiveBack():
                self._staged = self._trained.stage() if command.stage else None
                self._trained.give_back()
            case commands.Save():
                self._store.corrupt |= set(command.corrupt)
                staged, self._staged = self._staged or self._trained.stage(), None
                self._saver.save(command.checkpoint, staged, command.state)
            case commands.PollSave():
                (self._saver.wait if command.wait else self._saver.poll)()
            case commands.Restore():
                self._trained.restore(Path(command.checkpoint))
            case commands.Export():
                self._write_model(Path(command.folder), Path(command.like), self._trained)
            case commands.Rewrite():
                self._rewrite(command)
            case commands.Close():
                self.close()
            case commands.Start():  # run before there is a worker
                pass
        return Reply()

    def close(self) -> None:
        """Leaves the receivers of weights; returns when the checkpoint in flight is written. Raises `CheckpointError`
        if it could not be."""
        self._profiler.drop()
        self._leave_receivers()
        self._saver.wait()

    def _sync(self, command: commands.SyncCommand) -> Reply:
        """Syncs weights. With `trainer.sleep` the models rest after `Publish`: the engine goes on after all replies."""
        assert self._weights is not None
        with profiling.named("sync"):
            reply = self._weights.run(command)
            for model in (self._policy, self._reference):
                if model is not None and isinstance(command, commands.Publish) and self._config.trainer.sleep:
                    model.rest()
        return reply

    def _leave_receivers(self) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()

    @property
    def _trained(self) -> MegatronTrainer:
        assert self._policy is not None, "no stage is built"
        return self._policy

    # --- models ------------------------------------------------------------------------------------------------------

    def _build(self, command: commands.Build, engine: PolicyEngine | None) -> Reply:
        config, self._stage = self._config, command.stage
        torch.set_num_threads(rank_threads(config, command.stage))
        model = replace(read_model(model_on_this_node(command.model)), spec=command.spec)
        self._leave_receivers()
        self._minibatches, self._reference = [], None
        # The previous model is freed first: two models may not fit.
        self._policy = None
        is_rl = command.stage == "rl"
        steps = config.rl.steps * config.rl.minibatches if is_rl else config.sft.steps
        options = self._model_options(config.rl.moe_aux_loss_coef if is_rl else config.sft.moe_aux_loss_coef)
        self._policy = MegatronTrainer(
            model,
            self._layout,
            options,
            config.optimizer if is_rl else config.sft.optimizer,
            steps,
            StateOptions(config.trainer.distributed_optimizer, config.trainer.optimizer_offload),
        )
        self._policy.watch = self._watch
        if is_rl and config.rollout.has_engine:
            self._weights = WeightSync(config, model, self._policy, engine, command.receiver)
        if is_rl and config.algorithm.reference_kl is not None:
            self._reference = MegatronTrainer(model, self._layout, options, None)
        tensors = {} if self._weights is None or self._layout.rank else self._weights.tensors
        notes, shares = device_notes(config.model, config.trainer), shares_prompts(config.trainer)
        return Reply(coordinates=self._policy.layout, notes=notes, shares_prompts=shares, tensors=tensors)

    def _model_options(self, moe_aux_loss_coef: float) -> ModelOptions:
        config = self._config
        return ModelOptions(
            dtype=config.model.dtype,
            recompute=config.trainer.recompute,
            moe_aux_loss_coef=moe_aux_loss_coef,
            expert_bias=config.trainer.expert_bias,
            train_router=config.trainer.train_router,
            deterministic=config.trainer.deterministic,
            megatron=config.trainer.megatron,
        )

    def _write_model(self, folder: Path, like: Path, source: MegatronTrainer | PolicyModel) -> None:
        """Writes a Hugging Face directory. A collective; rank 0 writes, after the checkpoint in flight."""
        self._saver.wait()
        if self._layout.rank == 0:
            write_model(folder, like, source.export())
        else:
            for _ in source.export():
                pass

    def _rewrite(self, command: commands.Rewrite) -> None:
        options = self._model_options(self._config.sft.moe_aux_loss_coef)
        model = PolicyModel(read_model(model_on_this_node(command.model)), options, self._layout)
        load_weights(Path(command.checkpoint), model.chunks)
        self._write_model(Path(command.folder), Path(command.model), model)

    # --- passes ------------------------------------------------------------------------------------------------------

    def _score(self, command: commands.Score) -> PassReport:
        batches = self._minibatches[command.minibatch].given
        scorer = self._scorer(batches, with_full=command.full)
        with self._proving(self._trained, batches):
            scores = self._trained.score(
                batches, scorer, enforce=command.enforce, prove=command.prove, in_sets=self._in_sets or command.full
            )
        return self._report(batches, scores)

    def _prepare(self, command: commands.Prepare) -> PassReport:
        minibatch, config = self._minibatches[command.minibatch], self._config
        batches, mode = minibatch.given, config.keep_routing.mode
        if mode == "trainer":
            with self._proving(self._trained, batches):
                report, recorded = self._trained.score_and_record(batches, self._scorer(batches), in_sets=self._in_sets)
            minibatch.batches, minibatch.traces = recorded.batches, recorded.traces
            minibatch.recorded, minibatch.proximal = report, report.rows
            if not config.algorithm.kl_in_reward:
                return self._report(batches, report.rows)
            batches = minibatch.batches
        scorer = self._scorer(batches)
        if config.algorithm.kl_in_reward:
            scorer = replace(scorer, reference=self._referred(minibatch, prove=command.prove))
        with self._proving(self._trained, batches, minibatch.traces):
            minibatch.proximal = self._trained.score(
                batches, scorer, enforce=mode != "off", prove=command.prove, in_sets=self._in_sets
            )
        return self._report(batches, minibatch.proximal)

    def _step(self, command: commands.Step) -> PassReport:
        self._staged = None  # of the weights before this step
        minibatch, enforce = self._minibatches[command.minibatch], self._config.keep_routing.mode != "off"
        batches = minibatch.batches
        if self._stage == "sft":
            text = TextLoss(batches, self._trained.model.description.vocab_size, minibatch.totals.num_tokens)
            report = self._trained.step(batches, text, enforce=False)
            return self._report(batches, report.rows, report)
        if command.advantages is not None:
            batches = minibatch.batches = [with_advantages(batch, command.advantages) for batch in batches]
        loss = self._loss(minibatch, command)
        with self._proving(self._trained, batches, minibatch.traces):
            report = self._trained.step(batches, loss, enforce=enforce, prove=command.prove, in_sets=self._in_sets)
        rows = report.rows if not minibatch.proximal else with_clipping(minibatch.proximal, report.rows)
        if minibatch.recorded is not None:
            own = minibatch.recorded
            report = replace(report, agreement_LS=own.agreement_LS, live_rows_L=own.live_rows_L)
        return self._report(batches, rows, report)

    def _loss(self, minibatch: _Minibatch, command: commands.Step) -> PolicyGradientLoss:
        algorithm, scorer, drift = self._config.algorithm, self._scorer(minibatch.batches), None
        if self._reference is not None and not algorithm.kl_in_reward:
            scorer = replace(scorer, reference=self._referred(minibatch, prove=command.prove))
        if algorithm.interpolates_proximal and command.minibatch > 0:
            version = 0 if self._weights is None else self._weights.version
            drift = Drift(version, self._config.rl.minibatches, command.minibatch)
        return PolicyGradientLoss(
            scorer,
            algorithm,
            minibatch.totals,
            self._layout,
            proximal_logprobs=[rows.logprobs_T for rows in minibatch.proximal] if minibatch.proximal else None,
            drift=drift,
        )

    def _referred(self, minibatch: _Minibatch, *, prove: bool) -> Reference:
        """Runs the reference's pass over a minibatch."""
        support, mode = self._config.algorithm.reference_kl, self._config.keep_routing.reference_mode
        assert self._reference is not None
        assert support is not None
        own = mode == "trainer"
        batches, traces = (minibatch.batches, minibatch.traces) if own else (minibatch.given, ())
        with self._proving(self._reference, batches, traces):
            hidden = self._reference.last_hidden(batches, enforce=mode != "off", prove=prove)
        return Reference(self._reference, hidden, support)

    @property
    def _in_sets(self) -> bool:
        """True if tokens are scored in their kept sets."""
        return self._config.keep_sampling_mask.enabled

    def _scorer(self, batches: Sequence[Microbatch], *, with_full: bool = False) -> Scorer:
        return Scorer(batches, keep_mask=self._in_sets or with_full, with_full=with_full)

    def _report(
        self, batches: Sequence[Microbatch], scores: Sequence[RowScores], step: StepReport | None = None
    ) -> PassReport:
        layout, spec = self._trained.layout, self._trained.spec
        losses = [rows.losses_T for rows in scores if rows.losses_T is not None and layout.tensor_rank == 0]
        loss_sum = sum(float(losses_T.double().sum()) for losses_T in losses) if losses else None
        rows_RC = np.ascontiguousarray(local_rows(layout, batches, scores))
        if step is None:
            none_L, none_LE = np.zeros(0, np.int64), np.zeros((0, spec.num_experts), np.int64)
            return PassReport(rows_RC, loss_sum, 0, none_LE, np.zeros((0, len(STATISTICS))), none_L)
        # Copies: on a CPU the tensors would share their memory with the report of a rank in the controller's process.
        load_LE, agreement_LS, live_rows_L = (
            each.cpu().numpy().copy() for each in (step.expert_load_LE, step.agreement_LS, step.live_rows_L)
        )
        return PassReport(rows_RC, loss_sum, step.rows_verified, load_LE, agreement_LS, live_rows_L, step.update)

    # --- proofs that failed ------------------------------------------------------------------------------------------

    @contextmanager
    def _proving(
        self, model: MegatronTrainer, batches: list[Microbatch], traces: Sequence[TracedRows] = ()
    ) -> Iterator[None]:
        """Surrounds a pass: if its proof fails, keeps the pass for `Trace`."""
        try:
            yield
        except UnprovedError:
            self._unproved = model, batches, traces
            raise

    def _trace(self, command: commands.Trace) -> list[NDArray[np.int64]]:
        """Returns the rows that reached this rank's dispatchers, and those recorded if its own routing is kept."""
        assert self._unproved is not None, "no proof has failed"
        model, batches, traces = self._unproved
        tables = [model.trace(batches, command.microbatch)]
        tables += [traces[command.microbatch]] if traces else []
        return [as_words(table, self._layout.rank) for table in tables]
