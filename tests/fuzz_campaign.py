"""Fuzzes what comes in from outside, with a fixed seed, and prints a table by target.

    python tests/fuzz_campaign.py --scale 1 --json FILE

Every input follows from seed, target and number, so that a failure can be made again: `--only TARGET --first N
--inputs 1`. Each target runs in a process of its own, which gives freed memory back at once, so that its growth while
an input is read is what the reader took. `make test` runs the same inputs, fewer of them. Exit status 1 where damage
was accepted, an error escaped or memory went beyond four times the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from fuzz_targets import LIMIT_BYTES, TARGETS, Outcome, Target

from moerl.errors import MoerlError

INPUTS = {
    "frames": 120_000,
    "wire: damage": 100_000,
    "wire: documents": 100_000,
    "batches": 80_000,
    "dumps: damage": 60_000,
    "dumps: crafted": 20_000,
    "trajectories": 60_000,
    "quarantine": 30_000,
    "compact answers": 80_000,
}
_WARM_UP = 200
_PROMPT_FREES = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


@dataclass
class Tally:
    """Results of the inputs of one target. escaped: errors that are no `MoerlError`, with the input's number.

    peak_over_limit: memory that the process took beyond the input's while it was read, over the limit of the reader.
    """

    target: str
    inputs: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*Outcome, "escaped"), 0))
    escaped: list[str] = field(default_factory=list)
    peak_over_limit: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Inputs per second; 0 where the process ended too early to tell."""
        return self.inputs / self.seconds if self.seconds else 0.0

    @property
    def holds(self) -> bool:
        return not self.escaped and not self.outcomes[Outcome.CHANGED] and self.peak_over_limit <= 4


def fuzz(target: Target, num_inputs: int, folder: Path, *, seed: int = 0, first: int = 0) -> Tally:
    """Attacks a target with the inputs `first`, `first + 1`, ..."""
    attack = target.prepare(folder)
    number_of_target = [each.name for each in TARGETS].index(target.name)
    # The first inputs twice: caches and code that is loaded late are not the input's.
    for index in range(min(_WARM_UP, num_inputs)):
        _one(attack(np.random.default_rng((seed, number_of_target, first + index))))
    tally = Tally(target.name)
    start, peak = time.monotonic(), 0
    for index in range(first, first + num_inputs):
        read = attack(np.random.default_rng((seed, number_of_target, index)))
        before = _reset_peak()
        outcome, error = _one(read)
        peak = max(peak, _memory("VmHWM") - before)
        tally.inputs += 1
        tally.outcomes[outcome] += 1
        if error:
            tally.escaped.append(f"input {index}: {error}")
    tally.seconds = time.monotonic() - start
    tally.peak_over_limit = peak / LIMIT_BYTES
    return tally


def _one(read: Callable[[], Outcome]) -> tuple[str, str]:
    try:
        return read(), ""
    except MoerlError as error:
        return "escaped", f"{type(error).__name__} outside the reader: {error}"[:500]
    except Exception as error:  # noqa: BLE001 - that nothing else comes out is what is measured
        return "escaped", f"{type(error).__name__}: {error!s:.500}"


def _reset_peak() -> int:
    """Starts the process's peak memory afresh; what it takes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    with open("/proc/self/status", "rb") as file:
        status = file.read()
    start = status.index(name.encode()) + len(name) + 1
    return 1024 * int(status[start : status.index(b"kB", start)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of inputs (650,000 in all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--inputs", type=int, help="of the target named by --only")
    parser.add_argument("--json", type=Path, help="write the table here")
    arguments = parser.parse_args()
    if arguments.only:
        (target,) = (each for each in TARGETS if each.name == arguments.only)
        count = arguments.inputs or int(INPUTS[target.name] * arguments.scale)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            tally = fuzz(target, count, Path(folder), seed=arguments.seed, first=arguments.first)
        print(json.dumps(asdict(tally)))
        return 0 if tally.holds else 1
    tallies = [_in_own_process(target, arguments) for target in TARGETS]
    _print_table(tallies)
    if arguments.json:
        rows = [asdict(tally) | {"inputs_per_second": round(tally.rate)} for tally in tallies]
        facts = {"command": " ".join(["python", *sys.argv]), "limit_bytes": LIMIT_BYTES, "cores": os.cpu_count()}
        arguments.json.write_text(json.dumps({**facts, "targets": rows}, indent=2) + "\n")
    return 0 if all(tally.holds for tally in tallies) else 1


def _in_own_process(target: Target, arguments: argparse.Namespace) -> Tally:
    command = [sys.executable, __file__, "--only", target.name]
    command += ["--scale", str(arguments.scale), "--seed", str(arguments.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, env={**os.environ, **_PROMPT_FREES})
    try:
        values = json.loads(done.stdout)
    except ValueError:
        return Tally(target.name, escaped=[f"the process ended with status {done.returncode}"])
    return Tally(**values)


def _print_table(tallies: list[Tally]) -> None:
    names = ("target", "inputs", "refused", "same", "other", "changed", "escaped", "peak / limit", "inputs/s")
    rows = [
        (
            tally.target,
            f"{tally.inputs:,}",
            *(f"{tally.outcomes[outcome]:,}" for outcome in ("refused", "same", "other", "changed")),
            f"{len(tally.escaped)}",
            f"{tally.peak_over_limit:.2f}",
            f"{tally.rate:.0f}",
        )
        for tally in tallies
    ]
    total = ("in all", f"{sum(tally.inputs for tally in tallies):,}")
    for row in (names, *rows, total):
        print(f"{row[0]:<16}" + "".join(f"{cell:>13}" for cell in row[1:]))
    for tally in tallies:
        for line in tally.escaped[:10]:
            print(f"{tally.target}: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
