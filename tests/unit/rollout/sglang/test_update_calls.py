"""Calls by which a server on the trainer's devices releases memory and takes it back, in their order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moerl.errors import EngineError, WeightSyncError
from moerl.rollout.sglang.update_calls import UpdateCalls


class Told:
    """A server that does what it is told, and refuses one path; in place of `SGLangHttp`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.refused = ""

    async def call_once(self, path: str, body: dict[str, Any], *args: Any, **kwargs: Any) -> bytes:
        if path == self.refused:
            raise EngineError("refused")
        self.calls.append((path.removeprefix("/"), tuple(body.get("tags", ()))))
        return b"{}"

    def memory(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(path.partition("_")[0], tags) for path, tags in self.calls if tags]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def calls(told: Told) -> UpdateCalls:
    return UpdateCalls("s", told, 60.0)  # pyright: ignore[reportArgumentType]


def run(*steps: Any) -> None:
    async def all_of_them() -> None:
        for step in steps:
            await step

    asyncio.run(all_of_them())


def test_the_cache_comes_back_last_when_the_trainer_has_given_its_weights_away(told: Told, calls: UpdateCalls) -> None:
    for _ in range(2):
        told.calls.clear()
        run(calls.sleep(), calls.begin_update(), calls.end_update(1), calls.resume())
        released, *taken = told.memory()
        assert released == ("release", ("weights", "kv_cache"))
        assert taken == [("resume", ("weights",)), ("resume", ("kv_cache",))]
        paths = [path for path, _ in told.calls]
        assert paths.index("resume_memory_occupation") < paths.index("begin_weight_update")
        assert paths[-3:] == ["update_weight_version", "resume_memory_occupation", "continue_generation"]


def test_a_server_whose_update_was_broken_off_takes_and_gives_nothing_twice(told: Told, calls: UpdateCalls) -> None:
    run(calls.sleep(), calls.begin_update(), calls.begin_update())
    assert told.memory()[1:] == [("resume", ("weights",))]
    run(calls.sleep())
    assert told.memory()[-1] == ("release", ("weights",))
    run(calls.begin_update(), calls.end_update(2), calls.resume(), calls.resume())
    assert told.memory()[-2:] == [("resume", ("weights",)), ("resume", ("kv_cache",))]


def test_memory_that_did_not_come_back_is_asked_for_again(told: Told, calls: UpdateCalls) -> None:
    run(calls.sleep())
    told.refused = "/resume_memory_occupation"
    with pytest.raises(WeightSyncError, match="begin: /resume_memory_occupation failed"):
        run(calls.begin_update())
    told.refused = ""
    run(calls.begin_update())
    assert told.memory()[-1] == ("resume", ("weights",))
