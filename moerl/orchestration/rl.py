"""The RL loop: rollouts, rewards, packed batches, Megatron steps, weights back to the engine.

    prompts -> engine -> trajectories -> rewards -> packed batch -> Megatron step -> weights -> engine
                     (routing and kept sets ride on the trajectory; both are enforced in the step)

Runs in every trainer rank. Rank 0 hosts the embedded engine, packs the batch and sends every rank its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.registry import Algorithm, make_algorithm
from moerl.buffer.order import batch_indices
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.ports import WorkedTask
from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError
from moerl.orchestration import step_metrics
from moerl.orchestration.batches import BatchExchange, Minibatch, pack_options
from moerl.orchestration.evaluation import Evaluation, evaluate
from moerl.orchestration.exchange import gather_rows, sum_over
from moerl.orchestration.replay_report import explained
from moerl.orchestration.rollouts import Collector, in_request_order, sampling_params, with_advantages
from moerl.orchestration.run import Run
from moerl.orchestration.weight_sync import WeightSync
from moerl.telemetry.metrics import table_metrics
from moerl.trainer.losses import PolicyGradientLoss, Scorer
from moerl.trainer.replay_rows import TracedRows
from moerl.trainer.trainer import MegatronTrainer, RowScores, StepReport

STAGE = "rl"


class RLStage:
    """One policy, its engine and the loop between them.

    Args:
        run: the run this stage belongs to.
        model_path: Hugging Face directory of the cold start (also the KL reference).
        collector: asks the engine; None on ranks that do not host it.
    """

    def __init__(self, run: Run, model_path: Path, collector: Collector | None) -> None:
        config = run.config
        self.run, self.config, self.model_path, self.collector = run, config, model_path, collector
        self.enforce = config.keep_routing.mode != "off"
        self.algorithm: Algorithm = make_algorithm(
            config.algorithm.name,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            normalize_std=config.algorithm.normalize_std,
            importance_cap=config.algorithm.importance_cap,
            kl_coef=config.algorithm.kl_coef,
        )
        if collector is not None:
            _check_handshake(collector.engine.handshake().spec, run.model.spec)
        options = run.model_options(config.rl.moe_aux_loss_coef)
        updates = config.rl.steps * config.rl.minibatches
        model = replace(run.model, folder=model_path)
        self.trainer = MegatronTrainer(
            model,
            run.layout,
            options,
            config.optimizer,
            updates,
            config.trainer.distributed_optimizer,
        )
        self.trainer.watch = run.reporter.within
        engine = None if collector is None else run.engine
        self.weight_sync = WeightSync(config, model, self.trainer, engine)
        packing = pack_options(config, run.layout, model)
        self.exchange = BatchExchange(self.trainer, packing, config)
        self.reference = None
        if self.algorithm.needs_reference:
            self.reference = MegatronTrainer(model, run.layout, options, None)

    def train(self) -> None:
        """Runs the stage from its start or its last checkpoint."""
        run, steps = self.run, self.config.rl.steps
        first_step = run.restore(STAGE, self.trainer)
        self._publish(first_step)
        self._evaluate_cold_start(first_step)
        if run.state.evaluation_due:
            run.state.evaluation_due = False
            self._evaluate(first_step)
        run.stop_if_told(STAGE, first_step, self.trainer)
        run.reporter.begin_stage(STAGE, done=first_step, total=steps)
        for step in range(first_step, steps):
            minibatches = self._rollouts(step)
            metrics = self._train_on(minibatches, step)
            metrics |= self._publish(step + 1)
            run.log(STAGE, step + 1, metrics, round(sum(minibatch.num_tokens for minibatch in minibatches)))
            self._evaluate(step + 1)
            run.checkpoint_if_due(STAGE, step + 1, steps, self.trainer)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _rollouts(self, step: int) -> list[Minibatch]:
        """This step's minibatches, this rank's share of each.

        Raises:
            RunStoppedError: a rank was told to stop; rollouts under way are given up.
        """
        run, collector, parts = self.run, self.collector, None
        with run.span("rollout"):
            try:
                if collector is not None:
                    samples = run.unless_stopped(lambda: self._sample(collector, step))
                    parts = None if samples is None else _split_groups(samples, self.config.rl.minibatches)
            finally:
                # A failed main rank tells the others, who would wait for its batch otherwise.
                stopping = run.told_to_stop()
                minibatches = [] if stopping else self.exchange.share(parts)
        if stopping:
            run.stop_if_told(STAGE, step, self.trainer)
        return minibatches

    def _sample(self, collector: Collector, step: int) -> list[TrainSample]:
        config = self.config
        prompts = self.run.train_prompts()
        chosen = [prompts[i] for i in batch_indices(len(prompts), config.rl.prompts_per_step, step, config.seed)]
        requests = collector.requests(
            chosen,
            run=f"{STAGE}-{step:06d}",
            count=config.rl.group_size,
            sampling=sampling_params(config.rollout, config.seed),
            prefixes={},
        )
        finished = collector.collect(chosen, requests, f"step {step + 1}", trainer_version=step, prefixes={})
        trajectories = in_request_order(finished, requests)
        texts = [collector.response(t) for t in trajectories]
        self.run.dump_if_due(step + 1, trajectories, texts, [collector.prompt(t) for t in trajectories])
        return with_advantages(trajectories, self.algorithm)

    # --- training ----------------------------------------------------------------------------------------------------

    def _train_on(self, minibatches: Sequence[Minibatch], step: int) -> dict[str, float]:
        run, config = self.run, self.config
        due = step == 0 or (config.mismatch.every and (step + 1) % config.mismatch.every == 0)
        table: dict[str, dict[str, float]] = {}
        if due or step + 1 == config.rl.steps:
            with run.span("mismatch"):
                table = self._mismatch_table(minibatches)
            run.state.mismatch = table
            run.state.mismatch_first = run.state.mismatch_first or table
        with run.span("train"):
            metrics = self._update(minibatches, step)
        if run.layout.is_main:
            samples = [sample for minibatch in minibatches for sample in minibatch.samples]
            metrics |= step_metrics.rollout_metrics([sample.trajectory for sample in samples])
            metrics |= step_metrics.mean_of([minibatch.metrics for minibatch in minibatches])
        metrics |= {"weights/version": float(step + 1), "quarantine/count": float(self.run.quarantine.num_refused)}
        return metrics | table_metrics(table)

    def _update(self, minibatches: Sequence[Minibatch], step: int) -> dict[str, float]:
        """One optimizer step per minibatch. With several, log-probs before the first update are the proximal ones."""
        passes = [self._before_update(m, step, number, len(minibatches)) for number, m in enumerate(minibatches)]
        totals = step_metrics.StepTotals(self.run.model.spec)
        for number, (minibatch, ready) in enumerate(zip(minibatches, passes, strict=True)):
            loss = self._loss(minibatch, ready)
            with explained(self.trainer, ready.batches, minibatch.samples, ready.traces):
                report = self.trainer.step(ready.batches, loss, enforce=self.enforce, prove=ready.proved)
            assert report.update is not None
            self.run.check_update(report.update, f"{STAGE}-{step + 1:06d}-{number}", minibatch.samples)
            rows = report.rows if not ready.scores else _with_clipping(ready.scores, report.rows)
            if ready.report is not None:
                natural = ready.report
                report = replace(report, natural_LS=natural.natural_LS, live_rows_L=natural.live_rows_L)
            totals.add(report, step_metrics.local_rows(self.trainer.layout, ready.batches, rows))
            totals.unproved += int(self.enforce and not ready.proved)
        table = step_metrics.RowTable.of(gather_rows(np.concatenate(totals.tables)))
        natural_LS, live_rows_L = sum_over(totals.natural_LS), sum_over(totals.live_rows_L)
        self.run.reporter.log_layers(step + 1, step_metrics.per_layer(natural_LS, live_rows_L))
        return {
            **step_metrics.disagreement(table),
            **step_metrics.policy_metrics(table),
            **step_metrics.load_metrics(sum_over(totals.load_LE)),
            **step_metrics.natural_metrics(natural_LS, live_rows_L),
            **step_metrics.update_metrics(totals.updates),
            "replay/rows_verified": float(sum_over(torch.tensor([totals.verified]))),
            "replay/updates_unproved": float(totals.unproved),
        }

    def _before_update(self, minibatch: Minibatch, step: int, number: int, num_minibatches: int) -> _Ready:
        """The proximal pass, where there is more than one update per batch or its routing is what is kept."""
        batches = minibatch.batches
        proved = is_proved(self.config.keep_routing.verify, step * self.config.rl.minibatches + number + 1)
        if self.config.keep_routing.mode == "trainer":
            with explained(self.trainer, batches, minibatch.samples):
                report, recorded = self.trainer.score_and_record(batches, self._scorer(batches))
            return _Ready(recorded.batches, report.rows, proved, recorded.traces, report)
        if num_minibatches == 1:
            return _Ready(batches, [], proved)
        return _Ready(batches, self._score(minibatch, enforce=self.enforce, prove=proved), proved)

    def _loss(self, minibatch: Minibatch, ready: _Ready) -> PolicyGradientLoss:
        hidden: list[Tensor] = []
        if self.reference is not None:
            mode = self.config.keep_routing.reference_mode
            batches, traces = (ready.batches, ready.traces) if mode == "trainer" else (minibatch.batches, ())
            with explained(self.reference, batches, minibatch.samples, traces):
                hidden = self.reference.last_hidden(batches, enforce=mode != "off", prove=ready.proved)
        scorer = self._scorer(ready.batches)
        proximal = [rows.logprobs_T for rows in ready.scores] if ready.scores else None
        return PolicyGradientLoss(
            scorer,
            self.algorithm,
            minibatch.num_tokens,
            proximal_logprobs=proximal,
            reference=self.reference,
            reference_hidden=hidden,
            kl_support=self.config.algorithm.kl_support,
        )

    def _scorer(self, batches: Sequence[Microbatch], *, with_full: bool = False) -> Scorer:
        keep_mask = self.config.keep_sampling_mask.enabled or with_full
        return Scorer(batches, keep_mask=keep_mask, with_full=with_full)

    def _score(self, minibatch: Minibatch, *, enforce: bool, prove: bool, with_full: bool = False) -> list[RowScores]:
        batches = minibatch.batches
        with explained(self.trainer, batches, minibatch.samples):
            scorer = self._scorer(batches, with_full=with_full)
            return self.trainer.score(batches, scorer, enforce=enforce, prove=prove)

    def _mismatch_table(self, minibatches: Sequence[Minibatch]) -> dict[str, dict[str, float]]:
        """The same rollouts and weights, scored with routing and sampling mask each kept and not."""
        table, prove = {}, self.config.keep_routing.verify != "off"
        for routing in (True, False):
            rows = [
                step_metrics.local_rows(
                    self.trainer.layout,
                    minibatch.batches,
                    self._score(minibatch, enforce=routing, prove=prove, with_full=True),
                )
                for minibatch in minibatches
            ]
            gathered = step_metrics.RowTable.of(gather_rows(np.concatenate(rows)))
            for mask in (True, False):
                name = {(True, True): "both", (True, False): "experts", (False, True): "kept_sets"}.get(
                    (routing, mask), "neither"
                )
                table[name] = step_metrics.disagreement(gathered, full=not mask)
        return table

    # --- engine ------------------------------------------------------------------------------------------------------

    def _publish(self, version: int) -> dict[str, float]:
        with self.run.span("weights"):
            return self.weight_sync.publish(version)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate_cold_start(self, first_step: int) -> None:
        """Before the first update: dev and held-out accuracy, and the latter when made to show the work."""
        collector = self.collector
        if first_step > 0 or collector is None:
            return
        dev, heldout = self.config.evaluation.dev_problems, self.config.evaluation.heldout_problems

        def measure() -> dict[str, Evaluation]:
            evaluations = {
                "dev": evaluate(collector, "dev", dev, version=0),
                "cold_start": evaluate(collector, "heldout", heldout, version=0),
            }
            if isinstance(collector.task, WorkedTask):
                worked = evaluate(collector, "heldout", heldout, version=0, worked=True)
                evaluations["cold_start_worked"] = worked
            return evaluations

        self._record(0, measure)

    def _evaluate(self, step: int) -> None:
        """On dev problems when due; on the held-out problems after the last step."""
        sizes, is_last, collector = self.config.evaluation, step == self.config.rl.steps, self.collector
        due = is_last or (sizes.every and step % sizes.every == 0)
        if not due or collector is None:
            return

        def measure() -> dict[str, Evaluation]:
            evaluations = {"dev": evaluate(collector, "dev", sizes.dev_problems, version=step)}
            if is_last:
                final = evaluate(collector, "heldout", sizes.heldout_problems, version=step)
                evaluations["final"] = final
            return evaluations

        self._record(step, measure)

    def _record(self, step: int, measure: Callable[[], dict[str, Evaluation]]) -> None:
        """Records what `measure` finds; a run told to stop meanwhile measures when it goes on."""
        with self.run.span("evaluation"):
            evaluations = self.run.unless_stopped(measure)
        self.run.state.evaluation_due = evaluations is None
        if evaluations is not None:
            self.run.record_evaluations(step, evaluations)


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A minibatch before its update.

    batches: this rank's shares with the routing to keep. scores: by the proximal weights; empty where the update's own
    pass gives them. proved: replay is proved before the update. traces, report: where the trainer's own routing is
    kept, what the pass that recorded it dispatched, per microbatch, and what it found.
    """

    batches: list[Microbatch]
    scores: list[RowScores]
    proved: bool
    traces: Sequence[TracedRows] = ()
    report: StepReport | None = None


def is_proved(verify: str | int, update: int) -> bool:
    """Whether `keep_routing.verify` asks for a proof before an update; updates of a run count from 1."""
    return verify == "every" or (isinstance(verify, int) and update % verify == 0)


def _check_handshake(engine: ModelSpec, trainer: ModelSpec) -> None:
    if engine != trainer:
        raise EngineError(
            "the engine serves another model than the trainer trains",
            seen=engine,
            expected=trainer,
            remedy="start the engine from the model directory of this run",
        )


def _split_groups(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Samples in `parts` minibatches of whole groups, in order."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.trajectory.lineage.group_id, []).append(sample)
    chunks = np.array_split(np.arange(len(groups)), min(parts, len(groups)))
    in_order = list(groups.values())
    return [[sample for i in chunk for sample in in_order[i]] for chunk in chunks]


def _with_clipping(before: Sequence[RowScores], after: Sequence[RowScores]) -> list[RowScores]:
    """Scores from before the first update (same weights as the engine), with the clipping that happened since."""
    return [replace(b, clipped_T=a.clipped_T) for b, a in zip(before, after, strict=True)]
