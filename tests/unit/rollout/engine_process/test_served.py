"""Work of the engine's process between two decoding steps, and buckets that arrive meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any, cast

import pytest
from full_updates import full

from moerl.contract.weight_update import WeightUpdate
from moerl.errors import WeightSyncError
from moerl.processes.channel import receive, send
from moerl.rollout.engine_process import served
from moerl.rollout.engine_process.messages import Update, decode_for_controller, encode
from moerl.rollout.engine_process.served import OpenUpdate


class Engine:
    """Stands in for an engine; refuses the version 13."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_update(self, update: WeightUpdate) -> None:
        if update.version == 13:
            raise MemoryError("no room")
        self.calls.append(update.version)

    def receive(self, tensors: Iterable[Any]) -> None:
        self.calls.append("bucket")

    def end_update(self) -> None:
        self.calls.append("end")

    def abandon_update(self) -> None:
        self.calls.append("abandon")

    def verify(self, sent: dict[str, int]) -> None:
        self.calls.append("verify")

    def held_dtypes(self) -> dict[str, str]:
        return {}

    class costs:  # noqa: N801 - stands in for a dataclass
        interrupted, stalled_seconds = 0, 0.0


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def update(engine: Engine) -> OpenUpdate:
    return OpenUpdate(cast(Any, engine))


def test_the_end_of_an_update_and_its_check_lie_between_the_same_two_steps(
    engine: Engine, update: OpenUpdate, monkeypatch: pytest.MonkeyPatch
):
    """Each is sent when the one before is answered: without patience sampling would go on between them."""
    monkeypatch.setattr(served, "_PATIENCE_SECONDS", 60.0)
    ours, theirs = socket.socketpair()
    process = object.__new__(served._Served)
    process._connection, process._engine, process._updates = theirs, cast(Any, engine), update
    answers = []

    def ask() -> None:
        for following in (Update("end"), Update("verify"), None):
            answers.append(decode_for_controller(receive(ours)[0]))
            if following is not None:
                send(ours, encode(following))

    with ours, theirs:
        send(ours, encode(Update("begin", full(1, {}))))  # has no answer
        send(ours, encode(Update("held_dtypes")))
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert process._take(False) == []
        asking.join(2.0)
        assert len(answers) == 3
    assert engine.calls == [1, "end", "verify"]


def test_a_bucket_waits_for_the_begin_of_its_update(engine: Engine, update: OpenUpdate):
    thread = threading.Thread(target=update.take, args=(4, []))
    thread.start()
    update.begin(full(3, {}))
    thread.join(0.2)
    assert engine.calls == [3]
    update.begin(full(4, {}))
    thread.join(20.0)
    assert engine.calls == [3, 4, "bucket"]


@pytest.mark.parametrize("over", ["end", "abandon"])
def test_a_bucket_that_comes_after_its_update_is_refused(
    over: str, engine: Engine, update: OpenUpdate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served, "_BEGIN_SECONDS", 0.05)
    update.begin(full(4, {}))
    getattr(update, over)()
    with pytest.raises(WeightSyncError, match="did not begin; seen: version 4"):
        update.take(4, [])
    assert engine.calls == [4, over]


def test_an_update_that_cannot_begin_is_the_error_of_its_buckets_and_of_its_end(engine: Engine, update: OpenUpdate):
    update.begin(full(13, {}))
    for call in (lambda: update.take(13, []), update.end):
        with pytest.raises(MemoryError, match="no room"):
            call()
    update.begin(full(14, {}))
    update.take(14, [])
    update.end()
    assert engine.calls == [14, "bucket", "end"]
