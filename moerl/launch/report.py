"""`moerl report` of a run, of several side by side (`--compare A B`), and of a sweep. Reads files alone."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from moerl.config.load import CONFIG_FILE
from moerl.contract.files import writing
from moerl.diagnostics.report.compare import write_comparison
from moerl.diagnostics.report.data import Report, Verdict
from moerl.diagnostics.report.page import JSON_FILE, PAGE_FILE, write_report
from moerl.diagnostics.report.read_run import numbers_of_directory, report_of_directory, stored_report
from moerl.diagnostics.report.sweep import SweptRun, sweep_report, write_sweep_report
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser, page_path
from moerl.launch.sweeps.manifest import MANIFEST_FILE, SweepRun, read_manifest
from moerl.telemetry.sinks import METRICS_FILE

USAGE = "moerl report RUN_DIR or SWEEP_DIR [--output FILE] | moerl report --compare A B [...] [--output FILE]"
_COMPARISON_FILE = "comparison.html"


def report_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser("report")
    add, page = parser.add_argument, f"RUN_DIR/{PAGE_FILE}, or {_COMPARISON_FILE}"
    add("sources", type=Path, nargs="*", metavar="RUN_DIR")
    add("--compare", action="store_true", help="one page of several run directories or report.json files, side by side")
    add("--output", type=Path, metavar="FILE", help=f"page to write: {page}, if not said")
    return parser


def run_report(options: argparse.Namespace) -> int:
    """Writes the page, and prints its verdict and its path.

    Raises:
        ConfigError: a source is missing, or is nothing to report on.
        MoerlError: files cannot be read or written.
    """
    sources: list[Path] = options.sources
    if len(sources) == 1 and not options.compare and (sources[0] / MANIFEST_FILE).is_file():
        return _report_sweep(sources[0].resolve(), options.output)
    if options.compare and len(sources) < 2:
        raise ConfigError(
            "report: nothing to compare with",
            seen=f"{len(sources)} of them",
            expected="two or more run directories or report.json files",
            remedy="moerl report --compare runs/one runs/other",
        )
    if not options.compare and len(sources) != 1:
        raise ConfigError(
            "report: which run?",
            seen=f"{len(sources)} of them",
            expected="one run directory, or --compare and several",
            remedy="see `moerl report --help`",
        )
    reports = [_report(source) for source in sources]
    if options.compare:
        output = page_path(options.output or Path(_COMPARISON_FILE))
        with writing(output):
            verdict = write_comparison([*zip(_names(sources), reports, strict=True)], output)
    else:
        default = sources[0].with_suffix(".html") if sources[0].is_file() else sources[0] / PAGE_FILE
        output, verdict = page_path(options.output or default), reports[0].verdict
        with writing(output):
            write_report(reports[0], output)
    return _print_verdict(verdict, output)


def _report_sweep(folder: Path, output: Path | None) -> int:
    manifest = read_manifest(folder)
    page = page_path(output or folder / PAGE_FILE)
    runs = [_swept_run(folder, run, page) for run in manifest.runs]
    report = sweep_report(f"Sweep of {folder.name}", manifest.keys, runs)
    with writing(page):
        write_sweep_report(report, runs, page)
    return _print_verdict(report.verdict, page)


def _swept_run(folder: Path, run: SweepRun, page: Path) -> SweptRun:
    """Reads what one run of a sweep wrote. Raises `MoerlError` if its files cannot be read."""
    run_dir = folder / run.name
    own_page = run_dir / PAGE_FILE
    link = str(own_page.relative_to(page.parent)) if own_page.exists() and own_page.is_relative_to(page.parent) else ""
    rows, accuracy = numbers_of_directory(run_dir)
    return SweptRun(run.name, run.values, run.state, rows, accuracy, link)


def _print_verdict(verdict: Verdict, output: Path) -> int:
    print(f"verdict        {verdict.text}\nwhat to change {verdict.advice}\nreport         {output}")
    return 0


def _report(source: Path) -> Report:
    if source.is_file():
        return stored_report(source)
    if not (source / METRICS_FILE).is_file():
        has = f"{CONFIG_FILE}, but no {METRICS_FILE}" if (source / CONFIG_FILE).is_file() else f"no {METRICS_FILE}"
        raise ConfigError(
            "report: nothing to report on",
            seen=f"{source}: {has}" if source.is_dir() else f"{source}, which is not there",
            expected=f"a run directory with {METRICS_FILE}, or a {JSON_FILE}",
            remedy="give the directory that the run printed when it started",
        )
    report = report_of_directory(source.resolve())
    if report is None:
        raise ConfigError(
            "report: no step of reinforcement learning is done",
            seen=source / METRICS_FILE,
            expected="rows of the stage rl",
            remedy=f"go on with the run: moerl train {shlex.quote(f'resume={source}')}",
        )
    return report


def _names(sources: list[Path]) -> list[str]:
    """Returns short names that differ: the directory's, and more of the path if two are equal."""
    folders = [source.resolve().parent if source.is_file() else source.resolve() for source in sources]
    files = [f"/{source.name}" if source.is_file() and source.name != JSON_FILE else "" for source in sources]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) + file for folder, file in zip(folders, files, strict=True)]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(map(str, sources), start=1)]
