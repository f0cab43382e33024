"""Rows to trackers in processes of their own: order, going on, and trackers that fail."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sinks import OPENING, make_sink, told
from waiting import eventually, is_alive

from moerl.telemetry.trackers.mlflow_tracker import MlflowTracker
from moerl.telemetry.trackers.sink import TrackerError
from moerl.telemetry.trackers.tracker import Opening
from moerl.telemetry.trackers.trackio_tracker import TrackioTracker


def test_rows_come_in_order_named_by_their_stage_with_the_step_of_that_stage(tmp_path: Path):
    sink = make_sink(tmp_path)
    sink.open()
    sink.write("sft", 1, {"sft/loss": 2.0})
    sink.write("evaluation", 0, {"accuracy/mean": 0.25})
    sink.write("rl", 1, {"reward/mean": 0.5})
    sink.sync()
    assert told(tmp_path) == [
        {"sft/sft/loss": 2.0, "sft/step": 1},
        {"evaluation/accuracy/mean": 0.25, "evaluation/step": 0},
        {"rl/reward/mean": 0.5, "rl/step": 1},
    ]
    sink.close()
    assert told(tmp_path, "finished") == [0]
    assert told(tmp_path, "config") == [OPENING.config]
    assert not is_alive(sink.pid)


def test_a_run_that_goes_on_keeps_its_id_and_marks_where_rows_may_come_twice(tmp_path: Path):
    first = make_sink(tmp_path)
    first.open()
    assert first.is_new
    for step in (1, 2, 3):
        first.write("rl", step, {"reward/mean": step / 10})
    first.close(failed=True)
    second = make_sink(tmp_path)
    second.open()
    assert not second.is_new
    second.truncate_after("rl", 2)
    second.write("rl", 3, {"reward/mean": 0.3})
    second.close()
    begun = told(tmp_path, "begun")
    assert begun[0] == begun[1] == (tmp_path / "run_id").read_text().strip()
    assert told(tmp_path)[-3:] == [
        {"rl/reward/mean": 0.3, "rl/step": 3},
        {"rl/resumed": 1.0, "rl/step": 2},
        {"rl/reward/mean": 0.3, "rl/step": 3},
    ]
    assert told(tmp_path, "finished") == [1, 0]


@pytest.mark.parametrize(
    ("failure", "text"),
    [("2:raise", "OSError: No space left on device"), ("2:die", "its process has ended"), ("2:hang", "no answer")],
)
def test_a_tracker_that_fails_at_a_row_is_an_error_of_a_later_call(failure: str, text: str, tmp_path: Path):
    sink = make_sink(tmp_path, failure, answer_seconds=1.0 if "hang" in failure else 60.0)
    sink.open()
    sink.write("rl", 1, {"reward/mean": 0.1})
    sink.write("rl", 2, {"reward/mean": 0.2})
    with pytest.raises(TrackerError, match=text):
        sink.sync()
    with pytest.raises(TrackerError):
        sink.close(seconds=0.5)
    assert not is_alive(sink.pid)
    assert len(told(tmp_path)) == 1


def test_rows_for_a_tracker_that_takes_none_never_block_the_run_for_longer_than_they_may(tmp_path: Path):
    sink = make_sink(tmp_path, "1:hang", answer_seconds=0.5)
    sink.open()

    def write_for_ever() -> None:
        for step in itertools.count():
            sink.write("rl", step, {"reward/mean": 0.1})

    with pytest.raises(TrackerError, match=r"no answer within 0\.5 s"):
        write_for_ever()
    sink.end()
    assert not is_alive(sink.pid)


def test_a_tracker_that_cannot_begin_says_why_and_leaves_no_process(tmp_path: Path):
    sink = make_sink(tmp_path, "open")
    with pytest.raises(TrackerError, match="RuntimeError: no such project"):
        sink.open()
    sink.end()
    assert not is_alive(sink.pid)
    assert "no such project" in sink.log.read_text()
    assert not (tmp_path / "run_id").exists()


def test_a_tracker_ends_when_the_controller_lets_go_of_it(tmp_path: Path):
    sink = make_sink(tmp_path)
    sink.open()
    pid = sink.pid
    sink._socket.close()
    eventually(lambda: not is_alive(pid))
    sink.end()


def test_a_metric_that_is_not_registered_is_refused(tmp_path: Path):
    sink = make_sink(tmp_path)
    with pytest.raises(ValueError, match="not registered"):
        sink.write("rl", 1, {"nope": 1.0})
    sink.end()


class FakeMlflow:
    """MLflow's client with one run, which it goes on with; a parameter never changes."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.metrics: list[Any] = []
        self.status = ""

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.status = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id="id"))

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.params)))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        for name, value in params:
            assert self.params.setdefault(name, value) == value
        self.metrics += metrics


def test_mlflow_gets_the_configuration_as_parameters_and_what_changes_later_as_tags(monkeypatch: pytest.MonkeyPatch):
    client = FakeMlflow()
    entities = SimpleNamespace(Param=lambda *each: each, Metric=lambda name, value, time, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    config: dict[str, Any] = {"rl": {"steps": 4, "filters": ["truncated"]}, "many": {f"k{i}": i for i in range(150)}}
    tracker = MlflowTracker()
    tracker.open(Opening("moerl", "run", config))
    assert (client.params["rl.steps"], client.params["rl.filters"]) == ("4", '["truncated"]')
    assert len(client.params) == 152
    tracker.write("rl", 3, {"reward/mean": 0.5})
    assert client.metrics == [("rl/reward/mean", 0.5, 3)]
    tracker.close(failed=True)
    assert client.status == "FAILED"
    tracker = MlflowTracker()
    tracker.open(Opening("moerl", "run", {**config, "rl": {"steps": 8, "filters": ["truncated"]}}, "id"))
    assert (client.status, client.params["rl.steps"], client.tags) == ("RUNNING", "4", {"changed.rl.steps": "8"})


class FakeTrackio:
    """trackio, with runs that warn of the rows that they lose."""

    def __init__(self) -> None:
        self.latest_id, self.resumes = "mine", list[str]()

    def init(self, **settings: Any) -> Any:
        self.resumes.append(settings["resume"])
        return SimpleNamespace(id=self.latest_id, log=lambda row, step: None, finish=self._finish)

    def _finish(self) -> None:
        if len(self.resumes) > 1:
            warnings.warn("trackio failed to flush metric logs: database or disk is full", stacklevel=2)


@pytest.fixture
def fake_trackio(monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    return fake


def test_a_row_that_trackio_only_warns_of_losing_is_an_error(fake_trackio: FakeTrackio):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        tracker = TrackioTracker()
        assert tracker.open(OPENING) == "mine"
        tracker.flush()
        assert fake_trackio.resumes == ["never"]
        tracker.write("rl", 1, {"reward/mean": 0.5})
        tracker.flush()
        assert fake_trackio.resumes == ["never", "must"]
        tracker.write("rl", 2, {"reward/mean": 0.5})
        with pytest.raises(RuntimeError, match="disk is full"):
            tracker.flush()


def test_another_run_of_the_same_name_in_trackio_is_not_gone_on_with(fake_trackio: FakeTrackio):
    tracker = TrackioTracker()
    with pytest.raises(RuntimeError, match=r"is another one \(mine, not older\)"):
        tracker.open(Opening("moerl", "a-run", {}, run_id="older"))
