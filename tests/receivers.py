"""Plain processes that receive weights as patched servers do: they run the relay of `patches/sglang`."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import secrets
import signal
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.processes.loop_thread import in_thread
from moerl.rollout.sglang.invitation import Invitation
from moerl.rollout.sglang.patches import read_patches
from moerl.rollout.sglang.sender_group import flattened
from moerl.rollout.sglang.unified_diff import apply_patch

RELAY = "sglang/srt/weight_sync/relay.py"


def load_relay() -> ModuleType:
    """The module that the patches add."""
    patches = [(patch.name, file) for patch in read_patches().patches for file in patch.files if file.path == RELAY]
    [(name, file)] = patches
    text = apply_patch(None, file, name)
    assert text is not None
    module = ModuleType("relay")
    exec(compile(text, RELAY, "exec"), module.__dict__)
    return module


class PlainReceiver:
    """A `Receiver` whose ranks are processes of their own. loaded: digests of the buckets that it has taken."""

    def __init__(self, name: str, num_ranks: int = 1) -> None:
        self.key, self.name, self.num_ranks = secrets.token_hex(4), name, num_ranks
        self.loaded: list[str] = []
        self.num_joined = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._processes, self._connections = [], []
        for offset in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, offset), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    async def join(self, invitation: Invitation) -> None:
        self.num_joined += 1
        await in_thread(lambda: self._call("join", invitation))

    async def take(self, bucket: Sequence[tuple[str, Tensor]], number: int) -> None:
        await in_thread(lambda: self._take(flattened(bucket).numel()))

    def _take(self, num_bytes: int) -> None:
        answers = self._call("take", num_bytes)
        assert len(set(answers)) == 1
        self.loaded.append(answers[0])

    def fail(self, at: str, how: str = "error") -> None:
        """Makes the first rank fail when it joins, or takes a bucket: at its beginning, at the third piece, or at its
        end. how: error, SIGKILL or SIGSTOP."""
        self._connections[0].send(("fail", (at, how)))
        self._connections[0].recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _call(self, what: str, argument: Any) -> Any:
        try:
            for connection in self._connections:
                connection.send((what, argument))
            answers = [connection.recv() for connection in self._connections]
        except (OSError, EOFError) as error:
            raise WeightSyncError(f"server {self.name!r}, {what}: it is gone") from error
        for is_good, text in answers:  # of a server, the first rank's counts
            if not is_good:
                raise WeightSyncError(f"server {self.name!r}, {what}: {text}")
        return [text for _, text in answers]


class _Faulty:
    """A group that fails at the third piece."""

    def __init__(self, group: Any, fail: Any) -> None:
        self._group, self._fail, self.num_pieces = group, fail, 0
        self.send = group.send

    def recv(self, *arguments: Any) -> Any:
        work = self._group.recv(*arguments)
        return _FaultyWork(work, self._piece)

    def _piece(self) -> None:
        self.num_pieces += 1
        if self.num_pieces == 3:
            self._fail("piece")


class _FaultyWork:
    def __init__(self, work: Any, before: Any) -> None:
        self._work, self._before = work, before

    def wait(self, timeout: timedelta) -> None:
        self._before()
        self._work.wait(timeout)


class _Rank:
    """One rank of a receiver, in its own process."""

    def __init__(self, offset: int) -> None:
        self._offset, self._fault = offset, ("", "")
        self._relay: Any = None
        self._group: _Faulty | None = None
        self._module = load_relay()

    def fail(self, fault: tuple[str, str]) -> str:
        self._fault = fault
        return ""

    def join(self, invitation: Invitation) -> str:
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

        self._relay = self._group = None
        self._at("join")
        rank, seconds = invitation.rank_offset + self._offset, invitation.relay_seconds
        where = (invitation.master_address, invitation.master_port, invitation.world_size, rank, invitation.group_name)
        store = self._module.join_store(*where, seconds)
        self._at("store")
        try:
            group, _ = _new_process_group_helper(
                invitation.world_size,
                rank,
                [],
                Backend(invitation.backend),
                store,
                group_name=invitation.group_name,  # pyright: ignore[reportArgumentType]
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            raise RuntimeError(f"Failed to initialize custom process group: {error}") from error
        route = self._module.route_of(rank, list(invitation.relay_first_ranks), invitation.world_size)
        self._group = _Faulty(group, self._at)
        self._relay = self._module.Relay(self._group, route, invitation.relay_piece_bytes, seconds)
        return ""

    def take(self, num_bytes: int) -> str:
        import torch

        self._at("begin")
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            if self._relay is None or self._group is None:
                raise RuntimeError("no group")
            self._group.num_pieces = 0
            self._relay.receive(flat)
        except RuntimeError:
            self._relay = self._group = None
            raise
        self._at("end")
        return hashlib.sha256(flat.numpy()).hexdigest()

    def _at(self, point: str) -> None:
        at, how = self._fault
        if at == point:
            self._fault = ("", "")
            if how == "error":
                raise ValueError(f"refused at {point}")
            os.kill(os.getpid(), getattr(signal, how))


def _rank(connection: Connection, offset: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = _Rank(offset)
    while True:
        what, argument = connection.recv()
        try:
            answer = (True, getattr(rank, what)(argument))
        except (RuntimeError, ValueError) as error:
            answer = (False, str(error))
            del error
        connection.send(answer)
