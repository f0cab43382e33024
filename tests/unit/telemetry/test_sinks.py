"""Metrics on disk, and going back to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disks import power_may_go
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moerl.telemetry.sinks import JsonlSink, MetricSink, RowTail, read_rows
from moerl.telemetry.tensorboard import TensorBoardSink


def write_a_run(sink: MetricSink, *, rl_steps: int = 4) -> None:
    """Two cold-start steps, then RL with an evaluation at 0 and after every second step."""
    for step in (1, 2):
        sink.write("sft", step, {"sft/loss": 3.0 - step})
    sink.write("evaluation", 0, {"accuracy/mean": 0.25})
    for step in range(1, rl_steps + 1):
        sink.write("rl", step, {"reward/mean": step / 10, "optimizer/lr": 5e-05})
        if step % 2 == 0:
            sink.write("evaluation", step, {"accuracy/mean": step / 8})


def places(path: Path) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in read_rows(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_row_is_on_disk_as_soon_as_it_is_written(path: Path):
    sink = JsonlSink(path)
    sink.write("rl", 1, {"reward/mean": 0.1})
    assert path.read_text() == '{"stage": "rl", "step": 1, "reward/mean": 0.1}\n'
    sink.close()


def test_a_torn_last_line_is_dropped_when_the_file_is_opened_again(path: Path):
    path.write_text('{"stage": "rl", "step": 1}\n{"stage": "rl", "st')
    sink = JsonlSink(path)
    sink.write("rl", 2, {})
    sink.close()
    assert places(path) == [("rl", 1), ("rl", 2)]


def test_rows_are_on_the_disk_when_a_checkpoint_asks_for_it_and_when_the_file_is_written_anew_or_closed(path: Path):
    with power_may_go() as disk:
        sink = JsonlSink(path)
        sink.write("rl", 1, {})
        sink.sync()
        os.rename(path, path)
        sink.write("rl", 2, {})
        sink.close()
        os.rename(path, path)
        sink.truncate_after("rl", 1)
    assert [each for each in disk.lost() if "names" not in each] == []
    assert disk.renamed == [path] * 3


def test_a_file_without_rows_is_not_made(path: Path):
    sink = JsonlSink(path)
    sink.sync()
    sink.truncate_after("rl", 2)
    sink.close()
    assert not path.exists()


def test_a_torn_last_line_is_said_and_a_whole_file_says_nothing(path: Path):
    for torn in (b'{"stage": "rl", "st', b"\0" * 7, b"\xff"):
        path.write_bytes(b'{"stage": "rl", "step": 1}\n' + torn)
        sink = JsonlSink(path)
        assert sink.torn_bytes == len(torn)
        sink.close()
    assert path.read_text() == '{"stage": "rl", "step": 1}\n'
    assert JsonlSink(path).torn_bytes == 0


NO_ROWS = ["not json", "[]", '{"step": 1}', '{"stage": "rl"}', '{"stage": "x", "step": 1}', "", "\xff\xfe"]


@pytest.mark.parametrize("line", [*NO_ROWS, pytest.param("[" * 100_000, id="deep")])
def test_a_whole_line_that_is_no_row_is_refused(path: Path, line: str):
    path.write_bytes(b'{"stage": "rl", "step": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="line 2"):
        JsonlSink(path)


def test_stages_and_metrics_that_are_not_registered_are_refused(tmp_path: Path):
    for sink in (JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")):
        with pytest.raises(ValueError, match="stage 'test'"):
            sink.write("test", 1, {})
        with pytest.raises(ValueError, match="not registered"):
            sink.write("rl", 1, {"nope": 1.0})
        with pytest.raises(ValueError, match="cannot go back"):
            sink.truncate_after("evaluation", 1)
        sink.close()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_going_back_to_an_rl_step_keeps_its_evaluation_and_drops_what_came_later(path: Path):
    sink = JsonlSink(path)
    write_a_run(sink)
    sink.truncate_after("rl", 2)
    assert places(path) == [("sft", 1), ("sft", 2), ("evaluation", 0), ("rl", 1), ("rl", 2), ("evaluation", 2)]
    sink.write("rl", 3, {})
    sink.close()
    assert places(path)[-1] == ("rl", 3)


def test_going_back_to_before_an_evaluation_drops_it_and_keeps_its_step(path: Path):
    sink = JsonlSink(path)
    write_a_run(sink)
    sink.truncate_after("rl", 2, evaluated=False)
    sink.close()
    assert places(path) == [("sft", 1), ("sft", 2), ("evaluation", 0), ("rl", 1), ("rl", 2)]


def test_going_back_to_the_cold_start_drops_all_of_rl(path: Path):
    sink = JsonlSink(path)
    write_a_run(sink)
    sink.truncate_after("sft", 1)
    sink.close()
    assert places(path) == [("sft", 1)]


def test_an_interrupted_file_ends_like_an_undisturbed_one(tmp_path: Path):
    undisturbed, interrupted = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    sink = JsonlSink(undisturbed)
    write_a_run(sink)
    sink.close()
    sink = JsonlSink(interrupted)
    write_a_run(sink, rl_steps=3)
    sink.close()
    interrupted.write_text(interrupted.read_text() + '{"stage": "r')
    sink = JsonlSink(interrupted)
    sink.truncate_after("rl", 2)
    for step in (3, 4):
        sink.write("rl", step, {"reward/mean": step / 10, "optimizer/lr": 5e-05})
    sink.write("evaluation", 4, {"accuracy/mean": 0.5})
    sink.close()
    assert interrupted.read_bytes() == undisturbed.read_bytes()


def scalars(directory: Path, stage: str, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / stage), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_the_scalars_of_each_stage(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    write_a_run(sink)
    sink.close()
    assert scalars(tmp_path, "sft", "sft/loss") == [(1, 2.0), (2, 1.0)]
    assert scalars(tmp_path, "evaluation", "accuracy/mean") == [(0, 0.25), (2, 0.25), (4, 0.5)]


def test_tensorboard_hides_an_evaluation_that_is_made_again(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    write_a_run(sink)
    sink.close()
    sink = TensorBoardSink(tmp_path)
    sink.truncate_after("rl", 4, evaluated=False)
    sink.write("evaluation", 4, {"accuracy/mean": 0.75})
    sink.close()
    assert scalars(tmp_path, "evaluation", "accuracy/mean") == [(0, 0.25), (2, 0.25), (4, 0.75)]


def test_tensorboard_hides_what_came_after_the_step_gone_back_to(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    write_a_run(sink)
    sink.close()
    sink = TensorBoardSink(tmp_path)
    sink.truncate_after("rl", 2)
    sink.write("rl", 3, {"reward/mean": 0.75})
    sink.close()
    assert [step for step, _ in scalars(tmp_path, "rl", "reward/mean")] == [1, 2, 3]
    assert scalars(tmp_path, "rl", "reward/mean")[-1][1] == 0.75
    assert [step for step, _ in scalars(tmp_path, "evaluation", "accuracy/mean")] == [0, 2]
    assert len(scalars(tmp_path, "sft", "sft/loss")) == 2


def test_tensorboard_reads_texts(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.write_text("evaluation", 4, "samples/dev", "**highest**\n\n    2+2=4 ü")
    sink.close()
    events = EventAccumulator(str(tmp_path / "evaluation"))
    events.Reload()
    assert events.PluginTagToContent("text").keys() == {"samples/dev"}
    [event] = events.Tensors("samples/dev")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (4, "**highest**\n\n    2+2=4 ü")


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
