"""Log of configuration keys that were changed while a run was stopped: ``history.jsonl`` in the run directory. Runs in
the controller.

One row per changed key: time, last stage and step with the old value, old and new value, and the effect of the change.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moerl.config.resume import Change
from moerl.contract.files import atomic_file
from moerl.errors import CheckpointError, ConfigError
from moerl.orchestration.reporting import Reporter
from moerl.reading import read_text

HISTORY_FILE = "history.jsonl"
STEPS = {"sft.steps": "sft", "rl.steps": "rl"}
"""Keys that say how many steps a stage has, and the stages."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """Change of one configuration key, as `history.jsonl` stores it."""

    time: str
    """Moment at which the run went on with the new value: ISO 8601, UTC."""
    stage: str
    """Stage of `step`."""
    step: int
    """Last step with the old value; 0 before the first."""
    key: str
    """Dotted name of the key."""
    old: Any
    """Value before, plain JSON."""
    new: Any
    """Value from the next step on, plain JSON."""
    note: str
    """Effect of the change, for people; empty if there is nothing to say."""

    def __str__(self) -> str:
        text = f"{self.key} {json.dumps(self.old)} -> {json.dumps(self.new)} after step {self.step} of {self.stage}"
        return f"{text}; {self.note}" if self.note else text


def take_changes(
    run_dir: Path, changes: Sequence[tuple[Change, str]], stage: str, step: int, reporter: Reporter
) -> None:
    """Stores and shows the keys that have other values than before in a run that goes on from `step` of `stage`.

    Args:
        changes: keys, each with what else its change brings, for people.

    Raises:
        ConfigError: the configuration gives a stage no more steps than the stage has made already.
    """
    for change, _ in changes:
        if STEPS.get(change.key) == stage and change.new <= step:
            raise ConfigError(
                f"{change.key}: the run has made as many steps already",
                seen=change.new,
                expected=f"more than {step}",
                remedy=f"raise it, or leave it away to finish the run with {change.old}",
            )
    before = read_history(run_dir)
    for row in before:
        reporter.notify(f"changed earlier, {row.time}: {row}")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = [HistoryRow(now, stage, step, each.key, each.old, each.new, note) for each, note in changes]
    for row in rows:
        reporter.notify(f"changed: {row}")
    if rows:
        with atomic_file(run_dir / HISTORY_FILE) as temporary:
            lines = (json.dumps(asdict(row)) + "\n" for row in [*before, *rows])
            temporary.write_text("".join(lines), encoding="utf-8")


def read_history(run_dir: Path) -> list[HistoryRow]:
    """Returns the rows so far; an empty list if nothing was ever changed. Raises `CheckpointError` for a damaged
    file."""
    path = run_dir / HISTORY_FILE
    if not path.exists():
        return []
    try:
        return [HistoryRow(**json.loads(line)) for line in read_text(path).splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            seen=str(error),
            expected="one JSON object per changed key",
            remedy="correct the line, or move the file away: it is for people alone",
        ) from error
