"""`moerl status RUN_DIR`: step and state of a run, while it goes on or after its end. Reads files alone; torch-free."""

from __future__ import annotations

import time
from pathlib import Path

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.config.load import CONFIG_FILE
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import ConfigError, MoerlError
from moerl.launch.arguments import Parser
from moerl.launch.run_lock import holder
from moerl.reading import read_json
from moerl.trainer.checkpoint import CHECKPOINTS, checkpoint_names


def status(arguments: list[str]) -> int:
    """Runs the command; returns exit status 0. Raises as `run_status`."""
    parser = Parser("status")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    options = parser.read(arguments, "moerl status RUN_DIR")
    return 0 if options is None else run_status(options.run_dir.resolve())


def run_status(run_dir: Path) -> int:
    """Prints the state of a run, as its directory shows it; returns exit status 0.

    Raises:
        ConfigError: `run_dir` is no run directory.
        MoerlError: its ledger cannot be read, or the sums of the ledger are not right.
    """
    check_run_dir(run_dir, "status")
    names = checkpoint_names(run_dir / CHECKPOINTS)
    print(f"run directory  {run_dir}")
    print(f"state          {state_of(run_dir)}")
    print(f"checkpoints    {len(names)}, the newest {names[-1]}" if names else "checkpoints    none yet")
    ledger_file = run_dir / LEDGER_FILE
    if not ledger_file.exists():
        print("rollouts       no step of reinforcement learning is done yet")
        return 0
    try:
        stored = read_json(ledger_file)
        ledger, step, steps = Ledger.restored(stored), int(stored["step"]), int(stored["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoerlError(
            f"status: {ledger_file} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected="what a run wrote",
            remedy="the checkpoints hold ledgers of their own: resume the run, and it is written again",
        ) from error
    print(f"step           {step} of {steps}, done {time.time() - ledger_file.stat().st_mtime:.0f} s ago")
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
    return 0


def check_run_dir(run_dir: Path, command: str) -> None:
    """Raises `ConfigError` if a command is given a directory that is none of a run."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{command}: this is no run directory",
            seen=f"{run_dir}, without {CONFIG_FILE}",
            expected="the run_dir of a run",
            remedy="give the directory that the run printed when it started",
        )


def state_of(run_dir: Path) -> str:
    """Returns a text that begins with running, finished or stopped."""
    held_by = holder(run_dir)
    if held_by:
        return f"running, {held_by}"
    return "finished" if (run_dir / SUMMARY_FILE).exists() else f"stopped; go on with `moerl train resume={run_dir}`"
