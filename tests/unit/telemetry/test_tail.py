"""Reading a metrics file that a run writes meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.telemetry.sinks import JsonlSink
from moerl.telemetry.tail import RowTail


def test_rows_come_as_they_are_written_and_go_where_a_run_drops_them(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail, sink = RowTail(path), JsonlSink(path)
    assert not tail.poll()
    for step in (1, 2, 3):
        sink.write("rl", step, {"reward/mean": 0.5})
        assert tail.poll()
        assert not tail.poll()
    sink.truncate_after("rl", 1)
    assert tail.poll()
    assert [row["step"] for row in tail.rows] == [1]
    sink.close()


def test_a_row_that_is_half_written_is_not_there_yet(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "rl", "st')
    tail = RowTail(path)
    assert not tail.poll()
    path.write_text('{"stage": "rl", "step": 1}\n')
    assert tail.poll()
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1"):
        tail.poll()
