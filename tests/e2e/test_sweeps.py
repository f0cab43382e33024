"""Sweeps of real runs: a failure on purpose, a stop, going on, and the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium, find_chromium
from moerl_runs import ENVIRONMENT
from waiting import eventually, run_within, status_of

from moerl.launch.sweeps.manifest import read_manifest

pytestmark = pytest.mark.slow
MOERL = (sys.executable, "-W", "ignore", "-m", "moerl")
TINY = ("recipe=tiny", "rl.steps=2", "sft.steps=1", "evaluation.every=0")
SECONDS = 1500.0


def moerl(*arguments: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    environment = {**os.environ, **ENVIRONMENT}
    done = run_within([*MOERL, *arguments], SECONDS, env=environment)
    return done.returncode, done.stdout + done.stderr


def states(folder: Path) -> dict[str, str]:
    return {run.name: run.state for run in read_manifest(folder).runs}


def test_a_sweep_outlives_a_failing_run_goes_on_and_is_compared(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    # Where a run directory should be there is a file: this run cannot start.
    planted = folder / "001_seed-1_mode-rollout"
    planted.write_text("planted")
    words = [*TINY, "seed=1,2", "keep_routing.mode=off,rollout", f"sweep.dir={folder}"]
    status, output = moerl("train", "-m", *words, "sweep.jobs=2")
    assert status == 1, output
    assert "001_seed-1_mode-rollout: failed with status 2: error: run_dir: cannot be written" in output
    assert [*states(folder).values()].count("finished") == 3, output

    planted.unlink()
    status, output = moerl("train", "-m", f"sweep.dir={folder}")
    assert status == 0, output
    assert output.count("was finished before") == 3
    assert output.count("started") == 1
    status, output = moerl("train", "-m", *words)
    assert (status, output.count("was finished before")) == (0, 4), output
    status, output = moerl("train", "-m", *words[:-2], "keep_routing.mode=off,trainer", words[-1])
    assert status == 2
    assert "keep_routing.mode: not as in the sweep" in output

    status, output = moerl("report", str(folder))
    assert status == 0, output
    numbers = json.loads((folder / "report.json").read_text())
    assert [each["values"]["keep_routing.mode"] for each in numbers["settings"]] == ["off", "rollout"]
    assert [each["finals"]["reward/mean"]["runs"] for each in numbers["settings"]] == [2, 2]
    assert 'href="000_seed-1_mode-off/report.html"' in (folder / "report.html").read_text()
    if find_chromium() is not None:
        with chromium(tmp_path / "profile") as page:
            page.open(folder / "report.html")
            assert (page.log, page.requests) == ([], [])


def test_a_sweep_that_is_told_to_stop_ends_its_runs_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = [*TINY, "rl.steps=12", "seed=1,2", f"sweep.dir={folder}"]
    # Two values of one key are refused, so the longer run comes without the shorter one's.
    words.remove("rl.steps=2")
    with (tmp_path / "output").open("wb") as output:
        sweep = subprocess.Popen(
            [*MOERL, "train", "-m", *words], stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}
        )
    metrics = folder / "000_seed-1" / "metrics.jsonl"
    eventually(lambda: metrics.exists() and '"rl"' in metrics.read_text(), SECONDS)
    sweep.send_signal(signal.SIGTERM)
    assert status_of(sweep, SECONDS) == 75, (tmp_path / "output").read_text()
    assert states(folder) == {"000_seed-1": "stopped", "001_seed-2": "waiting"}
    assert not (folder / "000_seed-1" / "summary.json").exists()

    status, text = moerl("train", "-m", f"sweep.dir={folder}", "sweep.jobs=2")
    assert status == 0, text
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if row["stage"] == "rl" and "reward/mean" in row] == [*range(1, 13)]
