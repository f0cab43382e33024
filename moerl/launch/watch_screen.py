"""The screen of `moerl watch`: lines that fit a terminal of 80 columns, with a legend of their words. Torch-free."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from moerl.buffer.ledger import Ledger
from moerl.diagnostics.alerts import active_alerts
from moerl.telemetry.metrics import SCORERS
from moerl.telemetry.progress import STAGE_TITLES, duration_text

SHOWN_ROWS = 8
"""Most rows of the table of steps."""
_LEAST_ROWS = 2
_PACE_ROWS = 20
"""Newest steps that the time left is estimated from."""
_LABEL = 13
"""Characters in front of the text of a line."""
_QUARANTINED, _SPEED = "quarantine/count", "throughput/tokens_per_second"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Contents of a run directory at one moment."""

    rows: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl, of all stages."""
    ledger: Ledger | None
    """Counts of rollouts; None before the first step."""
    steps: int
    """Planned steps of RL; 0 = not known."""
    state: str
    """Text that begins with running, finished or stopped, for people."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the terminal, in characters."""

    columns: int
    """Characters of a line."""
    lines: int | None = None
    """Lines of the screen; None = output that scrolls, of any length."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table. meaning: for the legend. width: of the longest value with the space in front of it."""

    title: str
    metric: str
    format: str
    width: int
    meaning: str


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}", 8, "mean of the step"),
    _Column("length", "response/length_mean", "{:,.0f}", 8, "mean tokens of a response"),
    _Column(
        "mismatch",
        "mismatch/logprob_abs_mean",
        "{:.1e}",
        10,
        "mean distance of the trainer's log-probability of a token to the sampler's, in nats (0.01 nats: about 1%)",
    ),
    _Column("far", "mismatch/share_above_ln2", "{:.1%}", 8, "tokens off by more than a factor of 2"),
    _Column("unrouted", "routing/live_rows", "{:,.0f}", 11, "tokens x layers whose experts were not recorded"),
    _Column("age", "staleness/age_mean", "{:.1f}", 6, "mean weight updates since sampling"),
    _Column("waiting", "groups/waiting", "{:,.0f}", 9, "finished groups of responses in the queue"),
    _Column("seconds", "seconds/step", "{:,.1f}", 10, "of the step"),
)
_LINES = (_Column("quarantined", _QUARANTINED, "{:,.0f}", 0, ""), _Column("tokens/s", _SPEED, "{:,.0f}", 0, ""))
"""Figures with a line of their own on the screen."""


_TABLE_LEGEND = (
    "routing: experts of tokens, chosen by the trainer (own) or by the sampler (recorded);"
    " kept sets: tokens that top-p, top-k, min-p left"
)


def screen(snapshot: Snapshot, size: Size) -> list[str]:
    """Returns the state of a run, its alerts, its last steps and the legend, line by line. No line is wider than the
    terminal, unless a single word is."""
    steps = steps_of(snapshot.rows)
    alerts = [line for alert in active_alerts(snapshot.rows) for line in _wrapped(f"ALERT: {alert}", size, "  ")]
    top = [*_state(snapshot, steps, size), *(alerts or _line("alerts", "no alerts", size))]
    if not steps:
        return top
    words = [f"{column.title}: {column.meaning}" for column in _shown_columns(steps[-SHOWN_ROWS:])]
    legend = ["", *_wrapped("; ".join(words), size, "")] if words else []
    table = _mismatch_table(steps, size)
    room = SHOWN_ROWS if size.lines is None else size.lines - len(top) - len(legend) - 2
    # A low terminal shows the newest steps rather than the table.
    table = table if size.lines is None or room >= len(table) + _LEAST_ROWS else []
    shown = SHOWN_ROWS if size.lines is None else min(SHOWN_ROWS, room - len(table))
    return [*top, "", *_table(steps[-max(1, shown) :]), *legend, *table]


