"""The RL loop: rollouts, rewards, packed batches, Megatron steps, weights back to the engine.

    prompts -> engine -> trajectories -> rewards -> packed batch -> trainer step -> weights -> engine
                     (routing and kept sets ride on the trajectory; both are enforced in the step)

Runs in the controller, and uses ports alone: it knows neither Megatron nor the engine, and groups may come from dumps.
Who waits for whom:

    waits             for                                        at most                  if it fails
    loop              a batch: groups that were collected        until a stop signal      raises the collector's error
    loop              a reply of every rank to each command      trainer.command_seconds  ends the run, names the rank
    loop              engines that take weights (`settle`)       weights.step_seconds     raises `WeightSyncError`
    collecting thread the engine's responses, their rewards      the engine's limits      `batch` raises it in the loop
    packing thread    the groups of the next batch (`Ahead`)     until the loop asks      the loop packs them itself
    saving thread     the disk; the next checkpoint waits        -                        raises `CheckpointError`

Collecting threads run with `buffer.max_staleness` only; without it the loop collects its batch itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moerl.algorithms.arrays import advantages_less_kl, batch_facts, with_advantages
from moerl.algorithms.section import Algorithm
from moerl.batching.packing import PackOptions
from moerl.contract.batch import TrainSample
from moerl.contract.ports import PolicyEngine, Sleeper, WorkedTask
from moerl.contract.trainer import PROFILES, PassReport, RowTable, sum_reports
from moerl.contract.trajectory import Trajectory
from moerl.errors import closing
from moerl.orchestration import step_metrics
from moerl.orchestration.ahead import Ahead
from moerl.orchestration.batches import Minibatch, pack_minibatch
from moerl.orchestration.evaluation import Evaluation, evaluate
from moerl.orchestration.replay_report import explained
from moerl.orchestration.rollouts import Collector
from moerl.orchestration.run import Run
from moerl.orchestration.source import Live, Source
from moerl.orchestration.turn_metrics import turn_metrics
from moerl.telemetry.metrics import table_metrics

STAGE = "rl"


class RLStage:
    """Loop between one policy and its engine.

    Args:
        run: run of this stage; its trainer is built for the stage.
        source: source of groups.
        packing: options by which sequences share microbatches.
        steps: steps of the stage; `rl.steps`, or fewer if the source has no more.
        live: the engine; None if the groups come from dumps: no weights are published then, and nothing is evaluated.
    """

    def __init__(self, run: Run, source: Source, packing: PackOptions, steps: int, live: Live | None) -> None:
        self.run, self.config, self.trainer = run, run.config, run.trainer
        self.groups, self.packing, self.steps, self.live = source, packing, steps, live
        self.enforce = run.config.keep_routing.mode != "off"
        self.algorithm = run.config.algorithm
        self.algorithm.load()
        self._num_published, self._published_version = 0, -1
        self._published = dict[str, float]()
        self._costs = None if live is None else replace(live.engine.costs)
        if run.config.trainer.sleep and live is not None:
            run.clear_devices = live.engine.close

    def train(self) -> None:
        """Runs the stage from its start or its last checkpoint."""
        run, steps = self.run, self.steps
        first_step = run.restore(STAGE)
        self.groups.restore(run.state.groups, first_step)
        self.groups.recover()
        with self._publishing(first_step):
            pass
        self.groups.settle()
        self._update_costs()
        self._evaluate_cold_start(first_step)
        if run.state.evaluation_due:
            run.state.evaluation_due = False
            self._evaluate(first_step)
        run.stop_if_told(STAGE, first_step)
        run.reporter.notify(f"algorithm: {self.algorithm.describe()}")
        for line in self.groups.limits.describe():
            run.reporter.notify(line)
        run.reporter.begin_stage(STAGE, done=first_step, total=steps)
        with closing(Ahead(self.groups.upcoming, self._pack)) as self._ahead, closing(self.groups):
            for step in range(first_step, steps):
                with self._profiled(step + 1):
                    minibatches = self._rollouts(step)
                    self._make_room()
                    self._ahead.begin(step + 1)
                    metrics = self._train_on(minibatches, step)
                run.keep_groups(step + 1, self.groups.snapshot())
                run.log(STAGE, step + 1, metrics, minibatches)
                self._evaluate(step + 1)
                if run.checkpoint_if_due(STAGE, step + 1, steps):
                    self.groups.committed(step + 1, run.state.groups)
            self.groups.settle()
        run.trainer.poll_save(wait=True)
        self.groups.finished()

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Has rank 0 record a trace of the step, if one is wanted; a step that fails leaves none."""
        if step not in self.config.trainer.profile_steps:
            yield
            return
        self.trainer.profile(step)
        yield
        self.trainer.profile(0)
        self.run.reporter.notify(f"trace of step {step}: {self.config.run_dir / PROFILES}")

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _rollouts(self, step: int) -> list[Minibatch]:
        """Returns this step's minibatches, after handing them to the trainer.

        Raises:
            RunStoppedError: a signal stopped the run; rollouts under way are dropped.
        """
        run = self.run
        with run.span("rollout"):
            minibatches = run.unless_stopped(lambda: self._sample(step))
            if minibatches is None:
                # Stopped in mid-step: the state after the previous step is kept.
                run.stop_if_told(STAGE, step)
            self.trainer.load([minibatch.frames for minibatch in minibatches or ()])
        return minibatches or []

    def _sample(self, step: int) -> list[Minibatch]:
        trajectories = self.groups.batch()
        if self.live is not None and self.run.is_dump_due(step + 1):
            self.live.collector.dump(self.config.run_dir / "rollouts" / f"step-{step + 1:06d}.parquet", trajectories)
        return self._ahead.packed(trajectories)

    def _pack(self, trajectories: Sequence[Trajectory]) -> list[Minibatch]:
        """Packs the minibatches of a step; called from any thread."""
        return [
            pack_minibatch(
                part,
                self.trainer.coordinates,
                self.packing,
                self.config.keep_routing.uncaptured,
                batch_facts(part, self.algorithm),
            )
            for part in _split_groups(with_advantages(trajectories, self.algorithm), self.config.rl.minibatches)
        ]

    # --- training ----------------------------------------------------------------------------------------------------

    def _train_on(self, minibatches: Sequence[Minibatch], step: int) -> dict[str, float]:
        run, config = self.run, self.config
        due = step == 0 or (config.mismatch.every and (step + 1) % config.mismatch.every == 0)
        table: dict[str, dict[str, float]] = {}
        if due or step + 1 == self.steps:
            with run.span("mismatch"):
                table = self._mismatch_table(minibatches)
            run.state.mismatch = table
            run.state.mismatch_first = run.state.mismatch_first or table
        with run.span("train"):
            reports, num_unproved = self._update(minibatches, step)
        with run.span("weights"):
            self.groups.trained()
        is_due = self._is_evaluation_due(step + 1) or (step + 1) % config.weights.every == 0
        with self._publishing(step + 1) if is_due else nullcontext():
            metrics = self._metrics(minibatches, reports, num_unproved, step)
        return metrics | table_metrics(table) | self._update_costs()

    def _metrics(
        self, minibatches: Sequence[Minibatch], reports: Sequence[PassReport], num_unproved: int, step: int
    ) -> dict[str, float]:
        total, num_tokens = sum_reports(reports), round(sum(each.num_tokens for each in minibatches))
        table, updates = RowTable.of(total.rows_RC), [each.update for each in reports if each.update]
        self.run.reporter.log_layers(step + 1, step_metrics.per_layer(total.agreement_LS, total.live_rows_L))
        parts = [[sample.trajectory for sample in minibatch.samples] for minibatch in minibatches]
        tables = [RowTable.of(report.rows_RC) for report in reports]
        metrics = {
            **step_metrics.disagreement(table),
            **step_metrics.policy_metrics(table),
            **step_metrics.load_metrics(total.load_LE),
            **step_metrics.agreement_metrics(total.agreement_LS, total.live_rows_L),
            **step_metrics.update_metrics(updates),
            "replay/rows_verified": float(total.rows_verified),
            "replay/updates_unproved": float(num_unproved),
            **step_metrics.rollout_metrics([*chain.from_iterable(parts)]),
            **turn_metrics([*zip(parts, tables, strict=True)]),
            **step_metrics.loss_metrics(total.loss_sum, num_tokens),
            **step_metrics.mean_of([minibatch.metrics for minibatch in minibatches]),
            "quarantine/count": float(self.run.quarantine.num_refused),
            **self.groups.metrics,
        }
        if self.live is not None:
            metrics["weights/version"] = float(self._published_version)
            metrics |= self.live.collector.take_counts()
        return metrics

    def _update(self, minibatches: Sequence[Minibatch], step: int) -> tuple[list[PassReport], int]:
        """Makes one optimizer step per minibatch. With several, log-probs before the first update are the proximal
        ones. Returns the report of each step, and how many steps enforced routing without a proof."""
        keep = self.config.keep_routing
        first = step * self.config.rl.minibatches + 1
        proved = [is_selected(keep.verify, first + number) for number in range(len(minibatches))]
        algorithm, prepared = self.algorithm, list[PassReport]()
        several = len(minibatches) > 1 and not algorithm.interpolates_proximal
        if keep.mode == "trainer" or several or algorithm.kl_in_reward:
            for number, minibatch in enumerate(minibatches):
                with explained(self.trainer, minibatch.samples):
                    prepared.append(self.trainer.prepare(number, prove=proved[number]))
        # Computed over the groups of all minibatches together, after the KL is subtracted from their rewards.
        advantages = penalised_advantages(minibatches, prepared, algorithm) if algorithm.kl_in_reward else None
        reports = list[PassReport]()
        for number, minibatch in enumerate(minibatches):
            with explained(self.trainer, minibatch.samples):
                of_rollouts = None if advantages is None else advantages[number]
                report = self.trainer.step(number, prove=proved[number], advantages=of_rollouts)
            assert report.update is not None
            self.run.check_update(report.update, f"{STAGE}-{step + 1:06d}-{number}", minibatch.samples)
            reports.append(report)
        return reports, proved.count(False) if self.enforce else 0

    def _mismatch_table(self, minibatches: Sequence[Minibatch]) -> dict[str, dict[str, float]]:
        """Scores the same rollouts with the same weights four times: routing, and sampling mask, each kept and not."""
        table, prove = {}, self.config.keep_routing.verify != "off"
        for routing, scorers in ((True, ("both", "experts")), (False, ("kept_sets", "neither"))):
            rows = []
            for number, minibatch in enumerate(minibatches):
                with explained(self.trainer, minibatch.samples):
                    report = self.trainer.score(number, enforce=routing, prove=prove, full=True)
                rows.append(report.rows_RC)
            gathered = RowTable.of(np.concatenate(rows))
            for name, full in zip(scorers, (False, True), strict=True):
                table[name] = step_metrics.disagreement(gathered, full=full)
        return table

    # --- engine ------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Has an engine on the trainer's devices free its memory for the trainer; does nothing for other engines."""
        if self.config.rollout.is_colocated:
            assert self.live is not None
            with self.run.span("sleep"):
                make_room(self.live.engine)

    @contextmanager
    def _publishing(self, version: int) -> Iterator[None]:
        """Sends the weights to the engine while the context runs.

        Without staleness the engine has them at the end of the context; with staleness it may take them during the next
        step.
        """
        if self.live is None:
            yield
            return
        self._num_published, self._published_version = self._num_published + 1, version
        verify = is_selected(self.config.weights.verify, self._num_published)
        with self.run.span("weights"):
            if self.config.rollout.is_colocated:
                # The state is copied now: later servers fill the devices, and the weights are not on them.
                is_due = self._num_published > 1 and self.run.is_checkpoint_due(version, self.config.rl.steps)
                self.trainer.give_back(stage=self.config.trainer.sleep and is_due)
            finish = self.trainer.publish(version, verify=verify, done=self.groups.expect_update())
        yield
        with self.run.span("weights"):
            self._published = finish()
            self.groups.sent()

    def _update_costs(self) -> dict[str, float]:
        """Returns the metrics of weight updates and of prefix caches since the last call."""
        if self.live is None or self._costs is None:
            return {}
        metrics, self._published = dict(self._published), {}
        before, self._costs = self._costs, replace(self.live.engine.costs)
        return metrics | step_metrics.sampling_metrics(before, self._costs)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate_cold_start(self, first_step: int) -> None:
        """Measures, before the first update, dev and held-out accuracy, and the latter also when made to show the
        work."""
        if first_step == 0 and self.live is not None:
            worked = ["cold_start_worked"] if isinstance(self.live.collector.task, WorkedTask) else []
            self._measure(0, ["dev", "cold_start", *worked], self.live.collector)

    def _evaluate(self, step: int) -> None:
        """Evaluates on dev problems if that is due, and on the held-out problems after the last step."""
        if self.live is not None and self._is_evaluation_due(step):
            self._measure(step, ["dev", "final"] if step == self.steps else ["dev"], self.live.collector)

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.config.evaluation.every
        return step == self.steps or (every > 0 and step % every == 0)

    def _measure(self, step: int, names: Sequence[str], collector: Collector) -> None:
        """Makes and records evaluations, by names of `reporting.EVALUATIONS`; if a signal stops them, the run measures
        when it goes on."""
        sizes = self.config.evaluation

        def measure() -> dict[str, Evaluation]:
            found = dict[str, Evaluation]()
            for name in names:
                split, count = ("dev", sizes.dev_problems) if name == "dev" else ("heldout", sizes.heldout_problems)
                found[name] = evaluate(collector, split, count, version=step, worked=name == "cold_start_worked")
            return found

        with self.run.span("evaluation"):
            self.groups.settle()
            evaluations = self.run.unless_stopped(measure)
        self.run.state.evaluation_due = evaluations is None
        if evaluations is not None:
            self.run.record_evaluations(step, evaluations)


