"""Reports of a run to people: progress, `metrics.jsonl`, TensorBoard, trackers, plots, reports, `summary.json`, the
closing lines.

Runs in the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from moerl.contract.files import writing
from moerl.diagnostics.alerts import HISTORY, Alert, Announcer, active_alerts
from moerl.diagnostics.plots import draw_curves
from moerl.diagnostics.report.page import PAGE_FILE, write_report
from moerl.diagnostics.report.read_run import report_of_directory
from moerl.diagnostics.summary import RunSummary, closing_lines, write_summary
from moerl.errors import MoerlError, ending, note_later, undoing
from moerl.orchestration.evaluation import Evaluation
from moerl.orchestration.trackers import Trackers
from moerl.telemetry.metrics import check_layer_metrics, check_metrics, named_reward_metric
from moerl.telemetry.progress import make_progress
from moerl.telemetry.sinks import LAYERS_FILE, METRICS_FILE, JsonlSink, MetricSink, read_rows
from moerl.telemetry.tensorboard import TensorBoardSink
from moerl.telemetry.trackers.sink import TrackerSink

EVALUATIONS = {
    "dev": ("accuracy/mean", "response/length_mean", "dev problems, looked at while it trains"),
    "cold_start": ("heldout/accuracy", "heldout/length_mean", "held-out problems, before RL"),
    "cold_start_worked": ("heldout/accuracy_worked", None, "held-out problems, before RL, made to show its work"),
    "final": ("heldout/accuracy", "heldout/length_mean", "held-out problems"),
}
"""Evaluations by name: the metrics of their accuracy and length, and how to call their problems."""


class Reporter:
    """Receiver of what stages report: to the terminal, to the run directory and to trackers.

    Steps count from 1; an evaluation's step is the number of RL steps before it.

    Args:
        tensorboard: True if the run directory gets events for TensorBoard.
        trackers: trackers that are started, not opened.
    """

    def __init__(
        self, run_dir: Path, title: str, *, tensorboard: bool = True, trackers: Sequence[TrackerSink] = ()
    ) -> None:
        self._run_dir, self._title = run_dir, title
        self._progress = make_progress()
        self._rows = _open_rows(run_dir / METRICS_FILE, check_metrics)
        self._layers = _open_rows(run_dir / LAYERS_FILE, check_layer_metrics)
        self._tensorboard = TensorBoardSink(run_dir / "tensorboard") if tensorboard else None
        self._metric_sinks: tuple[MetricSink, ...] = (self._rows, *([self._tensorboard] if self._tensorboard else []))
        self._sinks: tuple[MetricSink, ...] = (*self._metric_sinks, self._layers)
        self._trackers = Trackers(trackers, self.notify)
        # The newest rows of reinforcement learning: alerts are found in them.
        self._recent: Sequence[Mapping[str, Any]] = ()
        self._alerts = Announcer()

    def __enter__(self) -> Reporter:
        self._progress.__enter__()
        with undoing(lambda: self._progress.__exit__(None, None, None)):
            if self._trackers.names:
                self.notify(f"starting trackers: {', '.join(self._trackers.names)}")
                self.begin_part("start of the trackers")
                self._trackers.open()
        for name, sink in ((METRICS_FILE, self._rows), (LAYERS_FILE, self._layers)):
            if sink.torn_bytes:
                self.notify(f"note: {name} ended with {sink.torn_bytes} bytes of an unfinished row; dropped")
        return self

    def __exit__(self, *exc: object) -> None:
        _, error, _ = exc
        try:
            with ending(self._close_sinks), ending(lambda: self._progress.__exit__(*exc)):
                self._trackers.close(error)
        except (MoerlError, OSError) as later:
            if not isinstance(error, BaseException):
                raise
            note_later(error, later)

    def _close_sinks(self) -> None:
        with self._writing():
            for sink in self._sinks:
                sink.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._run_dir / METRICS_FILE)

    def notify(self, text: str) -> None:
        """Shows a line that stays."""
        self._progress.note(text)

    def rewind(self, stage: str, step: int, *, evaluated: bool) -> None:
        """Drops rows of an interrupted process after `step` of `stage`; without `evaluated`, that of its evaluation."""
        with self._writing():
            for sink in self._sinks:
                sink.truncate_after(stage, step, evaluated=evaluated)
        path = self._run_dir / METRICS_FILE
        rows = read_rows(path) if path.exists() else []
        self._trackers.rewind(stage, step, rows, evaluated=evaluated)
        self._recent = [row for row in rows if row["stage"] == "rl"][-HISTORY:]
        # The process before has shown alerts of these rows.
        self._alerts.new(active_alerts(self._recent))

    def sync(self) -> None:
        """Returns when every row so far is on disk."""
        with self._writing():
            for sink in self._sinks:
                sink.sync()
        self._trackers.sync()

    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        self._progress.begin_stage(stage, done=done, total=total)

    def begin_part(self, title: str) -> None:
        """Shows the part of the step that begins now, for users who watch a long step."""
        self._progress.begin_part(title)

    def within(self, done: int, total: int, tokens: int = 0) -> None:
        """Shows how much of the part is done. tokens: number of tokens sampled in it."""
        self._progress.within(done, total, tokens)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the row of one training step."""
        alarming: list[Alert] = []
        if stage == "rl":
            self._recent = [*self._recent, {"stage": stage, "step": step, **metrics}][-HISTORY:]
            active = active_alerts(self._recent)
            metrics, alarming = {**metrics, "alerts/active": float(len(active))}, self._alerts.new(active)
        self._write(stage, step, metrics)
        self._progress.update(step, metrics)
        for alert in alarming:
            self.notify(f"ALERT: {alert}")

    def log_layers(self, step: int, metrics: Mapping[str, Sequence[float]]) -> None:
        """Writes the numbers per MoE layer of one RL step, by name."""
        with self._writing():
            self._layers.write("rl", step, metrics)

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], seconds: Mapping[str, float]) -> None:
        """Writes the row of an evaluation; names are those of `EVALUATIONS`. seconds: spans as metrics."""
        metrics = dict(seconds)
        for name, evaluation in evaluations.items():
            accuracy, length, problems = EVALUATIONS[name]
            if name == "dev":
                metrics |= {named_reward_metric(each): mean for each, mean in evaluation.rewards.items()}
            metrics[accuracy] = evaluation.accuracy
            if length is not None:
                metrics[length] = evaluation.length_mean
            self.notify(
                f"step {step}: accuracy {evaluation.accuracy:.3f} (greedy, {evaluation.num_problems} {problems}), "
                f"{evaluation.length_mean:.1f} tokens"
            )
            metrics |= self._tell_scores(name, evaluation)
            if self._tensorboard is not None:
                with self._writing():
                    for each, text in evaluation.samples.items():
                        title = "/".join(filter(None, ("samples", name, each)))
                        self._tensorboard.write_text("evaluation", step, title, text)
        self._write("evaluation", step, metrics)

    def _tell_scores(self, name: str, evaluation: Evaluation) -> dict[str, float]:
        """Shows all scores but the accuracy; returns, of held-out problems, the metrics of the largest k."""
        told = {each: values for each, values in evaluation.scores.items() if each != "accuracy"}
        if told:
            texts = [f"{each} {value:.3f} [{low:.3f}, {high:.3f}]" for each, (value, low, high) in told.items()]
            self.notify("  " + ", ".join(texts))
        if name == "dev":
            return {}
        found = dict[str, float]()
        for kind, metric in (("pass@", "heldout/pass_at_k"), ("majority@", "heldout/majority_at_k")):
            of_kind = [value for each, (value, _, _) in told.items() if each.startswith(kind)]
            if of_kind:
                found[metric] = of_kind[-1]
        return found

    def finish(self, summary: RunSummary) -> None:
        """Writes plots, report and summary, and shows the closing lines."""
        self.sync()
        self._progress.end()
        with writing(self._run_dir):
            plots = draw_curves(self._run_dir / METRICS_FILE, self._run_dir / "plots", self._title)
        report = self._write_report()
        with writing(self._run_dir):
            # Last: a run directory with a summary is one of a finished run.
            write_summary(summary, self._run_dir)
        for line in closing_lines(summary, self._run_dir):
            self.notify(line)
        if plots:
            self.notify(f"curves: {plots[0]}")
        for line in report:
            self.notify(line)
        for failure in self._trackers.failures:
            self.notify(f"note: {failure}")

    def _write_report(self) -> list[str]:
        """Writes the report on routing mismatch; returns lines for the user. A failed report must not fail a finished
        run; `moerl report` can write it later."""
        path = self._run_dir / PAGE_FILE
        try:
            report = report_of_directory(self._run_dir)
            if report is None:
                return []
            with writing(path):
                write_report(report, path)
        except MoerlError as error:
            return [f"note: no report was written: {error}", f"write it later: moerl report {self._run_dir}"]
        return [f"report: {path}", f"  {report.verdict.text}"]

    def _write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        with self._writing():
            for sink in self._metric_sinks:
                sink.write(stage, step, metrics)
        self._trackers.write(stage, step, metrics)


def _open_rows(path: Path, check: Callable[[Mapping[str, Any]], None]) -> JsonlSink:
    """Opens a file of rows. Raises `MoerlError` if a line of an earlier process is no row, or it cannot be written."""
    try:
        with writing(path):
            return JsonlSink(path, check)
    except ValueError as error:
        raise MoerlError(
            str(error),
            expected="lines that this run wrote",
            remedy="restore the file from a copy, or remove the line; a last line without an end is dropped by itself",
        ) from error
