"""Comparisons of runs, and searches for their processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from moerl_runs import rows, summary

from moerl.buffer.ledger import LEDGER_FILE


def assert_the_same(run: Path, undisturbed: Path) -> None:
    places, expected_places = ([(row["stage"], row["step"]) for row in rows(folder)] for folder in (run, undisturbed))
    assert places == expected_places
    for row, expected in zip(rows(run), rows(undisturbed), strict=True):
        assert row == expected
    for model in ("cold_start", "final_model"):
        weights, expected_weights = (folder / model / "model.safetensors" for folder in (run, undisturbed))
        assert weights.read_bytes() == expected_weights.read_bytes(), model
    assert summary(run) == summary(undisturbed)
    assert (run / LEDGER_FILE).read_bytes() == (undisturbed / LEDGER_FILE).read_bytes()


def processes_of(run: Path) -> list[int]:
    """Live processes that have the run directory on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(run).encode() in arguments:
                found.append(int(entry.name))
    return found


def processes_at(log: Path, program: bytes) -> list[int]:
    """Process ids of those that write to a log and have this on their command line."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1") == str(log) and program in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def rank_processes(run_dir: Path) -> dict[int, int]:
    """Process ids of the ranks of a run, by rank: those that hold their log."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            target, arguments = os.readlink(process / "fd" / "1"), (process / "cmdline").read_bytes()
        except OSError:
            continue
        match = re.fullmatch(re.escape(str(run_dir / "logs")) + r"/rank-(\d+)\.log", target)
        if match and b"moerl.ranks.process" in arguments:
            found[int(match[1])] = int(process.name)
    return found


def assert_close(run: Path, one_rank: Path) -> None:
    """The same run but for the rounding of sums that are added up in another order."""
    for row, expected in zip(rows(run), rows(one_rank), strict=True):
        assert (row["stage"], row["step"]) == (expected["stage"], expected["step"])
        if row["stage"] == "sft":
            assert row["sft/loss"] == pytest.approx(expected["sft/loss"], rel=1e-4)
        if row["stage"] == "rl":
            assert row["mismatch/logprob_abs_max"] < 1e-5
            assert row["replay/rows_verified"] > 0
            assert row["reward/mean"] == pytest.approx(expected["reward/mean"], abs=1e-6)
            assert row["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=1e-3)
