"""`moerl status RUN_DIR`: step and state of a run, while it goes on or after its end. Reads files alone; torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.config.load import CONFIG_FILE
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import ConfigError, MoerlError
from moerl.launch.run_lock import holder
from moerl.reading import read_json


def run_status(run_dir: Path, checkpoints: Callable[[Path], list[str]]) -> int:
    """Prints the state of a run, as its directory shows it; returns exit status 0.

    Args:
        checkpoints: returns the names of the checkpoints in a folder, the newest last.

    Raises:
        ConfigError: `run_dir` is no run directory.
        MoerlError: its ledger cannot be read, or the sums of the ledger are not right.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            "status: this is no run directory",
            seen=f"{run_dir}, without {CONFIG_FILE}",
            expected="the run_dir of a run",
            remedy="give the directory that the run printed when it started",
        )
    names = checkpoints(run_dir / "checkpoints")
    print(f"run directory  {run_dir}")
    print(f"state          {_state(run_dir)}")
    print(f"checkpoints    {len(names)}, the newest {names[-1]}" if names else "checkpoints    none yet")
    ledger_file = run_dir / LEDGER_FILE
    if not ledger_file.exists():
        print("rollouts       no step of reinforcement learning is done yet")
        return 0
    _print_ledger(_read(ledger_file), time.time() - ledger_file.stat().st_mtime)
    return 0


def _state(run_dir: Path) -> str:
    held_by = holder(run_dir)
    if held_by:
        return f"running, {held_by}"
    return "finished" if (run_dir / SUMMARY_FILE).exists() else f"stopped; go on with `moerl train resume={run_dir}`"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        stored = read_json(path)
        return {"step": int(stored["step"]), "steps": int(stored["steps"]), "ledger": Ledger.restored(stored)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoerlError(
            f"status: {path} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected="what a run wrote",
            remedy="the checkpoints hold ledgers of their own: resume the run, and it is written again",
        ) from error


def _print_ledger(told: Mapping[str, Any], seconds: float) -> None:
    ledger: Ledger = told["ledger"]
    print(f"step           {told['step']} of {told['steps']}, done {seconds:.0f} s ago")
    print(f"rollouts       {ledger.issued} asked for")
    for name, count, reasons in (
        ("trained", ledger.trained, {}),
        ("filtered", ledger.filtered.total(), ledger.filtered),
        ("quarantined", ledger.quarantined.total(), ledger.quarantined),
        ("pending", ledger.pending, {}),
        *([("asked again", ledger.again.total(), ledger.again)] if ledger.again else []),
    ):
        why = ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items()))
        print(f"  {name:<13}{count}{f' ({why})' if why else ''}")
