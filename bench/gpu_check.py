"""Everything that needs an NVIDIA device, within six minutes: `scripts/gpu_check.sh`, or

`python bench/gpu_check.py [--device cpu] [--only NAME ...] [--results DIR] [--seconds N]`.

Each check runs in a process of its own, killed at the check's time limit, and starts only if so much time is left.
Checks of correctness run side by side, as many as fit into the device's memory; those that measure times run alone
afterwards. A line says of each whether it passed, failed or was not run, and why; a table holds what was measured
against the goals. Results go to ``gpu-NAME.json`` in `bench/results`, tables of profiles to ``gpu-NAME-PART.txt``, the
goals to ``gpu-goals.json``, all outcomes to ``gpu-summary.json``. Status: 0 if something passed and nothing failed, 1
otherwise, 2 without a device. `--device cpu` runs tiny versions of the same checks, which shows that the checks
themselves work; nothing is written then without `--results`. What each check shows: `docs/gpu_check.md`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import _gpu_goals
from _gpu_checks import ROOT, Check, Device, Outcome, run_check, run_side_by_side
from _report import Result, command_line, write_json

BUDGET_SECONDS = 360.0
CPU_PATIENCE = 4.0
"""Tiny checks on a CPU may take so many times as long as those on a GPU: few cores compute all of them."""
CPU_GIB = 8.0
"""Memory for tiny checks that run side by side on a CPU."""
DEVICE_SHARE = 0.9
"""Share of the device's memory for checks that run side by side."""
_MEGATRON = ("torch", "megatron.core", "megatron.bridge", "transformers")
_ENGINE = ("transformer_engine",)
_DEVICE = Check("device", "_gpu_device:check", 120)
CHECKS = (
    Check("kernels", "_gpu_kernels:check", 80, ("torch", "triton"), gib=4),
    Check("engine", "_gpu_engine:check", 80, ("torch", "transformers"), gib=4),
    Check("collectives", "_gpu_collectives:check", 80, ("torch", "megatron.core", "transformers"), gib=4),
    Check("parity", "_gpu_parity:check", 80, _MEGATRON, _ENGINE, gib=8),
    Check("families", "_gpu_families:check", 80, _MEGATRON, _ENGINE, gib=8),
    Check("start", "_gpu_start:check", 80, _MEGATRON, _ENGINE, gib=16),
    Check("proof", "_gpu_proof:check", 80, _MEGATRON, _ENGINE, gib=8),
    Check("layouts", "_gpu_layouts:check", 80, _MEGATRON, _ENGINE, gib=16),
    Check("scoring", "_gpu_scoring:check", 35, ("torch",), ("triton",), times=True),
    Check("rate", "_gpu_rate:check", 25, ("torch", "transformers"), times=True),
    Check("grouped", "_gpu_grouped:check", 30, ("torch",), _ENGINE, times=True),
    Check("offload", "_gpu_offload:check", 25, _MEGATRON, _ENGINE, times=True),
    Check("slice16", "_gpu_slice:check_16", 60, _MEGATRON, _ENGINE, times=True),
    Check("slice128", "_gpu_slice:check_128", 95, _MEGATRON, _ENGINE, times=True),
)
"""Checks in their order: those that run side by side, then those that run alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run."""

    device: Device
    results: Path | None
    """Folder for files; None: none are written."""
    budget_seconds: float
    """Time of all checks together."""
    gib: float
    """Memory of the device for checks that run side by side."""


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] | None = None) -> int:
    """Runs the command. checks: instead of those of `CHECKS`."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", choices=[each.name for each in checks or CHECKS], help="these checks alone"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="bench/results on an NVIDIA device, else nowhere")
    parser.add_argument("--seconds", type=float, help="time of all checks together; on a GPU 360")
    asked = parser.parse_args(arguments)
    results = asked.results or (ROOT / "bench" / "results" if asked.device == "cuda" else None)
    patience = CPU_PATIENCE if asked.device == "cpu" else 1.0
    given = checks or [replace(each, limit_seconds=patience * each.limit_seconds) for each in CHECKS]
    chosen = [each for each in given if asked.only is None or each.name in asked.only]
    found = run_check(_DEVICE, asked.device)
    if found.findings is None:
        print(
            f"error: no NVIDIA device to check: {found.reason}; run this on a machine where `nvidia-smi` lists one and"
            " torch is built for CUDA, or try the checks on a CPU: scripts/gpu_check.sh --device cpu",
            file=sys.stderr,
        )
        return 2
    gib = CPU_GIB if asked.device == "cpu" else DEVICE_SHARE * found.findings.results[0].value
    options = Options(asked.device, results, asked.seconds or patience * BUDGET_SECONDS, gib)
    heading = [command_line(), *found.findings.results]
    print(found.findings.results[0].name, flush=True)
    outcomes = run_all(chosen, options, heading, started + options.budget_seconds)
    summarise(outcomes, options, heading, time.monotonic() - started)
    states = [outcome.state for outcome in outcomes]
    return int("FAILED" in states or "passed" not in states)


def run_all(checks: Sequence[Check], options: Options, heading: Sequence[Result], until: float) -> list[Outcome]:
    """Runs checks of correctness side by side, then those that measure times; says what came of each, and writes what
    it measured.

    Args:
        until: by `time.monotonic`; a check whose limit is later is not run.

    Returns:
        Outcomes in the order of the checks.
    """
    beside = [check for check in checks if not check.times]
    turns = [beside, *([check] for check in checks if check.times)]
    outcomes: list[Outcome] = []
    for turn in turns:
        for outcome in run_side_by_side(turn, options.device, options.gib, until):
            _keep(outcome, outcomes, options, heading)
    places = [check.name for check in checks]
    return sorted(outcomes, key=lambda outcome: places.index(outcome.name))


def _keep(outcome: Outcome, outcomes: list[Outcome], options: Options, heading: Sequence[Result]) -> None:
    """Adds an outcome to those before it, says it, and writes its findings."""
    outcomes.append(outcome)
    say(outcome)
    if outcome.state != "not run":
        _forget(options, outcome.name)
    found = outcome.findings
    if found is None or options.results is None:
        return
    left_out = [Result(f"not run: {part}", 1, unit="part") for part in found.left_out]
    write_json([*heading, *found.results, *left_out], _file(options.results, outcome.name))
    for part, text in found.texts.items():
        lines = [*(result.name for result in heading), "", text]
        (options.results / f"gpu-{outcome.name}-{part}.txt").write_text("\n".join(lines) + "\n")


def say(outcome: Outcome) -> None:
    """One line; below it the end of the output of a check that failed without results, and parts that were not run."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.name:<12} {outcome.state}{reason} ({outcome.seconds:.1f} s)", flush=True)
    for line in outcome.log:
        print(f"    | {line}", flush=True)
    for part in outcome.findings.left_out if outcome.findings is not None else ():
        print(f"    not run: {part}", flush=True)


