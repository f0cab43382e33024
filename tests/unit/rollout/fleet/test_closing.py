"""Engines that are closed while others use them, or before."""

from __future__ import annotations

import threading

import full_updates
import pytest
import torch
from fleet_fake import fall_asleep_behind_a_call, make_requests
from waiting import eventually

from moerl.errors import EngineError


@pytest.mark.parametrize("falls_asleep", [False, True], ids=["awake", "before its call returns to its thread"])
def test_closing_an_engine_ends_a_call_that_waits(
    falls_asleep: bool, servers, engine_on, monkeypatch: pytest.MonkeyPatch
):
    go_on = fall_asleep_behind_a_call(monkeypatch) if falls_asleep else threading.Event()
    release = threading.Event()
    servers[0].answer = lambda body: (503 if release.wait(20.0) else 504, b"")
    engine = engine_on(servers[0])
    problems: list[Exception] = []

    def call() -> None:
        try:
            list(engine.generate(make_requests(2)))
        except EngineError as error:
            problems.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: len(servers[0].attempts) == 2)
    engine.close()
    go_on.set()
    thread.join(20.0)
    release.set()
    assert "closed" in str(problems[0])


def test_a_call_that_comes_after_the_engine_was_closed_ends_at_once(servers, engine_on):
    engine = engine_on(servers[0])
    begun = engine.generate(make_requests(2))
    engine.close()
    for late in (begun, engine.generate(make_requests(2))):
        with pytest.raises(EngineError, match="closed"):
            list(late)
    with pytest.raises(EngineError, match="closed"):
        engine.begin_update(full_updates.full(4, {"a": torch.zeros(2, 3)}))
    assert servers[0].attempts == []
