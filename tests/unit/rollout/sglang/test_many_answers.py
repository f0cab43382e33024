"""Requests of one turn of the event loop in one call, and its answers one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from sglang_fake import Answer, FakeServer, reply
from sglang_live import over_http
from waiting import eventually

from moerl.errors import EngineError
from moerl.rollout.fleet.backend import TransportError
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.many_answers import HEAD, Frames, ManyAnswers

LIMIT = 1 << 20


def body_of(number: int) -> dict[str, Any]:
    return {
        "rid": f"r{number}",
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 1},
        "return_sampling_mask": False,
    }


def rid_of(content: bytes) -> str:
    return msgspec.msgpack.decode(content)["meta_info"]["id"]


def asking[T](
    fake: FakeServer, ask: Callable[[ManyAnswers], Awaitable[T]], *, seconds: float = 60.0, max_connections: int = 8
) -> T:
    async def run(http: SGLangHttp) -> T:
        answers = ManyAnswers(http, seconds)
        try:
            return await ask(answers)
        finally:
            await answers.close()

    return over_http(fake.endpoint, run, max_connections=max_connections)


async def ask_each(answers: ManyAnswers, count: int, limit: int = LIMIT) -> list[bytes | BaseException]:
    asks = (answers.ask(body_of(number), limit) for number in range(count))
    return await asyncio.gather(*asks, return_exceptions=True)


def test_requests_of_one_turn_go_in_one_call_and_each_gets_its_own_answer(fake: FakeServer):
    found = asking(fake, lambda answers: ask_each(answers, 20))
    assert [rid_of(each) for each in found if isinstance(each, bytes)] == [f"r{i}" for i in range(20)]
    assert fake.calls == [20]


def test_no_call_has_more_requests_than_may_be_lost_together(fake: FakeServer):
    assert len(asking(fake, lambda answers: ask_each(answers, 150))) == 150
    assert sorted(fake.calls) == [22, 64, 64]


@pytest.mark.parametrize(("pause", "calls"), [(0.05, [1, 1]), (None, [2])], ids=["of another turn", "of its call"])
def test_an_answer_does_not_wait_for_a_slower_one(pause: float | None, calls: list[int], fake: FakeServer):
    answered = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        assert body["rid"] == "r1" or answered.wait(60.0)
        return 200, msgspec.msgpack.encode(reply(body))

    fake.answer = answer

    async def ask(answers: ManyAnswers) -> list[str]:
        slow = asyncio.create_task(answers.ask(body_of(0), LIMIT))
        if pause is not None:
            await asyncio.sleep(pause)
        quick = rid_of(await answers.ask(body_of(1), LIMIT))
        answered.set()
        return [quick, rid_of(await slow)]

    assert asking(fake, ask) == ["r1", "r0"]
    assert fake.calls == calls


def test_a_refused_request_is_refused_alone(fake: FakeServer):
    good = fake.answer
    statuses = {"r1": 400, "r2": 503}
    fake.answer = lambda body: (statuses[body["rid"]], b"no") if body["rid"] in statuses else good(body)
    whole, refused, busy, other = asking(fake, lambda answers: ask_each(answers, 4))
    assert isinstance(whole, bytes)
    assert isinstance(other, bytes)
    assert type(refused) is EngineError
    assert type(busy) is TransportError


def test_what_a_broken_connection_did_not_bring_may_be_asked_for_again(fake: FakeServer):
    good, arrived = fake.answer, threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        if body["rid"] == "r0":
            return good(body)
        arrived.wait(60.0)
        return 0, b""

    fake.answer = answer

    async def ask(answers: ManyAnswers) -> BaseException | bytes:
        first = asyncio.create_task(answers.ask(body_of(0), LIMIT))
        second = asyncio.create_task(answers.ask(body_of(1), LIMIT))
        await first
        arrived.set()
        (found,) = await asyncio.gather(second, return_exceptions=True)
        return found

    assert type(asking(fake, ask)) is TransportError


@pytest.mark.parametrize(
    ("spoilt", "match"),
    [
        (lambda frame: HEAD.pack(7, 200, 1) + b"x", "an answer to nothing"),
        (lambda frame: frame + frame, "an answer to nothing"),
        (lambda frame: HEAD.pack(0, 200, LIMIT + 1), "too long"),
        (lambda frame: HEAD.pack(0, 503, 1 << 17), "too long"),
    ],
    ids=["of another place", "a second time", "too long", "a long refusal"],
)
def test_frames_that_are_no_answers_fail_the_call(spoilt: Callable[[bytes], bytes], match: str, fake: FakeServer):
    fake.spoil = lambda place, frame: spoilt(frame) if place == 0 else frame
    answered = threading.Event()
    good = fake.answer

    def answer(body: dict[str, Any]) -> Answer:
        assert body["rid"] == "r0" or answered.wait(60.0)
        return good(body)

    fake.answer = answer

    async def ask(answers: ManyAnswers) -> list[BaseException | bytes]:
        asks = [asyncio.create_task(answers.ask(body_of(number), LIMIT)) for number in range(2)]
        await asyncio.wait({asks[0]}, timeout=0.2)
        answered.set()
        return await asyncio.gather(*asks, return_exceptions=True)

    failed = [each for each in asking(fake, ask) if not isinstance(each, bytes)]
    assert failed
    assert all(type(each) is TransportError for each in failed)
    assert match in str(failed[-1])


@pytest.mark.parametrize("length", [0, 1, HEAD.size, -1])
def test_a_response_that_ends_before_its_answers_is_none(length: int, fake: FakeServer):
    fake.spoil = lambda place, frame: frame[:length]
    (found,) = asking(fake, lambda answers: ask_each(answers, 1))
    assert type(found) is TransportError


def test_frames_are_told_apart_wherever_the_stream_is_cut():
    contents = [b"", b"abc", bytes(300)]
    stream = b"".join(HEAD.pack(place, 200, len(content)) + content for place, content in enumerate(contents))
    for size in (1, 2, 11, 12, 13, 100, len(stream)):
        frames = Frames([LIMIT] * 3)
        found = [frame for at in range(0, len(stream), size) for frame in frames.read(stream[at : at + size])]
        assert found == [(place, 200, content) for place, content in enumerate(contents)]


def test_each_request_has_its_own_deadline_and_the_server_is_told_when_it_passes(fake: FakeServer):
    released = threading.Event()
    good = fake.answer
    fake.answer = lambda body: good(body) if body["rid"] == "r0" or released.wait(60.0) else (0, b"")

    async def ask(answers: ManyAnswers) -> list[bytes | BaseException]:
        found = await ask_each(answers, 3)
        await asyncio.sleep(0.1)
        released.set()
        return found

    whole, *late = asking(fake, ask, seconds=0.5)
    assert isinstance(whole, bytes)
    assert all("no answer in time" in str(each) for each in late)
    # Nobody waits for anything of that call any more: its connection is closed.
    eventually(lambda: fake.left == 1)


def test_a_request_that_nobody_waits_for_is_aborted_and_the_others_of_its_call_go_on(fake: FakeServer):
    released = threading.Event()
    good = fake.answer
    fake.answer = lambda body: good(body) if released.wait(60.0) else (0, b"")

    async def ask(answers: ManyAnswers) -> list[str]:
        asks = [asyncio.create_task(answers.ask(body_of(number), LIMIT)) for number in range(3)]
        while not fake.bodies:
            await asyncio.sleep(0.01)
        asks[1].cancel()
        while not fake.admin_calls:
            await asyncio.sleep(0.01)
        released.set()
        return [rid_of(await each) for each in (asks[0], asks[2])]

    assert asking(fake, ask) == ["r0", "r2"]
    assert fake.admin_calls == [("/abort_request", {"rid": "r1"})]
    assert fake.left == 0


def test_a_request_that_is_cancelled_before_its_call_is_not_sent(fake: FakeServer):
    async def ask(answers: ManyAnswers) -> str:
        asks = [asyncio.create_task(answers.ask(body_of(number), LIMIT)) for number in range(2)]
        await asyncio.sleep(0)
        asks[0].cancel()
        return rid_of(await asks[1])

    assert asking(fake, ask) == "r1"
    assert [body["rid"] for body in fake.bodies] == ["r1"]
    assert fake.admin_calls == []


def test_what_is_under_way_when_its_server_is_given_up_fails_and_is_not_cancelled(fake: FakeServer):
    released = threading.Event()
    fake.answer = lambda body: (503 if released.wait(60.0) else 504, b"")

    async def ask(answers: ManyAnswers) -> list[bytes | BaseException]:
        asks = asyncio.create_task(ask_each(answers, 3))
        while len(fake.bodies) < 3:
            await asyncio.sleep(0.01)
        await answers.close()
        return await asks

    found = asking(fake, ask)
    released.set()
    assert {type(each) for each in found} == {TransportError}
    assert "given up" in str(found[0])