def summarise(outcomes: Sequence[Outcome], options: Options, heading: Sequence[Result], seconds: float) -> None:
    """Says which checks passed, failed and were not run, how long all took, and which goals were met."""
    for state in ("passed", "FAILED", "not run"):
        names = [outcome.name for outcome in outcomes if outcome.state == state]
        print(f"{state}: {', '.join(names) if names else 'none'}", flush=True)
    print(f"{seconds:.0f} s of {options.budget_seconds:g}", flush=True)
    scores = _gpu_goals.score(outcomes, options.device)
    _gpu_goals.show(scores)
    if options.results is not None:
        rows = [
            Result(
                f"{outcome.name}: {outcome.state}{f': {outcome.reason}' if outcome.reason else ''}",
                outcome.seconds,
                goal="passed",
                holds=outcome.state == "passed",
                unit="s",
            )
            for outcome in outcomes
        ]
        write_json([*heading, *rows], _file(options.results, "summary"))
        _gpu_goals.write(scores, heading, _file(options.results, "goals"))


def _file(results: Path, name: str) -> Path:
    results.mkdir(parents=True, exist_ok=True)
    return results / f"gpu-{name}.json"


def _forget(options: Options, name: str) -> None:
    """Removes the files of an earlier run, which must not stand for this one."""
    if options.results is not None:
        for file in (_file(options.results, name), *options.results.glob(f"gpu-{name}-*.txt")):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
