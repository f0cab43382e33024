"""Servers that a sender sends to together, and servers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from full_updates import full

from moerl.contract.commands import Target
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket
from moerl.rollout.fleet.sender import Sender, WeightSet

BUCKET: Bucket = [("a", None)]


class Group:
    """sent: the servers of every call. fails: servers that fail, or what it raises."""

    def __init__(self, fails: set[str] | Exception) -> None:
        self.sent: list[list[str]] = []
        self.is_left = False
        self._fails = fails

    async def send(self, bucket: Bucket, channels: Mapping[str, Any], number: int) -> Mapping[str, WeightSyncError]:
        self.sent.append(list(channels))
        if isinstance(self._fails, Exception):
            raise self._fails
        return {key: WeightSyncError(f"{key} failed") for key in channels if key in self._fails}

    def leave(self) -> None:
        self.is_left = True


class Channel:
    def __init__(self, made: Made, target: Target) -> None:
        self._made, self._key, self.network = made, target.key, target.address["network"]

    def new_group(self) -> Group:
        self._made.groups.append(Group(self._made.fails))
        return self._made.groups[-1]

    async def close(self) -> None:
        self._made.closed.append(self._key)

    async def abandon(self) -> None:
        self._made.abandoned.append(self._key)


class Made:
    """Groups that a sender made, and servers that it closed or abandoned."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.closed: list[str] = []
        self.abandoned: list[str] = []
        self.fails: set[str] | Exception = set()

    def sender(self, *, together: bool = True) -> Sender:
        return Sender(WeightSet({}), lambda target: Channel(self, target), 1 << 20, together=together)


@pytest.fixture
def made() -> Made:
    return Made()


def targets(**networks: str) -> list[Target]:
    return [Target(key, key, {"network": network}) for key, network in networks.items()]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_servers_of_one_network_are_sent_to_together(made: Made):
    async def update() -> None:
        sender = made.sender()
        await sender.begin(full(0, {}), targets(a="x", b="x", c="y"))
        await sender.send_bucket(BUCKET)
        await sender.send_bucket(BUCKET)
        await sender.close()

    run(update())
    assert [group.sent for group in made.groups] == [[["a", "b"]] * 2, [["c"]] * 2]
    assert all(group.is_left for group in made.groups)
    assert sorted(made.closed) == ["a", "b", "c"]


def test_each_is_sent_to_alone_where_other_senders_send_to_it_too(made: Made):
    async def update() -> None:
        sender = made.sender(together=False)
        await sender.begin(full(0, {}), targets(a="x", b="x"))
        await sender.send_bucket(BUCKET)
        await sender.begin(full(0, {}), targets(b="x"))
        await sender.send_bucket(BUCKET)
        await sender.close()

    run(update())
    assert [group.sent for group in made.groups] == [[["a"]], [["b"], ["b"]]]
    assert made.groups[0].is_left


def test_a_server_that_fails_is_left_and_named_and_gets_no_more(made: Made):
    made.fails = {"a"}

    async def update() -> None:
        sender = made.sender()
        await sender.begin(full(0, {}), targets(a="x", b="x"))
        await sender.send_bucket(BUCKET)
        assert sender.failed().keys() == {"a"}
        await sender.send_bucket(BUCKET)
        assert sender.failed() == {}

    run(update())
    assert made.groups[0].sent == [["a", "b"], ["b"]]
    assert made.abandoned == ["a"]


@pytest.mark.parametrize("error", [OSError("no such address"), RuntimeError("of a process group")])
def test_servers_that_no_group_can_be_made_with_have_failed(error: Exception, made: Made):
    made.fails = error

    async def update() -> None:
        sender = made.sender()
        await sender.begin(full(0, {}), targets(a="x"))
        await sender.send_bucket(BUCKET)
        assert str(error) in sender.failed()["a"]

    run(update())
