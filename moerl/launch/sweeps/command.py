"""The command line of a sweep, ``moerl train -m ...``. Torch-free; the process that a user started."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moerl.config.compose import split_sweep
from moerl.config.load import load_config
from moerl.errors import ConfigError
from moerl.launch.run_lock import run_lock
from moerl.launch.sweeps.hosts import LocalHost
from moerl.launch.sweeps.manifest import MANIFEST_FILE, Manifest, new_manifest, read_manifest, refuse_changes
from moerl.launch.sweeps.sweep import Sweep, exit_status, job_of
from moerl.machine.stop_signals import stop_signals
from moerl.printable import printable


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of a sweep on a command line."""

    folder: Path | None
    """Directory of the sweep (`sweep.dir`); None if it is not given."""
    jobs: int | None
    """Most runs at a time (`sweep.jobs`); None if it is not given."""
    overrides: list[str]
    """Arguments KEY=VALUE of the runs, those with several values included."""


def sweep(overrides: Sequence[str], config_dir: Path | None, *, only_show: bool = False) -> int:
    """Runs a sweep on this machine, or goes on with one.

    Args:
        only_show: print the command line of each run, and start none.

    Returns:
        0 if all runs are finished, 1 if one failed, 75 or 130 if a signal stopped the sweep.

    Raises:
        ConfigError: the command line describes no run, or the sweep in the directory is another one.
    """
    options = read_options(overrides)
    manifest, folder = plan_sweep(options, config_dir)
    check_runs(manifest)
    for run in manifest.runs:
        if only_show:
            print(shlex.join(["moerl", *job_of(run, manifest, folder).arguments]))
    if only_show:
        return 0
    jobs = options.jobs or 1
    with run_lock(folder), stop_signals(for_good=True) as stop:
        print(f"sweep of {len(manifest.runs)} runs over {', '.join(manifest.keys)}, {jobs} at a time: {folder}")
        Sweep(manifest, folder, LocalHost(jobs), stop, _print_line).run()
    show(manifest, folder)
    status = exit_status(manifest, is_interrupt=stop.signal == "SIGINT")
    if status:
        print(f"go on: moerl train -m {shlex.quote(f'sweep.dir={folder}')}", file=sys.stderr)
    return status


def read_options(overrides: Sequence[str]) -> SweepOptions:
    """Splits the keys of sweeps from the other overrides. Raises `ConfigError` if one is wrong."""
    given, rest = dict[str, str](), list[str]()
    for text in overrides:
        key, _, value = text.partition("=")
        if key in ("run_dir", "resume"):
            remedy = "give sweep.dir=DIR: runs get directories in it" if key == "run_dir" else "give sweep.dir=DIR"
            raise ConfigError(f"{key}: set by the sweep for each run", seen=text, expected="no such key", remedy=remedy)
        if key.startswith("sweep."):
            if key not in ("sweep.dir", "sweep.jobs") or key in given or not value:
                raise ConfigError(
                    f"{key}: no key of sweeps, given twice or empty", seen=text, expected="sweep.dir=DIR, sweep.jobs=N"
                )
            given[key] = value
        else:
            rest.append(text)
    jobs = given.get("sweep.jobs")
    if jobs is not None and (not jobs.isdecimal() or int(jobs) < 1):
        raise ConfigError("sweep.jobs: no number of runs", seen=jobs, expected=">= 1", remedy="set sweep.jobs=1")
    return SweepOptions(
        Path(given["sweep.dir"]) if "sweep.dir" in given else None, None if jobs is None else int(jobs), rest
    )


def plan_sweep(options: SweepOptions, config_dir: Path | None) -> tuple[Manifest, Path]:
    """Returns the sweep of a command line, and its directory. If the directory has a sweep already, it is that one.
    Raises `ConfigError` if the two differ, or if nothing is swept."""
    now = datetime.datetime.now(datetime.UTC)
    folder = (options.folder or Path(f"runs/sweep-{now:%Y%m%d-%H%M%S}")).resolve()
    if not options.overrides and options.folder is not None:
        return read_manifest(folder), folder
    common, swept = split_sweep(options.overrides)
    if not swept:
        raise ConfigError(
            "-m: nothing is swept",
            seen=" ".join(options.overrides),
            expected="a key with several values, for example seed=1,2,3",
            remedy="give one, or leave -m away",
        )
    manifest = new_manifest(common, swept, config_dir)
    if (folder / MANIFEST_FILE).exists():
        before = read_manifest(folder)
        refuse_changes(before, manifest, folder)
        return before, folder
    return manifest, folder


def check_runs(manifest: Manifest, *, looks_at_packages: bool = True) -> None:
    """Raises `ConfigError` if `moerl train` would refuse the configuration of a run, before any of them starts.

    Args:
        looks_at_packages: as `load_config`.
    """
    folder = None if manifest.config_dir is None else Path(manifest.config_dir)
    for run in manifest.runs:
        try:
            keys = [*manifest.common, *run.overrides]
            load_config(keys, command="train", config_dir=folder, looks_at_packages=looks_at_packages)
        except ConfigError as error:
            error.add_note(f"in the run with {' '.join(run.overrides)}; no run was started")
            raise


def show(manifest: Manifest, folder: Path) -> None:
    """Prints how each run ended, in a table."""
    table = Table(title=f"sweep in {folder}", title_justify="left")
    for title in (*manifest.keys, "state", "run"):
        table.add_column(title, overflow="fold")
    for run in manifest.runs:
        state = run.state if run.status in (0, None) else f"{run.state} ({run.status})"
        table.add_row(*map(printable, run.values.values()), state, run.name)
    Console(highlight=False, markup=False).print(table)
    print(f"compare them: moerl report {shlex.quote(str(folder))}")


def _print_line(line: str) -> None:
    print(printable(line), flush=True)
