"""What a user watches: a live display on a terminal, heartbeat lines everywhere else. Runs in rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from moerl.printable import printable

HEARTBEAT_SECONDS = 10.0
STAGE_TITLES = {"sft": "cold start", "rl": "reinforcement learning"}


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric with a short label and the format of its value."""

    metric: str
    label: str
    format: str


_FIGURES = (
    _Figure("sft/loss", "loss", "{:.3f}"),
    _Figure("reward/mean", "reward", "{:.3f}"),
    _Figure("accuracy/mean", "accuracy", "{:.3f}"),
    _Figure("response/length_mean", "length", "{:.0f}"),
    _Figure("mismatch/logprob_abs_mean", "mismatch", "{:.1e}"),
    _Figure("throughput/tokens_per_second", "tokens/s", "{:,.0f}"),
)


def figures_text(metrics: Mapping[str, float]) -> str:
    """The figures worth watching, in a fixed order; those without a value are left out."""
    shown = [f for f in _FIGURES if f.metric in metrics]
    return "  ".join(f"{f.label} {f.format.format(metrics[f.metric])}" for f in shown)


def duration_text(seconds: float) -> str:
    """Seconds as ``1h02m``, ``3m05s`` or ``42s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


class Pace:
    """Time left in a stage, from the mean time of the steps done since it began in this process."""

    def __init__(self, first_step: int, total_steps: int, now: float) -> None:
        self._first, self._total, self._began = first_step, total_steps, now

    def seconds_left(self, step: int, now: float) -> float | None:
        """`step`: steps done. None while none was done in this process."""
        done = step - self._first
        return None if done <= 0 else (now - self._began) / done * (self._total - step)


class ProgressDisplay(Protocol):
    """Shows how far a run is. Use as a context manager; `begin_stage` comes before its `update`s."""

    def __enter__(self) -> ProgressDisplay: ...

    def __exit__(self, *exc: object) -> None: ...

    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        """A stage (sft or rl) starts, or goes on, with `done` of `total` steps behind it."""
        ...

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps of the stage are done; `metrics` are those of the last one."""
        ...

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint, a warning."""
        ...

    def end(self) -> None:
        """No step comes any more: later notes are the last lines on the screen."""
        ...


def make_progress(console: Console | None = None) -> ProgressDisplay:
    """A live display where `console` (standard output by default) is a terminal, heartbeat lines elsewhere."""
    console = console or Console()
    return LiveProgress(console) if console.is_terminal else HeartbeatProgress(console)


class HeartbeatProgress:
    """One line at the first and last step of a stage and at most every `heartbeat_seconds` between them."""

    def __init__(
        self,
        console: Console,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._every, self._clock = console, heartbeat_seconds, clock
        self._stage, self._total = "", 0
        self._pace = Pace(0, 0, 0.0)
        self._last: float | None = None

    def __enter__(self) -> HeartbeatProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def begin_stage(self, stage: str, *, done: int, total: int) -> None:
        self._stage, self._total = stage, total
        self._pace = Pace(done, total, self._clock())
        self._last = None
        self.note(f"{STAGE_TITLES[stage]}: {total - done} of {total} steps to do")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        if self._last is not None and now - self._last < self._every and step < self._total:
            return
        self._last = now
        left = self._pace.seconds_left(step, now)
        eta = "" if left is None else f"  ETA {duration_text(left)}"
        self.note(f"{self._stage} {step}/{self._total}  {figures_text(metrics)}{eta}")

    def note(self, text: str) -> None:
        # A line is for logs: no wrapping at a width, no markup.
        self._console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

    def end(self) -> None:
        return None


class _Bars(Progress):
    """Bars with one line of text below them, cut where the terminal ends; a column of its own would crowd them out."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


class LiveProgress:
    """One bar per stage, the figures of the last step below; notes scroll by above."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars = _Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._pace = Pace(0, 0, 0.0)

    def __enter__(self) -> LiveProgress:
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
        self._bars.below = figures_text(metrics)
        self._bars.update(self._task, completed=step, left=f"ETA {duration_text(left)}" if left else "")

    def note(self, text: str) -> None:
        self._bars.console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

    def end(self) -> None:
        self._bars.stop()
