"""Updates of an engine that the controller leads: the order of calls, and what is left after each failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fleet_fake
import pytest
import torch
from waiting import eventually

from moerl.contract.commands import AnyCommand, Build, Close, KeepWeights, Publish, Reply, UseOfDevice
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.errors import EngineError, TrainerError, WeightSyncError
from moerl.ranks import updates
from moerl.ranks.group import TrainerGroup
from moerl.ranks.senders import RanksInTurn
from moerl.ranks.updates import LedUpdates
from moerl.rollout.engine_process.engine import ProcessEngine

DTYPES = {"a": "bfloat16", "b": "float32"}
SHAPES = {"a": (1,), "b": (1,)}
METRICS = {"weights/end_seconds": 0.0, "weights/bytes": 4.0}


class Engine:
    """Stands in for an engine. calls: of it and of the ranks, in order. at: a call that fails with `problem`, or that
    waits for `go_on`."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.at = ""
        self.problem: Exception | None = None
        self.go_on = threading.Event()

    def _pass(self, call: str, *more: Any) -> None:
        self.calls.append((call, *more) if more else call)
        if call == self.at:
            if self.problem is not None:
                raise self.problem
            assert self.go_on.wait(20.0)

    def held_dtypes(self) -> Mapping[str, str]:
        self._pass("held_dtypes")
        return DTYPES

    def begin_update(self, update: WeightUpdate) -> None:
        self._pass("begin", update.version)
        assert update == WeightUpdate(update.version, UpdateKind.FULL, SHAPES)

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._pass("receive", [name for name, _ in tensors])

    def end_update(self) -> None:
        self._pass("end")

    def verify(self, sent: Mapping[str, int]) -> None:
        self._pass("verify", dict(sent))

    def abandon_update(self) -> None:
        self.calls.append("abandon")


class Beside(Engine, ProcessEngine):
    """Stands in for an engine in a process of its own."""

    receiver = None  # pyright: ignore[reportAssignmentType]


class FakeRanks:
    """Two senders elsewhere. problem: raised by the next command."""

    peak_rss_bytes = ()

    def __init__(self, calls: list[Any], *, is_here: bool = False) -> None:
        self.calls, self.is_here = calls, is_here
        self.problem: Exception | None = None
        self.told: list[AnyCommand] = []

    def adopt(self, engine: Any) -> bool:
        return self.is_here

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        self.told.append(command)
        self.calls.append(command.name)

    def replies(self) -> list[Reply]:
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
        command = self.told[-1]
        if isinstance(command, Build):
            return [Reply(tensors=SHAPES), Reply()]
        checksums: list[dict[str, int | None]] = [{"a": 1}, {"b": 2}]
        if isinstance(command, Publish) and command.dtypes is None:
            checksums = [{"a": None}, {"b": None}]
        return [Reply(metrics=METRICS, checksums=each, failed={"k": "lost"}) for each in checksums]

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        self.tell(command, frames)
        return self.replies()

    def close(self) -> None:
        self.calls.append("close")


def config_of(folder: Path, *, transport: str = "direct", step_seconds: float = 20.0) -> Any:
    return SimpleNamespace(
        weights=SimpleNamespace(transport=transport, step_seconds=step_seconds),
        launch=SimpleNamespace(on="local", address=None),
        run_dir=folder,
    )


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def engine(calls: list[Any]) -> Engine:
    return Engine(calls)


@pytest.fixture
def ranks(calls: list[Any]) -> FakeRanks:
    return FakeRanks(calls, is_here=True)


Lead = Callable[..., LedUpdates]


@pytest.fixture
def lead(ranks: FakeRanks, tmp_path: Path) -> Lead:
    def make(engine: Engine, **changes: Any) -> LedUpdates:
        led = LedUpdates(config_of(tmp_path, **changes), RanksInTurn(cast(Any, ranks)), cast(Any, engine))
        led.tensors = SHAPES
        return led

    return make


def refuse(problem: Exception | None) -> None:
    raise AssertionError(f"taken, or not: {problem}")


def test_the_controller_begins_an_update_has_ranks_publish_and_ends_and_checks_it(
    lead: Lead, engine: Engine, ranks: FakeRanks, calls: list[Any]
):
    taken: list[Exception | None] = []
    finish = lead(engine).publish(3, verify=True, done=taken.append)
    assert calls == ["held_dtypes", ("begin", 3), "publish"]
    assert ranks.told == [Publish(3, UpdateKind.FULL, DTYPES)]
    assert taken == []
    metrics = finish()
    assert calls[3:] == ["end", ("verify", {"a": 1, "b": 2})]
    assert taken == [None]
    assert metrics.keys() == METRICS.keys() | {"weights/check_seconds"}
    assert metrics["weights/end_seconds"] > 0 < metrics["weights/check_seconds"]


