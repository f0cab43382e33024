"""Progress for a user who watches: a live display on a terminal, heartbeat lines everywhere else.

Runs in the controller, and in `moerl diagnose`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from moerl.printable import printable

HEARTBEAT_SECONDS = 10.0
PART_SECONDS = 30.0
"""Longest silence of a run that writes lines."""
PARTS = {
    "rollout": "rollouts",
    "mismatch": "mismatch table, microbatches",
    "train": "training, microbatches",
    "weights": "weights to the engine",
    "sleep": "memory of servers to the trainer",
    "evaluation": "evaluation, responses",
    "checkpoint": "checkpoint",
}
"""Texts for the user while a span (`moerl.telemetry.spans`) is under way, by name of the span."""
STAGE_TITLES = {"sft": "cold start", "rl": "reinforcement learning"}


_THROUGHPUT = "throughput/tokens_per_second"
_FIGURES = (
    ("sft/loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("accuracy/mean", "accuracy", "{:.3f}"),
    ("response/length_mean", "length", "{:.0f}"),
    ("mismatch/logprob_abs_mean", "mismatch", "{:.1e}"),
    (_THROUGHPUT, "tokens/s", "{:,.0f}"),
)
"""Metrics with a short label and the format of the value."""


def figures_text(metrics: Mapping[str, float]) -> str:
    """Returns the figures worth watching, in a fixed order; those without a value are left out."""
    return "  ".join(f"{label} {form.format(metrics[name])}" for name, label, form in _FIGURES if name in metrics)


def duration_text(seconds: float) -> str:
    """Formats seconds as ``1h02m``, ``3m05s`` or ``42s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


class Pace:
    """Pace of a stage, by the steps done since it began in this process: the time left, and tokens per second."""

    def __init__(self, first_step: int, total_steps: int, now: float) -> None:
        self._first, self._total, self._began = first_step, total_steps, now
        self._tokens = self._seconds = 0.0

    def seconds_left(self, step: int, now: float) -> float | None:
        """Estimates the seconds left after `step` steps of the stage; None while this process has done none."""
        done = step - self._first
        return None if done <= 0 else (now - self._began) / done * (self._total - step)

    def with_mean(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Counts the step that has these metrics. Returns the metrics with the tokens per second of all steps so far in
        place of those of this step, which jump from step to step."""
        seconds = metrics.get("seconds/step")
        if not seconds:
            return metrics
        self._seconds += seconds
        self._tokens += metrics[_THROUGHPUT] * seconds
        return {**metrics, _THROUGHPUT: self._tokens / self._seconds}


class ProgressPart:
    """Part of a step: its title, its start, and how much of it is done. Any thread may ask for its `text`."""

    def __init__(self, title: str, now: float) -> None:
        self._title, self._began = title, now
        self._done, self._total, self._tokens = 0, 0, 0

    def within(self, done: int, total: int, tokens: int) -> None:
        self._done, self._total, self._tokens = done, total, tokens

    def text(self, now: float) -> str:
        seconds, done, total = now - self._began, self._done, self._total
        words = [f"{self._title} {done} of {total}" if total else self._title]
        if self._tokens and seconds > 0:
            words.append(f"{self._tokens / seconds:,.0f} tokens/s")
        left = f", {duration_text(seconds / done * (total - done))} left" if 0 < done < total else ""
        return "  ".join([*words, f"{duration_text(seconds)} so far{left}"])


class ProgressDisplay(ABC):
    """Display of how far a run is. Use it as a context manager; call `begin_stage` before `update`."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._pace = Pace(0, 0, 0.0)
        self._part: ProgressPart | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exc: object) -> None: ...

    @abstractmethod
    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        """Shows that a stage (sft or rl) starts, or goes on, after `done` of `total` steps."""

    @abstractmethod
    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that `step` steps of the stage are done; `metrics` are those of the last one. Called for each step."""

    def begin_part(self, title: str) -> None:
        """Shows that a part of the step, or of the start, begins now."""
        self._part = ProgressPart(title, self._clock())

    def within(self, done: int, total: int, tokens: int = 0) -> None:
        """Shows how much of the part is done. tokens: number of tokens sampled in it."""
        if self._part is not None:
            self._part.within(done, total, tokens)

    def note(self, text: str) -> None:
        """Shows a line that stays: an evaluation, a checkpoint, a warning."""
        # A line is for logs: no wrapping at a width, no markup.
        self._console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

    def end(self) -> None:
        """Ends the display of steps: later notes are the last lines on the screen."""
        self._part = None


def make_progress(console: Console | None = None) -> ProgressDisplay:
    """Makes a live display if `console` (standard output by default) is a terminal, else heartbeat lines."""
    console = console or Console()
    return LiveProgress(console) if console.is_terminal else HeartbeatProgress(console, part_seconds=PART_SECONDS)


class HeartbeatProgress(ProgressDisplay):
    """Display of one line at the first and last step of a stage and at most every `heartbeat_seconds` between them.

    If no line came for `part_seconds`, `beat` prints the part of the step that is under way; inside of the context a
    thread calls it.
    """

    def __init__(
        self,
        console: Console,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        part_seconds: float = PART_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self._every, self._part_every = heartbeat_seconds, part_seconds
        self._stage, self._step, self._total = "", 0, 0
        self._last: float | None = None
        self._last_line = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_ended, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(min(1.0, self._part_every)):
            self.beat()

    def beat(self) -> None:
        """Prints how far the step is, unless a line came lately."""
        now, part = self._clock(), self._part
        if part is None or now - self._last_line < self._part_every:
            return
        step = f"{self._stage} {self._step + 1}/{self._total}  " if self._step < self._total else ""
        self.note(f"{step}{part.text(now)}")

    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        self._stage, self._step, self._total = stage, done, total
        self._pace = Pace(done, total, self._clock())
        self._last = None
        self.note(f"{STAGE_TITLES[stage]}: {total - done} of {total} steps to do")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        now, self._step, metrics = self._clock(), step, self._pace.with_mean(metrics)
        if self._last is not None and now - self._last < self._every and step < self._total:
            return
        self._last = now
        left = self._pace.seconds_left(step, now)
        eta = "" if left is None else f"  ETA {duration_text(left)}"
        self.note(f"{self._stage} {step}/{self._total}  {figures_text(metrics)}{eta}")

    def note(self, text: str) -> None:
        self._last_line = self._clock()
        super().note(text)


class _Bars(Progress):
    """Bars with lines of text below them, cut at the width of the terminal; a column of the text would crowd out the
    bars."""

    below = ""
    part: Callable[[], str] | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for line in (self.below, self.part() if self.part is not None else ""):
            if line:
                yield Text(line, no_wrap=True, overflow="ellipsis")


class LiveProgress(ProgressDisplay):
    """Display of one bar per stage, with figures of the last step and the present part below; notes scroll by above."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._bars = _Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._bars.part = self._part_text

    def _part_text(self) -> str:
        part = self._part
        return "" if part is None else part.text(self._clock())

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        self._pace = Pace(done, total, self._clock())
        self._bars.below = ""
        self._task = self._bars.add_task(STAGE_TITLES[stage], total=total, completed=done, left="")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._task is None:
            raise ValueError("update before begin_stage")
        left = self._pace.seconds_left(step, self._clock())
        self._bars.below = figures_text(self._pace.with_mean(metrics))
        self._bars.update(self._task, completed=step, left=f"ETA {duration_text(left)}" if left else "")

    def end(self) -> None:
        super().end()
        self._bars.stop()
