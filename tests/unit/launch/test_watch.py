"""`moerl watch`: what it reads from a run directory, and when it ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.errors import ConfigError, MoerlError
from moerl.launch.run_lock import run_lock
from moerl.launch.watch import run_watch, watch

CLEAN = {
    "reward/mean": 0.25,
    "mismatch/logprob_abs_mean": 1.5e-3,
    "mismatch/share_above_ln2": 0.01,
    "routing/live_rows": 0.0,
    "staleness/age_mean": 0.5,
    "groups/waiting": 2.0,
    "quarantine/count": 0.0,
    "throughput/tokens_per_second": 1234.0,
    "seconds/step": 6.0,
    **{f"mismatch/{scorer}/logprob_abs_mean": 0.5 for scorer in ("neither", "kept_sets", "experts", "both")},
}


def add_step(run_dir: Path, step: int, **changes: float) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "rl", "step": step, **CLEAN, **changes}) + "\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("{}")
    ledger = Ledger()
    ledger.issue(0, 8)
    ledger.train(0, 8)
    (tmp_path / LEDGER_FILE).write_text(json.dumps({"step": 2, "steps": 12, **ledger.snapshot()}))
    for step in (1, 2):
        add_step(tmp_path, step)
    return tmp_path


def watched(
    run_dir: Path,
    *,
    once: bool = False,
    terminal: bool = False,
    sleep: Callable[[float], None] | None = None,
    size: tuple[int, int] = (200, 60),
) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=size[0], height=size[1])
    assert run_watch(run_dir, console, once=once, sleep=sleep or (lambda seconds: None)) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_is_worth_watching_is_shown_once(run_dir: Path):
    with run_lock(run_dir):
        text = watched(run_dir, once=True)
    assert "state        running, process " in text
    assert "step         2 of 12, 6s each, 1m00s left" in text
    assert "responses    8 asked for: 8 trained, 0 left out by filters, 0 pending" in text
    for title in ("reward", "mismatch", "far", "unrouted", "age", "waiting", "quarantined", "tokens/s"):
        assert title in text
    assert "recorded routing, inside the kept sets      5.0e-01" in text
    assert "no alerts" in text


def test_a_run_that_has_ended_is_shown_and_not_waited_for(run_dir: Path):
    def sleep(seconds: float) -> None:
        raise AssertionError("waits for a run that has ended")

    assert "stopped; go on with `moerl train resume=" in watched(run_dir, sleep=sleep)
    (run_dir / "summary.json").write_text("{}")
    assert "state        finished" in watched(run_dir, sleep=sleep)


def test_steps_and_new_alerts_become_lines_until_the_run_ends(run_dir: Path):
    lock = run_lock(run_dir)
    lock.__enter__()
    step = 2

    def sleep(seconds: float) -> None:
        nonlocal step
        step += 1
        if step < 5:
            add_step(run_dir, step, **{"routing/live_rows": 7.0})
        else:
            add_step(run_dir, step)
            (run_dir / "summary.json").write_text("{}")
            lock.__exit__(None, None, None)

    text = watched(run_dir, sleep=sleep)
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines[-3:]] == ["3", "4", "5"]
    assert text.count("ALERT: step 3: 7 rows x layers without captured routing, 0 before") == 1
    assert text.count("ALERT") == 1
    assert text.splitlines()[-1] == "state        finished"


def test_a_terminal_is_refreshed_and_ctrl_c_ends_it(run_dir: Path):
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    with run_lock(run_dir):
        text = watched(run_dir, terminal=True, sleep=sleep)
    assert "no alerts" in text
    assert "the run goes on without being watched" in text


def test_a_terminal_of_80_columns_cuts_neither_counts_nor_alerts(run_dir: Path):
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    add_step(run_dir, 3, **{"routing/live_rows": 7.0})
    with run_lock(run_dir):
        text = watched(run_dir, terminal=True, sleep=sleep, size=(80, 24))
    assert "quarantined  0 that broke a rule and are not trained on" in text
    assert "tokens/s     1,234 trained per second of the last step" in text
    assert "`moerl conformance`" in text
    assert "…" not in text


def test_a_run_before_its_first_step_says_so(run_dir: Path):
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / LEDGER_FILE).unlink()
    assert "no step is done yet" in watched(run_dir, once=True)
    (run_dir / "metrics.jsonl").write_text('{"stage": "sft", "step": 3, "sft/loss": 1.0}\n')
    assert "step         cold start, step 3" in watched(run_dir, once=True)


def test_a_directory_without_a_run_and_broken_files_are_refused(run_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no run directory"):
        watch([str(tmp_path / "none")])
    (run_dir / LEDGER_FILE).write_text("{")
    with pytest.raises(MoerlError, match=r"ledger\.json cannot be read"):
        watched(run_dir, once=True)
    (run_dir / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(MoerlError, match="line 1"):
        watched(run_dir, once=True)
