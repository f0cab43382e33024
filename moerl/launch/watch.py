"""`moerl watch RUN_DIR`: steps and alerts of a run, while it goes on or after its end. Reads files; torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.diagnostics.alerts import Announcer, active_alerts
from moerl.errors import MoerlError
from moerl.launch.arguments import Parser
from moerl.launch.run_lock import holder
from moerl.launch.status import check_run_dir, state_of
from moerl.launch.watch_screen import Size, Snapshot, screen, state_lines, step_line, steps_of
from moerl.printable import printable
from moerl.reading import read_json
from moerl.telemetry.sinks import METRICS_FILE, RowTail

_POLL_SECONDS = 1.0


def watch(arguments: list[str]) -> int:
    """Runs the command; returns exit status 0.

    Raises:
        ConfigError: there is no run. MoerlError: its files cannot be read.
    """
    parser = Parser("watch")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print what is known now, and end")
    options = parser.read(arguments, "moerl watch RUN_DIR [--once]")
    if options is None:
        return 0
    return run_watch(options.run_dir.resolve(), Console(), once=options.once)


def run_watch(run_dir: Path, console: Console, *, once: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Shows a run until it ends or Ctrl-C comes; with `once`, shows it as it is now and returns.

    Raises:
        ConfigError, MoerlError: as `watch`.
    """
    check_run_dir(run_dir, "watch")
    tail = RowTail(run_dir / METRICS_FILE)
    if once or not holder(run_dir):
        _poll(tail)
        _print(console, screen(_look(run_dir, tail.rows), Size(console.width)))
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
            # Before the rows are read: those that came before the end are shown, too.
            is_running = bool(holder(run_dir))
            _poll(tail)
            lines = screen(_look(run_dir, tail.rows), Size(console.width, console.height))
            live.update(Text(printable("\n".join(lines)), overflow="fold"), refresh=True)
            if is_running:
                sleep(_POLL_SECONDS)


def _show_lines(run_dir: Path, tail: RowTail, console: Console, sleep: Callable[[float], None]) -> None:
    """Prints the screen once, then a line for each step and each new alert."""
    announcer, last, is_running = Announcer(), 0, True
    _poll(tail)
    _print(console, screen(_look(run_dir, tail.rows), Size(console.width)))
    last = _last_step(tail.rows)
    announcer.new(active_alerts(tail.rows))  # which the screen has said
    while is_running:
        is_running = bool(holder(run_dir))
        if _poll(tail):
            for row in steps_of(tail.rows):
                if row["step"] > last:
                    _print(console, [step_line(row)])
            last = _last_step(tail.rows)
            _print(console, [f"ALERT: {alert}" for alert in announcer.new(active_alerts(tail.rows))])
        if is_running:
            sleep(_POLL_SECONDS)
    _print(console, state_lines(_look(run_dir, tail.rows).state, Size(console.width)))


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
    return Snapshot(rows, ledger, steps, state_of(run_dir))


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int:
    return max((row["step"] for row in steps_of(rows)), default=0)


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
