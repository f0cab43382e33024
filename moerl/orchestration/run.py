"""One run: its configuration, its trainer, its directory, and the state that survives a kill. Runs in the
controller."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moerl.batching.cost import sequence_flops
from moerl.batching.packing import PackOptions
from moerl.batching.rows import Padding
from moerl.buffer.ledger import LEDGER_FILE
from moerl.config.load import CONFIG_FILE, load_resolved
from moerl.config.schema import RunConfig
from moerl.contract.batch import TrainSample
from moerl.contract.disk import write_parquet
from moerl.contract.files import atomic_file, writing
from moerl.contract.ports import PolicyEngine, Task
from moerl.contract.quarantine import Quarantine
from moerl.contract.tokenizer import Tokenizer
from moerl.contract.trainer import Stage, Trainer, UpdateReport
from moerl.diagnostics.summary import RunSummary
from moerl.errors import CheckpointError, MoerlError
from moerl.machine.stop_signals import StopRequest
from moerl.models.description import ModelDescription
from moerl.orchestration import step_metrics
from moerl.orchestration.batches import Minibatch
from moerl.orchestration.evaluation import Evaluation
from moerl.orchestration.reporting import Reporter
from moerl.orchestration.run_state import STAGE_ORDER, RunState, find_state_problem
from moerl.telemetry.progress import PARTS
from moerl.telemetry.sinks import METRICS_FILE, read_rows
from moerl.telemetry.spans import Stopwatch, peak_rss_bytes
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointName, CheckpointStore


class RunStoppedError(Exception):
    """A signal stopped the run; the state that it can go on from is on disk."""


class Run:
    """State and services that the stages of a run share.

    Args:
        model: model that is trained.
        reporter: gets metrics and progress.

    Attributes:
        quarantine: check of records by the contract; keeps those that break it.
        stop: request to stop this process; the command that opens the run replaces it by the process's own.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        task: Task,
        tokenizer: Tokenizer,
        model: ModelDescription,
        reporter: Reporter,
    ) -> None:
        self.config, self.trainer, self.task, self.tokenizer, self.model = config, trainer, task, tokenizer, model
        self.reporter = reporter
        self.state = RunState()
        self.quarantine = Quarantine(config.run_dir / "quarantine", config.quarantine.max_rate, spec=model.spec)
        self.stopwatch = Stopwatch()
        self.stop = StopRequest()
        self.clear_devices: Callable[[], None] | None = None
        """Ends the engine on the trainer's devices, before the checkpoint of a run that a signal stops; None if there
        is no need."""
        self.started = self._last_step = time.monotonic()
        """Begin of the command, by `time.monotonic`."""
        self._checkpoint: tuple[str, int, Path] | None = None
        self._saved: tuple[str, int] | None = None
        self._said: set[str] = set()
        self._store = CheckpointStore(config.run_dir / CHECKPOINTS, config.checkpoint.keep, find_state_problem)

    @property
    def wall_seconds(self) -> float:
        """Seconds of the whole run, its start and earlier processes of a resumed run included."""
        return self.state.wall_seconds + time.monotonic() - self.started

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of this process, the largest over the processes that the run has had."""
        return max(self.state.peak_rss_bytes, peak_rss_bytes())

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the seconds of a part of a step, and shows that the part has begun."""
        self.reporter.begin_part(PARTS[name])
        with self.stopwatch.span(name):
            yield

    def build(self, stage: Stage, folder: Path, engine: PolicyEngine | None = None) -> None:
        """Has the trainer build a stage from a model directory, and shows the trainer's notes once.

        Args:
            engine: as in `Trainer.build`.
        """
        self.trainer.build(stage, folder, self.model.spec, engine)
        for note in self.trainer.notes:
            if note not in self._said:
                self.reporter.notify(note)
        self._said.update(self.trainer.notes)

    def packing(self, model: ModelDescription) -> PackOptions:
        """Returns how sequences share microbatches of a model of this run: the layout's padding, ranks balanced by
        operations."""
        dims = self.config.parallel.dims
        return PackOptions(
            self.config.trainer.microbatch_tokens,
            Padding.of(dims),
            cost=sequence_flops(model),
            count_multiple=dims.microbatch_multiple,
            share_prompts=self.trainer.shares_prompts,
            scores=self.config.algorithm.needs,
        )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def load_latest(self) -> None:
        """Finds the newest valid checkpoint of an interrupted run and loads its run state.

        Raises:
            CheckpointError: checkpoints exist and none of them is valid, or they are gone.
        """
        found = self._store.latest()
        if found is None:
            if trace := self._trace_of_a_checkpoint():
                raise CheckpointError(
                    f"the checkpoints of {self.config.run_dir} are gone",
                    seen=f"{trace}, without any checkpoint",
                    expected=f"at least one in {self._store.folder}",
                    remedy="restore a checkpoint directory from a copy, or start a new run with another run_dir",
                )
            self.reporter.rewind(STAGE_ORDER[0], 0, evaluated=True)
            self.reporter.notify("the run was stopped before its first checkpoint: starting from the beginning")
            return
        for problem in found.skipped:
            self.reporter.notify(f"WARNING: corrupt checkpoint left aside, falling back to the one before: {problem}")
        stage, step = found.state["stage"], int(found.state["step"])
        self.state = RunState(**found.state["run"])
        self.reporter.rewind(stage, step, evaluated=not self.state.evaluation_due)
        self.quarantine.restore(self.state.quarantine)
        self._checkpoint, self._saved = (stage, step, found.path), (stage, step)
        self.reporter.notify(f"{stage}: going on from step {step} ({found.path})")

    def _trace_of_a_checkpoint(self) -> str | None:
        """Returns, in words, a trace that only a run with a checkpoint leaves; None if there is none."""
        last = self._store.last_written()
        if last is not None:
            return f"{last} was written"
        for model in ("cold_start", "final_model"):
            if (self.config.run_dir / model).exists():
                return f"there is {model}"
        metrics = self.config.run_dir / METRICS_FILE
        rows = read_rows(metrics) if metrics.exists() else []
        if self.config.sft.steps and any(row["stage"] == "rl" for row in rows):
            return f"{METRICS_FILE} has rows of reinforcement learning"
        steps = max((row["step"] for row in rows), default=0)
        # The stored configuration has the `every` of the process before. One may be in flight until the next is due.
        every = load_resolved(self.config.run_dir / CONFIG_FILE).checkpoint.every
        return f"{METRICS_FILE} has {steps} steps" if every and steps > 2 * every else None

    @property
    def position(self) -> tuple[str, int]:
        """Stage and step that the run goes on from."""
        return (STAGE_ORDER[0], 0) if self._checkpoint is None else self._checkpoint[:2]

    def has_done(self, stage: str, step: int) -> bool:
        """Returns True if the checkpoint that `load_latest` found is of `step` of `stage`, or later."""
        if self._checkpoint is None:
            return False
        found_stage, found_step, _ = self._checkpoint
        return (STAGE_ORDER.index(found_stage), found_step) >= (STAGE_ORDER.index(stage), step)

    def restore(self, stage: str) -> int:
        """Has the trainer load the checkpoint of `load_latest` if it is of this stage; returns its step, else 0."""
        if self._checkpoint is None or self._checkpoint[0] != stage:
            return 0
        _, step, path = self._checkpoint
        self.trainer.restore(path)
        return step

    def checkpoint_if_due(self, stage: str, step: int, last: int) -> bool:
        """Checks the checkpoint in flight, begins one if it is due, and ends the run if a stop signal came.

        Returns:
            True if one was begun.

        Raises:
            CheckpointError: one could not be written; the run stops rather than go on unsaved.
            RunStoppedError: as `stop_if_told`.
        """
        self.trainer.poll_save()
        is_due = self.is_checkpoint_due(step, last)
        if is_due:
            self.checkpoint(stage, step)
        self.stop_if_told(stage, step)
        return is_due

    def is_checkpoint_due(self, step: int, last: int) -> bool:
        """Returns whether a checkpoint follows a step: `checkpoint.every` names the step, or the step is the last."""
        every = self.config.checkpoint.every
        return step == last or bool(every and step % every == 0)

    def checkpoint(self, stage: str, step: int) -> None:
        """Begins a checkpoint of the trainer's and the run's present state."""
        with self.span("checkpoint"):
            self.reporter.sync()
            state = asdict(self.state) | {
                "wall_seconds": self.wall_seconds,
                "peak_rss_bytes": self.peak_rss_bytes,
                "quarantine": self.quarantine.counters(),
            }
            name = str(CheckpointName(STAGE_ORDER.index(stage), stage, step))
            self.trainer.save(name, {"stage": stage, "step": step, "run": state}, sorted(self._store.corrupt))
        self._saved = (stage, step)
        self._last_step = time.monotonic()

    # --- stopping ----------------------------------------------------------------------------------------------------

    def unless_stopped[T](self, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`; a stop signal ends the work at once, and None is returned.

        Such work is done again when the run goes on, so records that it refused do not count.
        """
        counters = self.quarantine.counters()
        result = self.stop.unless_stopped(work)
        if result is None:
            self.quarantine.restore(counters)
        return result

    def stop_if_told(self, stage: str, step: int) -> None:
        """Ends the run after `step` steps of a stage if a stop signal came.

        Raises:
            RunStoppedError: a signal came, and a checkpoint of these steps is on disk.
            CheckpointError: the checkpoint could not be written.
        """
        if not self.stop.signal:
            return
        if step and self._saved != (stage, step):
            if self.clear_devices is not None:
                self.clear_devices()
            self.checkpoint(stage, step)
        self.trainer.poll_save(wait=True)
        self.reporter.notify(f"stopped after step {step} of stage {stage}")
        raise RunStoppedError

    def leave_if_told(self) -> None:
        """Ends the run, without a new checkpoint, if a stop signal came.

        Raises:
            RunStoppedError: a signal came, and no checkpoint is in flight any more.
        """
        if self.stop.signal:
            self.trainer.poll_save(wait=True)
            self.reporter.notify("stopped before the next step")
            raise RunStoppedError

    # --- what is recorded --------------------------------------------------------------------------------------------

    def log(self, stage: str, step: int, metrics: dict[str, float], minibatches: Sequence[Minibatch]) -> None:
        """Records one training step with the seconds of its stages and its throughput.

        The step ends here: evaluations and checkpoints that follow are not part of its time.

        Args:
            minibatches: minibatches that the step was trained on.
        """
        num_tokens = round(sum(minibatch.num_tokens for minibatch in minibatches))
        self.state.tokens_trained += num_tokens
        now = time.monotonic()
        seconds = now - self._last_step
        self._last_step = now
        spans = self.stopwatch.lap()
        for name, stage_seconds in (("rollouts", "seconds/rollout"), ("weights", "seconds/weights")):
            if stage_seconds in spans:
                spans[f"waiting/trainer_for_{name}"] = spans[stage_seconds] / seconds
        devices, num_ranks = self.trainer.device_use(), self.config.parallel.world_size
        flops, dtype = sum(minibatch.model_flops for minibatch in minibatches), self.config.model.dtype
        metrics = metrics | spans
        metrics |= step_metrics.speed_metrics(flops, spans["seconds/train"], num_ranks, devices, dtype)
        metrics |= step_metrics.device_metrics(devices) | {
            "seconds/step": seconds,
            "tokens/trained": float(self.state.tokens_trained),
            "throughput/tokens_per_second": num_tokens / seconds,
            "memory/peak_rss_bytes": float(max(self.peak_rss_bytes, *self.trainer.peak_rss_bytes, 0)),
        }
        self.reporter.log(stage, step, metrics)

    def check_update(self, update: UpdateReport, name: str, samples: Sequence[TrainSample] = ()) -> None:
        """Writes the batch of a skipped update as ``skipped/<name>.parquet``, and stops after too many in a row.

        Raises:
            MoerlError: more than `trainer.max_skipped_updates` in a row were skipped.
        """
        if not update.skipped:
            return
        where = f"{name} (the batch follows from the seed)"
        if samples:
            path = self.config.run_dir / "skipped" / f"{name}.parquet"
            with writing(path):
                write_parquet(path, [sample.trajectory for sample in samples])
            where = str(path)
        allowed = self.config.trainer.max_skipped_updates
        self.reporter.notify(
            f"WARNING: the gradient was not finite, update skipped ({update.skipped_in_a_row} in a row, {allowed}"
            f" allowed); its batch: {where}"
        )
        if update.skipped_in_a_row > allowed:
            raise MoerlError(
                "the gradient is not finite",
                seen=f"{update.skipped_in_a_row} skipped updates in a row",
                expected=f"at most trainer.max_skipped_updates = {allowed}",
                remedy=f"the weights are unchanged; inspect {where}; raise trainer.max_skipped_updates to go on, or"
                " start a new run with a lower optimizer.lr",
            )

    def record_evaluations(self, step: int, evaluations: dict[str, Evaluation]) -> None:
        """Stores and reports the evaluations made after `step` RL steps, by name (`reporting.EVALUATIONS`)."""
        self.state.evaluations |= {name: asdict(evaluation) for name, evaluation in evaluations.items()}
        self.reporter.evaluated(step, evaluations, self.stopwatch.lap())
        self._last_step = time.monotonic()

    def keep_groups(self, step: int, groups: dict[str, Any]) -> None:
        """Stores the state of queue and ledger for the next checkpoint, and writes the ledger for `moerl status`."""
        self.state.groups = groups
        path = self.config.run_dir / LEDGER_FILE
        with writing(path), atomic_file(path) as file:
            file.write_text(json.dumps({"step": step, "steps": self.config.rl.steps, **groups["ledger"]}) + "\n")

    def is_dump_due(self, step: int) -> bool:
        every = self.config.dump.rollouts_every
        return bool(every) and (step == 1 or step % every == 0)

    def summary(self, *, steps: int, engine_bytes: int = 0) -> RunSummary:
        """Returns the numbers of the run so far.

        Args:
            engine_bytes: peak memory of the engine's own process; 0 without one.
        """
        measured = [e["num_problems"] for n, e in self.state.evaluations.items() if n != "dev"]

        def figure(evaluation: str, name: str) -> float | None:
            return self.state.evaluations.get(evaluation, {}).get(name)

        return RunSummary(
            recipe=self.config.recipe,
            seed=self.config.seed,
            steps=steps,
            tokens_trained=self.state.tokens_trained,
            wall_seconds=self.wall_seconds,
            peak_rss_bytes=self.peak_rss_bytes + sum(self.trainer.peak_rss_bytes) + engine_bytes,
            heldout_problems=min(measured, default=0),
            heldout_accuracy_cold_start=figure("cold_start", "accuracy"),
            heldout_accuracy_cold_start_worked=figure("cold_start_worked", "accuracy"),
            heldout_accuracy_final=figure("final", "accuracy"),
            response_length_cold_start=figure("cold_start", "length_mean"),
            response_length_final=figure("final", "length_mean"),
            num_quarantined=self.quarantine.num_refused,
            mismatch_first=self.state.mismatch_first,
            mismatch=self.state.mismatch,
        )