def step_line(row: Mapping[str, Any]) -> str:
    """Returns one step on one line of a log; figures that the row lacks are left out."""
    figures = [f"{c.title} {c.format.format(row[c.metric])}" for c in (*_COLUMNS, *_LINES) if c.metric in row]
    return f"step {row['step']}  " + "  ".join(figures)


def steps_of(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows of reinforcement learning."""
    return [row for row in rows if row["stage"] == "rl"]


def state_lines(state: str, size: Size) -> list[str]:
    """Returns the lines that say whether the run goes on."""
    return _line("state", state, size)


def _state(snapshot: Snapshot, steps: Sequence[Mapping[str, Any]], size: Size) -> list[str]:
    lines = state_lines(snapshot.state, size)
    if not steps:
        begun = "no step is done yet"
        if snapshot.rows:
            stage, step = snapshot.rows[-1]["stage"], snapshot.rows[-1]["step"]
            begun = f"{STAGE_TITLES.get(stage, stage)}, step {step}"
        return [*lines, *_line("step", begun, size)]
    of = f" of {snapshot.steps}" if snapshot.steps else ""
    lines += _line("step", f"{steps[-1]['step']}{of}{_time_left(steps, snapshot)}", size)
    measured = [row for row in snapshot.rows if row["stage"] == "evaluation" and "accuracy/mean" in row]
    if measured:
        where = f"of the development problems are right after step {measured[-1]['step']}"
        lines += _line("accuracy", f"{measured[-1]['accuracy/mean']:.1%} {where}", size)
    if snapshot.ledger is not None:
        ledger = snapshot.ledger
        counts = (
            f"{ledger.trained:,} trained, {ledger.filtered.total():,} left out by filters, {ledger.pending:,} pending"
        )
        lines += _line("responses", f"{ledger.issued:,} asked for: {counts}", size)
    last = steps[-1]
    if _QUARANTINED in last:
        lines += _line("quarantined", f"{last[_QUARANTINED]:,.0f} that broke a rule and are not trained on", size)
    if _SPEED in last:
        lines += _line("tokens/s", f"{last[_SPEED]:,.0f} trained per second of the last step", size)
    return lines


def _time_left(steps: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> str:
    seconds = [row["seconds/step"] for row in steps[-_PACE_ROWS:] if "seconds/step" in row]
    left = snapshot.steps - steps[-1]["step"]
    if not seconds or left <= 0 or not snapshot.state.startswith("running"):
        return ""
    each = median(seconds)
    return f", {duration_text(each)} each, {duration_text(math.ceil(each * left))} left"


def _table(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = _shown_columns(shown)
    head = "".join(f"{column.title:>{column.width}}" for column in columns)
    body = [
        f"{row['step']:>6}"
        + "".join(f"{c.format.format(row[c.metric]) if c.metric in row else '':>{c.width}}" for c in columns)
        for row in shown
    ]
    return [f"{'step':>6}{head}", *body]


def _shown_columns(rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    return [column for column in _COLUMNS if any(column.metric in row for row in rows)]


def _mismatch_table(steps: Sequence[Mapping[str, Any]], size: Size) -> list[str]:
    """Returns the newest table of mismatches: sampler and trainer with more or less of the record enforced."""
    names = {scorer: f"mismatch/{scorer}/logprob_abs_mean" for scorer in SCORERS}
    row = next((row for row in reversed(steps) if all(name in row for name in names.values())), None)
    if row is None:
        return []
    title = f"mismatch at step {row['step']}, in nats, if the trainer used"
    body = [f"  {SCORERS[scorer]:<42}{row[name]:>9.1e}" for scorer, name in names.items()]
    return ["", title, *body, *_wrapped(_TABLE_LEGEND, size, "")]


def _line(label: str, text: str, size: Size) -> list[str]:
    return _wrapped(f"{label:<{_LABEL}}{text}", size, " " * _LABEL)


def _wrapped(text: str, size: Size, indent: str) -> list[str]:
    """Wraps a text between words: a path or a command that is longer than a line is not cut."""
    return textwrap.wrap(
        text,
        size.columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