def make_room(engine: PolicyEngine) -> None:
    """Has an engine on the trainer's devices free its memory for the trainer, until the next update of weights."""
    assert isinstance(engine, Sleeper)
    engine.sleep()


def penalised_advantages(
    minibatches: Sequence[Minibatch], prepared: Sequence[PassReport], algorithm: Algorithm
) -> list[NDArray[np.float32]]:
    """Computes advantages from rewards less the KL to the reference; per minibatch float32 [B].

    prepared: reports of each minibatch, with the KL of every trained token.
    """
    kl = []
    for minibatch, report in zip(minibatches, prepared, strict=True):
        table = RowTable.of(report.rows_RC)
        kl.append(np.bincount(table.sample.astype(np.int64), table.kl.astype(np.float64), len(minibatch.samples)))
    trajectories = [sample.trajectory for minibatch in minibatches for sample in minibatch.samples]
    advantages_B = advantages_less_kl(trajectories, np.concatenate(kl), algorithm)
    return np.split(advantages_B, np.cumsum([len(minibatch.samples) for minibatch in minibatches])[:-1])


def is_selected(every: str | int, number: int) -> bool:
    """Returns whether an option (every, off, or N for each N-th time) selects the `number`-th time, from 1."""
    return every == "every" or (isinstance(every, int) and number % every == 0)


def _split_groups(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Splits samples into `parts` minibatches of whole groups, in order; fewer if there are fewer groups."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.trajectory.lineage.group_id, []).append(sample)
    chunks = np.array_split(np.arange(len(groups)), min(parts, len(groups)))
    in_order = list(groups.values())
    return [[sample for i in chunk for sample in in_order[i]] for chunk in chunks]