def test_an_update_lists_the_tensors_that_the_first_rank_reported_when_the_stage_was_built(
    engine: Engine, ranks: FakeRanks, tmp_path: Path
):
    trainer = TrainerGroup(config_of(tmp_path), cast(Any, ranks))
    trainer.build("rl", tmp_path, fleet_fake.SPEC, cast(Any, engine))
    begun: list[WeightUpdate] = []
    engine.begin_update = lambda update: begun.append(update)
    trainer.publish(3, verify=False, done=lambda problem: None)()
    assert begun == [WeightUpdate(3, UpdateKind.FULL, SHAPES)]


def test_an_update_that_is_not_checked_asks_for_no_checksums(
    lead: Lead, engine: Engine, ranks: FakeRanks, calls: list[Any]
):
    metrics = lead(engine).publish(3, verify=False, done=lambda problem: None)()
    assert calls == [("begin", 3), "publish", "end"]
    assert ranks.told == [Publish(3, UpdateKind.FULL, None)]
    assert metrics["weights/check_seconds"] == 0.0


def test_an_engine_takes_a_version_from_the_disk_once_all_ranks_have_written_it(
    lead: Lead, engine: Engine, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[Any] = []

    def read_buckets(folder: Path, update: WeightUpdate) -> list[list[tuple[str, torch.Tensor]]]:
        read.append((folder, update))
        return [[("a", torch.ones(1))], [("b", torch.ones(1))]]

    monkeypatch.setattr(updates, "read_buckets", read_buckets)
    lead(engine, transport="disk").publish(3, verify=True, done=lambda problem: None)()
    both = [("receive", ["a"]), ("receive", ["b"])]
    assert calls == ["held_dtypes", "publish", ("begin", 3), *both, "end", ("verify", {"a": 1, "b": 2})]
    assert read == [(tmp_path / "weights", WeightUpdate(3, UpdateKind.FULL, SHAPES))]


def test_ranks_that_fail_leave_the_engine_with_the_version_it_had(
    lead: Lead, engine: Engine, ranks: FakeRanks, calls: list[Any]
):
    ranks.problem = WeightSyncError("a rank is gone")
    finish = lead(engine).publish(3, verify=True, done=refuse)
    with pytest.raises(WeightSyncError, match="a rank is gone"):
        finish()
    eventually(lambda: calls[3:] == ["abandon"])


@pytest.mark.parametrize(
    ("at", "before"),
    [
        ("held_dtypes", ["held_dtypes"]),
        ("begin", ["held_dtypes", ("begin", 3)]),
        ("end", ["held_dtypes", ("begin", 3), "publish", "end"]),
        ("verify", ["held_dtypes", ("begin", 3), "publish", "end", ("verify", {"a": 1, "b": 2})]),
    ],
)
def test_an_engine_that_fails_is_named_with_the_call_and_no_step_follows(
    at: str, before: list[Any], lead: Lead, engine: Engine, calls: list[Any]
):
    engine.at, engine.problem = at, ZeroDivisionError("of the engine")
    with pytest.raises(WeightSyncError, match=f"the engine failed in {at}.*ZeroDivisionError: of the engine"):
        lead(engine).publish(3, verify=True, done=refuse)()
    eventually(lambda: calls == [*before, "abandon"])


def test_what_an_engine_says_of_itself_is_noted_when_ranks_fail(lead: Lead, engine: Engine, ranks: FakeRanks):
    ranks.problem = WeightSyncError("a bucket was not taken")

    def abandon() -> None:
        raise EngineError("the process was killed")

    engine.abandon_update = abandon
    with pytest.raises(WeightSyncError, match="a bucket was not taken") as error:
        lead(engine).publish(3, verify=True, done=refuse)()
    assert error.value.__notes__ == ["and the process was killed"]


def test_an_engine_that_does_not_come_back_is_named_and_the_next_update_begins_once_it_does(
    lead: Lead, engine: Engine, calls: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(updates, "_ABANDON_SECONDS", 0.01)
    led = lead(engine, step_seconds=0.1)
    engine.at = "end"
    with pytest.raises(WeightSyncError, match="the engine has not come back from end_update"):
        led.publish(3, verify=False, done=refuse)()
    with pytest.raises(WeightSyncError, match=r"begin_update\(4\).*busy with end_update"):
        led.publish(4, verify=False, done=refuse)
    engine.at = ""
    engine.go_on.set()
    eventually(lambda: calls[-1] == "abandon")
    led._thread.step_seconds = 20.0
    led.publish(5, verify=False, done=lambda problem: None)()
    assert calls[-3:] == [("begin", 5), "publish", "end"]


def test_an_engine_in_a_process_of_its_own_ends_an_update_while_ranks_go_on(
    lead: Lead, ranks: FakeRanks, calls: list[Any]
):
    ranks.is_here, engine, taken = False, Beside(calls), list[Exception | None]()
    led = lead(engine)
    engine.at = "end"
    metrics = led.publish(3, verify=True, done=taken.append)()
    assert metrics["weights/check_seconds"] == 0.0
    eventually(lambda: calls[-1] == "end")
    assert taken == []
    engine.go_on.set()
    eventually(lambda: taken == [None])
    assert calls[-1] == ("verify", {"a": 1, "b": 2})


def test_what_goes_wrong_while_ranks_go_on_is_given_to_the_loop(lead: Lead, ranks: FakeRanks, calls: list[Any]):
    ranks.is_here, engine, taken = False, Beside(calls), list[Exception | None]()
    engine.at, engine.problem = "verify", WeightSyncError("it differs")
    lead(engine).publish(3, verify=True, done=taken.append)()
    eventually(lambda: taken == [engine.problem])


def test_an_engine_of_this_process_has_a_receiver_for_ranks_elsewhere_alone(
    lead: Lead, engine: Engine, ranks: FakeRanks
):
    assert lead(engine).receiver is None
    ranks.is_here = False
    led = lead(engine)
    assert led.receiver is not None
    assert led.receiver.shares_memory
    led.close()
    assert lead(engine, transport="disk").receiver is None


# --- commands from more than one thread ------------------------------------------------------------------------------


def test_another_thread_waits_until_the_loop_has_its_replies(ranks: FakeRanks, calls: list[Any]):
    in_turn, done = RanksInTurn(cast(Any, ranks)), threading.Event()

    def aside() -> None:
        in_turn.ask_aside(KeepWeights(3))
        done.set()

    in_turn.tell(Publish(3, UpdateKind.FULL, None))
    thread = threading.Thread(target=aside)
    thread.start()
    assert not done.wait(0.2)
    assert calls == ["publish"]
    in_turn.replies()
    thread.join(20.0)
    assert calls == ["publish", "keepweights"]
    in_turn.close()


def test_a_command_that_was_told_and_not_heard_is_ended_by_the_next_one(ranks: FakeRanks, calls: list[Any]):
    in_turn = RanksInTurn(cast(Any, ranks))
    in_turn.tell(Publish(3, UpdateKind.FULL, None))
    in_turn.ask(UseOfDevice())
    thread = threading.Thread(target=in_turn.ask_aside, args=(KeepWeights(3),))
    thread.start()
    thread.join(20.0)
    assert calls == ["publish", "useofdevice", "keepweights"]


def test_ranks_that_are_lost_in_another_thread_are_the_error_of_the_loops_next_command(ranks: FakeRanks):
    in_turn = RanksInTurn(cast(Any, ranks))
    ranks.problem = TrainerError("rank 1 was lost", seen="killed")
    with pytest.raises(WeightSyncError, match="rank 1 was lost; seen: killed"):
        in_turn.ask_aside(KeepWeights(3))
    with pytest.raises(TrainerError, match="rank 1 was lost"):
        in_turn.ask(UseOfDevice())


def test_ranks_that_refuse_another_threads_command_go_on(ranks: FakeRanks, calls: list[Any]):
    in_turn = RanksInTurn(cast(Any, ranks))
    ranks.problem = WeightSyncError("no copy is kept")
    with pytest.raises(WeightSyncError, match="no copy is kept"):
        in_turn.ask_aside(KeepWeights(3))
    in_turn.ask(Close())
    assert calls == ["keepweights", "close"]


def test_ranks_are_closed_although_another_thread_waits_for_them(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moerl.ranks.senders.GRACE_SECONDS", 0.05)
    in_turn, has_turn, ends = RanksInTurn(cast(Any, ranks)), threading.Event(), threading.Event()

    def hold() -> None:
        with in_turn._turn:
            has_turn.set()
            ends.wait(20.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_turn.wait(20.0)
    in_turn.close()
    assert ranks.calls == ["close"]
    ends.set()
    thread.join(20.0)
