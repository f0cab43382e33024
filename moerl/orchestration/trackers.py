"""The trackers of a run: opened before any model is loaded, sent every row, left out once they fail. Runs in the
controller."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.config.schema import MetricsConfig
from moerl.config.trackers import tracker_environment
from moerl.contract.files import writing
from moerl.errors import ConfigError, undoing
from moerl.telemetry.trackers.sink import CLOSE_SECONDS, TRACKERS, TrackerError, TrackerSink
from moerl.telemetry.trackers.tracker import Opening

_HURRIED_SECONDS = 5.0
_SECRET = re.compile(r"(api|admin|access|private)_?key|secret|password|credential|(auth|access|api|hf)_?token", re.I)


class Trackers:
    """Trackers of a run.

    One that cannot be started ends the run, before it costs anything. One that fails later is reported once and left
    out from then on: a training of days must not end for a picture of it, and `metrics.jsonl` has every row.

    Args:
        sinks: trackers that are started, not opened.
        notify: called with a line about a failure.

    Attributes:
        failures: line about each tracker that is left out.
    """

    def __init__(self, sinks: Iterable[TrackerSink], notify: Callable[[str], None]) -> None:
        self._sinks, self._notify = list(sinks), notify
        self.failures: list[str] = []
        self._latest = ""

    @property
    def names(self) -> list[str]:
        """Names of the trackers that are not left out."""
        return [sink.name for sink in self._sinks]

    def open(self) -> None:
        """Waits until all trackers accept rows. Raises `ConfigError` if one does not, after ending all of them."""
        with undoing(lambda: [sink.end() for sink in self._sinks]):  # an interrupt, too, leaves no process behind
            for sink in self._sinks:
                try:
                    with writing(sink.log):
                        sink.open()
                except TrackerError as error:
                    raise ConfigError(
                        f"metrics.sinks: {sink.name} cannot be started",
                        seen=str(error),
                        expected="a tracker that takes rows",
                        remedy=f"read {sink.log} and correct the settings of {sink.name}, or leave it out of"
                        " metrics.sinks",
                    ) from error

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.write(stage, step, metrics))
        self._latest = f"step {step} of {stage}"

    def rewind(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]], *, evaluated: bool) -> None:
        """Notes that the run goes on after `step` of `stage`; a tracker that is new to the run gets its `rows` so
        far."""

        def rewind_one(sink: TrackerSink) -> None:
            if not sink.is_new:
                sink.truncate_after(stage, step, evaluated=evaluated)
                return
            for row in rows:
                metrics = {name: value for name, value in row.items() if name not in ("stage", "step")}
                sink.write(row["stage"], row["step"], metrics)

        self._each(rewind_one)

    def sync(self) -> None:
        self._each(lambda sink: sink.sync())

    def close(self, error: object) -> None:
        """Ends the trackers' runs. error: the error that ends the run, or None; after an interrupt the wait is
        short."""
        is_hurried = error is not None and not isinstance(error, Exception)
        seconds = _HURRIED_SECONDS if is_hurried else CLOSE_SECONDS
        self._each(lambda sink: sink.close(failed=error is not None, seconds=seconds))
        self._sinks = []

    def _each(self, call: Callable[[TrackerSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except TrackerError as error:
                self._sinks.remove(sink)
                sink.end()
                after = f" after {self._latest}" if self._latest else ""
                text = (
                    f"{sink.name} failed{after}: {error}; it gets no more rows and may lack the latest, metrics.jsonl"
                    f" has all; log: {sink.log}"
                )
                self.failures.append(text)
                self._notify(f"WARNING: {text}")


def start_trackers(metrics: MetricsConfig, run_dir: Path, settings: Mapping[str, Any]) -> list[TrackerSink]:
    """Starts the process of every tracker in `metrics.sinks`; does not wait for them. settings: configuration of the
    run, as plain data."""
    opening = Opening(metrics.project, run_dir.name, without_secrets(settings))
    started: list[TrackerSink] = []
    for name in TRACKERS:
        if name in metrics.sinks:
            folder = run_dir / name
            with writing(folder):
                started.append(TrackerSink(name, folder, opening, tracker_environment(name, folder)))
    return started


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration for others to read: values of keys with a name like a secret's are left out."""
    return {
        name: without_secrets(value)
        if isinstance(value, Mapping)
        else "(left out)"
        if _SECRET.search(name) and value is not None
        else value
        for name, value in config.items()
    }
