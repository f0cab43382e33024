"""Tools of every benchmark: results with a goal, repeated timing, one table, one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    """One claim and its measurement.

    name: what was measured. value: the measurement, in `unit`. goal: the claim, for example ``<= 0.19``; empty if
    the value is context only. holds: whether the claim was met. spread: largest minus smallest over repeats.
    """

    name: str
    value: float
    goal: str = ""
    holds: bool = True
    unit: str = ""
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds over repeats."""

    median: float
    spread: float


def timed(functions: Sequence[Callable[[], object]], repeats: int = 5) -> list[Timing]:
    """Times functions in turns (a, b, a, b, ...), so that a busy moment of the machine hits all of them alike.

    Each runs once before, untimed.
    """
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [Timing(statistics.median(taken), max(taken) - min(taken)) for taken in seconds]


def json_argument(description: str | None) -> Path | None:
    """Parses the one option of every benchmark, ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    return parser.parse_args().json


def command_line() -> Result:
    """The command that runs, from the root of the repository, with the load of the machine as its value."""
    arguments = " ".join([f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return Result(f"`python {arguments}`: load average at the start", os.getloadavg()[0], unit="processes")


def report(results: Sequence[Result], json_path: Path | None = None) -> None:
    """Prints a table and, if asked, writes a JSON list of results."""
    table = Table()
    for heading in ("name", "value", "spread", "unit", "goal", "holds"):
        table.add_column(heading, justify="right" if heading in ("value", "spread") else "left")
    for result in results:
        verdict = ("yes" if result.holds else "NO") if result.goal else ""
        table.add_row(result.name, f"{result.value:.4g}", f"{result.spread:.2g}", result.unit, result.goal, verdict)
    Console().print(table)
    if json_path is not None:
        write_json(results, json_path)


def write_json(results: Sequence[Result], path: Path) -> None:
    """Writes a JSON list of results."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
