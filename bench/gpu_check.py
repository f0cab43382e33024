"""Everything that needs an NVIDIA device, within nine minutes: `scripts/gpu_check.sh`, or

`python bench/gpu_check.py [--device cpu] [--only NAME ...] [--results DIR] [--seconds N]`.

Each check runs in a process of its own, killed at the check's time limit, and starts only if so much time is left. A
line says of each whether it passed, failed or was not run, and why. What was measured goes to ``gpu-NAME.json`` in
`bench/results`, all outcomes to ``gpu-summary.json``. Status: 0 where something passed and nothing failed, 1 otherwise,
2 without a device. `--device cpu` runs tiny versions of the same checks, which shows that the checks themselves work;
nothing is written then without `--results`. What each check shows: `docs/gpu_check.md`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _gpu_checks import ROOT, Check, Device, Outcome, run_check
from _report import Result, command_line, write_json

BUDGET_SECONDS = 540.0
_MEGATRON = ("torch", "megatron.core", "megatron.bridge", "transformers")
_DEVICE = Check("device", "_gpu_device:check", 120)
CHECKS = (
    Check("kernels", "_gpu_kernels:check", 60, ("torch", "triton")),
    Check("engine", "_gpu_engine:check", 60, ("torch", "transformers")),
    Check("collectives", "_gpu_collectives:check", 50, ("torch", "megatron.core", "transformers")),
    Check("parity", "_gpu_parity:check", 70, _MEGATRON, ("transformer_engine",)),
    Check("scoring", "_gpu_scoring:check", 60, ("torch",), ("triton",)),
    Check("slice", "_gpu_slice:check", 220, _MEGATRON, ("transformer_engine",)),
)
"""In the order in which they run: what is quick first."""


@dataclass(frozen=True, slots=True)
class Options:
    """results: where files go; None: nowhere. budget_seconds: of all checks together."""

    device: Device
    results: Path | None
    budget_seconds: float


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in checks], help="these checks alone")
    parser.add_argument("--results", type=Path, metavar="DIR", help="bench/results on an NVIDIA device, else nowhere")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="time of all checks together")
    asked = parser.parse_args(arguments)
    results = asked.results or (ROOT / "bench" / "results" if asked.device == "cuda" else None)
    options = Options(asked.device, results, asked.seconds)
    chosen = [each for each in checks if asked.only is None or each.name in asked.only]
    found = run_check(_DEVICE, options.device)
    if found.findings is None:
        print(
            f"error: no NVIDIA device to check: {found.reason}; run this where `nvidia-smi` lists one and torch is"
            " built for CUDA, or try the checks on a CPU: scripts/gpu_check.sh --device cpu",
            file=sys.stderr,
        )
        return 2
    heading = [command_line(), *found.findings.results]
    print(found.findings.results[0].name, flush=True)
    outcomes = run_all(chosen, options, heading, started + options.budget_seconds)
    summarise(outcomes, options, heading, time.monotonic() - started)
    states = [outcome.state for outcome in outcomes]
    return int("FAILED" in states or "passed" not in states)


def run_all(checks: Sequence[Check], options: Options, heading: Sequence[Result], until: float) -> list[Outcome]:
    """Runs one check after the other, says what came of each, and writes what it measured.

    Args:
        until: by `time.monotonic`; a check whose limit is later is not run.
    """
    outcomes = []
    for check in checks:
        left = until - time.monotonic()
        if check.limit_seconds > left:
            reason = f"no time left: may take {check.limit_seconds:g} s, and {max(0.0, left):.0f} s are left"
            outcome = Outcome(check.name, "not run", reason=reason)
        else:
            _result_file(options, check.name, remove=True)
            outcome = run_check(check, options.device)
        outcomes.append(outcome)
        say(outcome)
        file = _result_file(options, check.name)
        if outcome.findings is not None and file is not None:
            left_out = [Result(f"not run: {part}", 1, unit="part") for part in outcome.findings.left_out]
            write_json([*heading, *outcome.findings.results, *left_out], file)
    return outcomes


def say(outcome: Outcome) -> None:
    """One line; below it the end of the output of a check that failed without results, and parts that were not run."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.name:<12} {outcome.state}{reason} ({outcome.seconds:.1f} s)", flush=True)
    for line in outcome.log:
        print(f"    | {line}", flush=True)
    for part in outcome.findings.left_out if outcome.findings is not None else ():
        print(f"    not run: {part}", flush=True)


def summarise(outcomes: Sequence[Outcome], options: Options, heading: Sequence[Result], seconds: float) -> None:
    """Which checks passed, failed and were not run, with how long all took."""
    for state in ("passed", "FAILED", "not run"):
        names = [outcome.name for outcome in outcomes if outcome.state == state]
        print(f"{state}: {', '.join(names) if names else 'none'}", flush=True)
    print(f"{seconds:.0f} s of {options.budget_seconds:g}", flush=True)
    file = _result_file(options, "summary")
    if file is not None:
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
        write_json([*heading, *rows], file)


def _result_file(options: Options, name: str, *, remove: bool = False) -> Path | None:
    """remove: what an earlier run measured must not stand for this one."""
    if options.results is None:
        return None
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"gpu-{name}.json"
    if remove:
        file.unlink(missing_ok=True)
    return file


if __name__ == "__main__":
    sys.exit(main())
