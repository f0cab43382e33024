"""The screen of `moerl watch`: what fits 80 columns, and that every word on it is explained."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from moerl.buffer.ledger import Ledger
from moerl.launch.watch_screen import Size, Snapshot, screen, step_line
from moerl.telemetry.metrics import SCORERS

TERMINAL = Size(80, 24)
LARGE = {
    "reward/mean": -10.125,
    "response/length_mean": 32768.0,
    "mismatch/logprob_abs_mean": 1.5e-3,
    "mismatch/share_above_ln2": 1.0,
    "routing/live_rows": 98_765_432.0,
    "staleness/age_mean": 16.5,
    "groups/waiting": 1024.0,
    "quarantine/count": 12345.0,
    "throughput/tokens_per_second": 1_234_567.0,
    "seconds/step": 86_400.5,
}
TABLE = {f"mismatch/{scorer}/logprob_abs_mean": 0.5 for scorer in SCORERS}


def rows(**changes: float) -> list[dict[str, Any]]:
    dev = {"stage": "evaluation", "step": 0, "accuracy/mean": 0.5}
    return [dev, *({"stage": "rl", "step": step, **LARGE, **TABLE, **changes} for step in range(9_991, 10_001))]


def snapshot(rows: list[dict[str, Any]], state: str = "running, process 123456 on a-node-of-a-cluster") -> Snapshot:
    ledger = Ledger()
    ledger.issue(0, 900_000)
    ledger.issue(1, 100_000)
    ledger.train(0, 900_000)
    return Snapshot(rows, ledger, 100_000, state)


def test_quarantine_and_tokens_per_second_have_a_line_each_within_80_columns() -> None:
    lines = screen(snapshot(rows()), TERMINAL)
    assert [line for line in lines if "quarantined" in line] == [
        "quarantined  12,345 that broke a rule and are not trained on"
    ]
    assert [line for line in lines if "tokens/s" in line] == [
        "tokens/s     1,234,567 trained per second of the last step"
    ]


@pytest.mark.parametrize(("far", "is_alarming"), [(1.0, True), (0.0, False)])
def test_a_terminal_of_80_columns_and_24_lines_shows_all_lines_whole(far: float, is_alarming: bool) -> None:
    quiet = {} if is_alarming else {"routing/live_rows": 0.0}
    lines = screen(snapshot(rows(**{"mismatch/share_above_ln2": far}, **quiet)), TERMINAL)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    console.print(Text("\n".join(lines), overflow="fold"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == lines
    assert ("ALERT" in "\n".join(lines)) is is_alarming


def test_columns_of_large_numbers_stay_apart() -> None:
    lines = screen(snapshot(rows()), TERMINAL)
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["step", "reward"])
    assert len(lines[head].split()) == len(lines[head + 1].split()) == 9
    assert len(lines[head]) == len(lines[head + 1])


def test_every_word_of_the_tables_is_explained() -> None:
    lines = screen(snapshot(rows()), Size(80))
    head = next(line for line in lines if line.split()[:2] == ["step", "reward"])
    text = " ".join(lines)
    for title in [*head.split()[1:], "routing", "kept sets"]:
        assert re.search(rf"(?:^|[; ]){title}: \w", text), title
    assert "in nats (0.01 nats: about 1%)" in text
    assert not re.search(r"F\(2\)|live rows|ETA|rollouts", text)


def test_a_low_terminal_shows_steps_rather_than_the_mismatch_table() -> None:
    assert "mismatch at step 10000" in "\n".join(screen(snapshot(rows()), Size(80, 40)))
    low = screen(snapshot(rows()), Size(80, 18))
    assert not re.search("mismatch at step|kept sets", "\n".join(low))
    assert any(line.split()[0] == "10000" for line in low if line)


def test_a_command_is_not_broken_where_it_is_longer_than_the_terminal() -> None:
    command = f"`moerl train resume=/{'deep/' * 20}run`"
    lines = screen(snapshot(rows(), f"stopped; go on with {command}"), TERMINAL)
    assert any(f"resume=/{'deep/' * 20}run`" in line for line in lines)


def test_a_run_before_its_first_step_has_no_table_and_no_legend() -> None:
    assert screen(Snapshot([], None, 0, "running"), TERMINAL) == [
        "state        running",
        "step         no step is done yet",
        "alerts       no alerts",
    ]


def test_a_line_of_a_log_has_all_figures() -> None:
    line = step_line({"stage": "rl", "step": 3, **LARGE})
    assert line.startswith("step 3  reward -10.125  length 32,768  mismatch 1.5e-03  far 100.0%  unrouted 98,765,432")
    assert line.endswith("quarantined 12,345  tokens/s 1,234,567")
