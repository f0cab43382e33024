"""`moerl watch RUN_DIR`: how a run goes, while it goes on or after it ended. Reads files alone; torch-free."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.config.command_texts import WATCH
from moerl.config.load import CONFIG_FILE
from moerl.diagnostics.alerts import Announcer, active_alerts
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import ConfigError, MoerlError
from moerl.launch.arguments import Parser, short_help
from moerl.launch.run_lock import holder
from moerl.printable import printable
from moerl.reading import read_json
from moerl.telemetry.metrics import SCORERS
from moerl.telemetry.progress import STAGE_TITLES, duration_text
from moerl.telemetry.sinks import METRICS_FILE
from moerl.telemetry.tail import RowTail

_POLL_SECONDS = 1.0
_SHOWN_ROWS = 8
_PACE_ROWS = 20
"""Steps that the time left is estimated from."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a run directory says. rows: of metrics.jsonl. ledger: None before the first step. steps: planned, 0 where
    not known. state: running, finished or stopped, for people."""

    rows: Sequence[Mapping[str, Any]]
    ledger: Ledger | None
    steps: int
    state: str


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    metric: str
    format: str


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}"),
    _Column("length", "response/length_mean", "{:.0f}"),
    _Column("mismatch", "mismatch/logprob_abs_mean", "{:.1e}"),
    _Column("F(2)", "mismatch/share_above_ln2", "{:.1%}"),
    _Column("live rows", "routing/live_rows", "{:,.0f}"),
    _Column("age", "staleness/age_mean", "{:.1f}"),
    _Column("waiting", "groups/waiting", "{:.0f}"),
    _Column("quarantined", "quarantine/count", "{:.0f}"),
    _Column("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
    _Column("seconds", "seconds/step", "{:.1f}"),
)


def watch(arguments: list[str]) -> int:
    """The command. Exit code 0.

    Raises:
        ConfigError: there is no run. MoerlError: its files cannot be read.
    """
    parser = Parser(prog="moerl watch", add_help=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print what is known now, and end")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    if {"-h", "--help"} & set(arguments):
        print(short_help("moerl watch RUN_DIR [--once]", WATCH, parser))
        return 0
    options = parser.parse_args(arguments)
    return run_watch(options.run_dir.resolve(), Console(), once=options.once)


def run_watch(run_dir: Path, console: Console, *, once: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Shows a run until it ends, or Ctrl-C comes; as it is now where `once`.

    Raises:
        ConfigError, MoerlError: as `watch`.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            "watch: this is no run directory",
            seen=f"{run_dir}, without {CONFIG_FILE}",
            expected="the run_dir of a run",
            remedy="give the directory that the run printed when it started",
        )
    tail = RowTail(run_dir / METRICS_FILE)
    if once or not holder(run_dir):
        _poll(tail)
        _print(console, [*overview(_look(run_dir, tail.rows)), *_alert_lines(tail.rows)])
        return 0
    try:
        (_show_live if console.is_terminal else _show_lines)(run_dir, tail, console, sleep)
    except KeyboardInterrupt:
        console.print("the run goes on without being watched")
    return 0


def _show_live(run_dir: Path, tail: RowTail, console: Console, sleep: Callable[[float], None]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        is_running = True
        while is_running:
            # Looked at first: rows that came before the end are shown, too.
            is_running = bool(holder(run_dir))
            _poll(tail)
            lines = [*overview(_look(run_dir, tail.rows)), *_alert_lines(tail.rows)]
            live.update(Text(printable("\n".join(lines)), no_wrap=True, overflow="ellipsis"), refresh=True)
            if is_running:
                sleep(_POLL_SECONDS)


def _show_lines(run_dir: Path, tail: RowTail, console: Console, sleep: Callable[[float], None]) -> None:
    """The overview once, then a line for each step and each new alert."""
    announcer, last, is_running = Announcer(), 0, True
    _poll(tail)
    _print(console, overview(_look(run_dir, tail.rows)))
    last = _last_step(tail.rows)
    _print(console, [f"ALERT: {alert}" for alert in announcer.new(active_alerts(tail.rows))])
    while is_running:
        is_running = bool(holder(run_dir))
        if _poll(tail):
            for row in _rl(tail.rows):
                if row["step"] > last:
                    _print(console, [step_line(row)])
            last = _last_step(tail.rows)
            _print(console, [f"ALERT: {alert}" for alert in announcer.new(active_alerts(tail.rows))])
        if is_running:
            sleep(_POLL_SECONDS)
    _print(console, [f"state     {_look(run_dir, tail.rows).state}"])


def _poll(tail: RowTail) -> bool:
    try:
        return tail.poll()
    except ValueError as error:
        raise MoerlError(f"watch: {error}", remedy="restore the file from a copy, or remove the line") from error


def _look(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> Snapshot:
    ledger, steps = None, 0
    try:
        stored = read_json(run_dir / LEDGER_FILE)
        ledger, steps = Ledger.restored(stored), int(stored["steps"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoerlError(
            f"watch: {run_dir / LEDGER_FILE} cannot be read", seen=f"{type(error).__name__}: {error}"
        ) from error
    held_by = holder(run_dir)
    ended = "finished" if (run_dir / SUMMARY_FILE).exists() else f"stopped; go on with `moerl train resume={run_dir}`"
    return Snapshot(rows, ledger, steps, f"running, {held_by}" if held_by else ended)


# --- what is shown ---------------------------------------------------------------------------------------------------


def overview(snapshot: Snapshot) -> list[str]:
    """The state of a run and its last steps, line by line."""
    lines, steps = [f"state     {snapshot.state}"], _rl(snapshot.rows)
    if not steps:
        stage = snapshot.rows[-1]["stage"] if snapshot.rows else ""
        where = (
            f"{STAGE_TITLES.get(stage, stage)}, step {snapshot.rows[-1]['step']}" if stage else "no step is done yet"
        )
        return [*lines, f"step      {where}"]
    last = steps[-1]["step"]
    of = f" of {snapshot.steps}" if snapshot.steps else ""
    lines.append(f"step      {last}{of}{_time_left(steps, snapshot)}")
    lines += _accuracy(snapshot.rows)
    if snapshot.ledger is not None:
        ledger = snapshot.ledger
        lines.append(
            f"rollouts  {ledger.issued} asked for: {ledger.trained} trained, {ledger.filtered.total()} filtered,"
            f" {ledger.quarantined.total()} quarantined, {ledger.pending} pending"
        )
    return [*lines, *_table(steps), *_mismatch_table(steps)]


def step_line(row: Mapping[str, Any]) -> str:
    """One step on one line; what it has not is left out."""
    figures = [f"{c.title} {c.format.format(row[c.metric])}" for c in _COLUMNS if c.metric in row]
    return f"step {row['step']}  " + "  ".join(figures)


def _table(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = steps[-_SHOWN_ROWS:]
    columns = [column for column in _COLUMNS if any(column.metric in row for row in shown)]
    head = "".join(f"{column.title:>12}" for column in columns)
    body = [
        f"{row['step']:>8}"
        + "".join(f"{c.format.format(row[c.metric]) if c.metric in row else '':>12}" for c in columns)
        for row in shown
    ]
    return ["", f"{'step':>8}{head}", *body]


def _mismatch_table(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest one: sampler and trainer with more or less of the record enforced."""
    names = {scorer: f"mismatch/{scorer}/logprob_abs_mean" for scorer in SCORERS}
    row = next((row for row in reversed(steps) if all(name in row for name in names.values())), None)
    if row is None:
        return []
    title = f"mean |log-prob difference| at step {row['step']}, nats"
    return ["", title, *(f"  {SCORERS[scorer]:<42}{row[name]:>9.1e}" for scorer, name in names.items())]


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [row for row in rows if row["stage"] == "evaluation" and "accuracy/mean" in row]
    if not measured:
        return []
    return [f"accuracy  {measured[-1]['accuracy/mean']:.3f} on dev problems after step {measured[-1]['step']}"]


def _time_left(steps: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> str:
    seconds = [row["seconds/step"] for row in steps[-_PACE_ROWS:] if "seconds/step" in row]
    left = snapshot.steps - steps[-1]["step"]
    if not seconds or left <= 0 or not snapshot.state.startswith("running"):
        return ""
    each = median(seconds)
    return f", {duration_text(each)} each, ETA {duration_text(math.ceil(each * left))}"


def _alert_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    alerts = active_alerts(rows)
    return ["", *(f"ALERT: {alert}" for alert in alerts)] if alerts else ["", "no alerts"]


def _rl(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["stage"] == "rl"]


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int:
    return max((row["step"] for row in _rl(rows)), default=0)


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
