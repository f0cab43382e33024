"""Callers are let in by their key; those without one keep nobody waiting, however many and whatever they say."""

from __future__ import annotations

import ast
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest
from strangers import SAYINGS, calling, is_hung_up_on
from used_names import places_of, used_names
from waiting import eventually

from moerl.processes import admission as module
from moerl.processes.admission import Admission, connect

HOST = "127.0.0.1"


class House:
    """An admission, and who was let in."""

    def __init__(self) -> None:
        self.guests: SimpleQueue[Connection] = SimpleQueue()
        self.door = Admission(HOST, self.guests.put)

    def greets(self) -> bool:
        """A caller who knows the key is let in, and what it says arrives."""
        with connect(HOST, self.door.port, self.door.key, seconds=30.0) as ours:
            ours.send_bytes(b"hello")
            with self.guests.get(timeout=30.0) as theirs:
                return theirs.recv_bytes() == b"hello"


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.door.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers are heard for longer than a test lasts."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("said", SAYINGS.values(), ids=SAYINGS.keys())
def test_strangers_keep_nobody_waiting_whatever_they_say(said: bytes, house: House) -> None:
    with calling(HOST, house.door.port, said, count=20):
        assert house.greets()


def num_handshakes() -> int:
    return sum(thread.name == "handshake" for thread in threading.enumerate())


@pytest.mark.usefixtures("patient")
def test_more_strangers_than_are_heard_keep_nobody_out(house: House) -> None:
    with calling(HOST, house.door.port, b"", count=3 * module.MAX_HANDSHAKES) as callers:
        assert house.greets()
        assert all(is_hung_up_on(caller) for caller in callers[: module.MAX_HANDSHAKES])
        eventually(lambda: num_handshakes() <= module.MAX_HANDSHAKES)


def test_callers_who_come_all_the_time_keep_nobody_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 600.0)
    is_over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not is_over.wait(0.001):
            held.append(socket.create_connection((HOST, house.door.port)))
        for each in held:
            each.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert house.greets()
    finally:
        is_over.set()
        thread.join()


def test_a_stranger_who_takes_too_long_is_hung_up_on_even_if_it_says_something_now_and_then(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)
    with calling(HOST, house.door.port, (200).to_bytes(4)) as (caller,):
        is_over = threading.Event()

        def dribble() -> None:
            try:
                while not is_over.wait(0.05):
                    caller.sendall(b"x")
            except OSError:
                return

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            assert is_hung_up_on(caller)
        finally:
            is_over.set()
            thread.join()


def test_a_caller_with_another_key_is_told_so(house: House) -> None:
    with pytest.raises(AuthenticationError):
        connect(HOST, house.door.port, b"another key", seconds=30.0)
    assert house.greets()


def test_who_is_refused_or_late_is_hung_up_on_and_a_closed_door_lets_nobody_in() -> None:
    def refuse(connection: Connection) -> None:
        raise ConnectionRefusedError("no room")

    door = Admission(HOST, refuse)
    with connect(HOST, door.port, door.key) as ours, pytest.raises((EOFError, ConnectionError)):
        ours.recv_bytes()
    with calling(HOST, door.port, b"") as (caller,):
        eventually(lambda: bool(door._heard))
        door.close()
        assert is_hung_up_on(caller)
    with pytest.raises(OSError):  # noqa: PT011 - refused, or reset by the kernel
        connect(HOST, door.port, door.key, seconds=0.1)
    door.close()
    eventually(lambda: not any(thread.name in ("admission", "handshake") for thread in threading.enumerate()))


# --- where callers are accepted --------------------------------------------------------------------------------------

LISTENS = {
    "processes/admission.py": "the one place",
    "launch/doctor/machine.py": "probes of `moerl doctor`, with a limit",
    "ranks/on_ray/actor.py": "torch's TCPStore accepts at it, in no order",
    "rollout/sglang/sender_group.py": "the same",
}
"""Files that listen at a TCP port, and why they may."""

LISTENERS = {
    *("socket.create_server", "multiprocessing.connection.Listener", "socketserver.TCPServer"),
    *("socketserver.ThreadingTCPServer", "http.server.HTTPServer", "http.server.ThreadingHTTPServer"),
    *("multiprocessing.connection.deliver_challenge", "multiprocessing.connection.answer_challenge"),
    *("asyncio.start_server", "xmlrpc.server.SimpleXMLRPCServer", "multiprocessing.managers.BaseManager"),
}


def test_callers_are_accepted_in_one_place() -> None:
    assert places_of(LISTENERS) == LISTENS.keys()


@pytest.mark.parametrize(
    "program", ["from multiprocessing.connection import Listener as L\nL()", "import socket\nsocket.create_server(1)"]
)
def test_a_listener_is_found_however_it_is_written(program: str) -> None:
    assert used_names(ast.parse(program)) & LISTENERS
