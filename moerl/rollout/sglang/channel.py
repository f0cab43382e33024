"""Buckets of weights to one running SGLang server, over a process group of this process and the server's ranks.

Runs in an event loop of the engine's process or of a sender. Buckets are flattened bytes of several tensors, broadcast
over gloo (CPU) or NCCL (GPU). Every server has a group of its own, so that one that dies or hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from moerl.config.interfaces import own_address
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.receivers import Target
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.update_calls import UpdateCalls

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """What a process needs to send weights to a server.

    num_ranks: of the server. backend: gloo or nccl. seconds: for each step of an update.
    """

    endpoint: Endpoint
    num_ranks: int
    backend: str
    seconds: float


def open_channel(target: Target, device: torch.device) -> SGLangChannel:
    """From a sender in another process than the engine's. device: that NCCL sends from."""
    address = msgspec.convert(target.address, ChannelAddress)
    http = SGLangHttp(address.endpoint, max_connections=1, timeout_seconds=address.seconds)
    return SGLangChannel(UpdateCalls(target.name, http, address.seconds), address, device, owned=http)


class SGLangChannel:
    """A `WeightChannel`.

    Args:
        owned: connections that end with the channel.
    """

    def __init__(
        self, calls: UpdateCalls, address: ChannelAddress, device: torch.device, owned: SGLangHttp | None = None
    ) -> None:
        self._calls, self._address, self._owned = calls, address, owned
        self._device = device if address.backend == "nccl" else torch.device("cpu")
        self._group: Any = None
        self._store: TCPStore | None = None
        self._group_name = ""

    async def join(self) -> None:
        """Makes the process group, where there is none: we are rank 0, the server's ranks come behind us."""
        if self._group is not None:
            return
        name, world_size = f"moerl-{secrets.token_hex(8)}", 1 + self._address.num_ranks
        url = urlparse(self._address.endpoint.url)
        own = own_address(url.hostname or "", url.port or 80)
        timeout = timedelta(seconds=self._address.seconds)
        # Listening on the one address that the server reaches us at; by itself the store would listen on all.
        listener = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
        port = listener.getsockname()[1]
        store = self._store = TCPStore(
            own, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        body = {
            "master_address": own,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": self._address.backend,
        }
        asked = asyncio.ensure_future(self._calls.post("join", "/init_weights_update_group", body))
        made = _in_thread(lambda: _make_group(store, name, world_size, self._address.backend, timeout))
        # Where the server refuses, our side would wait for it until the time is up.
        await asyncio.wait({asked, made}, return_when=asyncio.FIRST_EXCEPTION)
        await asked
        self._group, self._group_name = await made, name

    async def send(self, bucket: Bucket, number: int) -> None:
        step = f"bucket {number} ({bucket[0][0]} and {len(bucket) - 1} more)"
        group = self._group
        if group is None:
            raise self._calls.failed(step, "broadcast", "no process group: it was given up")
        flat = await asyncio.to_thread(lambda: flattened(bucket).to(self._device))
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        # The server answers after the broadcast, or at once where it refuses; it does not join a refused broadcast.
        asked = asyncio.ensure_future(self._calls.post(step, "/update_weights_from_distributed", body))
        work = dist.broadcast(flat, src=0, group=group, async_op=True)
        assert work is not None
        while not work.is_completed():
            if self._group is None or (asked.done() and asked.exception() is not None):
                self._drop_group()
                break
            await asyncio.sleep(_POLL_SECONDS)
        await asked
        if not work.is_completed():
            raise self._calls.failed(step, "broadcast", "it was given up")
        work.wait()  # raises what went wrong

    async def abandon(self) -> None:
        """Leaves the process group without telling the server, which is gone or hangs."""
        self._drop_group()
        if self._owned is not None:
            await self._owned.close()

    async def close(self) -> None:
        """Leaves the process group. The server keeps running."""
        if self._group is not None:
            with contextlib.suppress(WeightSyncError):  # a server that is gone has left it, too
                body = {"group_name": self._group_name}
                await self._calls.post("close", "/destroy_weights_update_group", body, _CLOSE_SECONDS)
        await self.abandon()

    def _drop_group(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None:
            # What is under way on it never ends: not to be waited for.
            threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True).start()


def _in_thread[T](call: Callable[[], T]) -> asyncio.Future[T]:
    """A blocking call in a daemon thread: where it never ends, nobody waits for it."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(call())
        except Exception as error:  # noqa: BLE001 - thread boundary: raised by the future
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    future = asyncio.wrap_future(made)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for its error
    return future


def _make_group(store: TCPStore, name: str, world_size: int, backend: str, timeout: timedelta) -> Any:
    """Rank 0 of a process group outside the trainer's own; returns when all its ranks are there."""
    # The server puts its keys under this prefix; without it both sides wait for ever.
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # pyright: ignore[reportArgumentType]
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # pyright: ignore[reportArgumentType]
    return group


def flattened(bucket: Bucket) -> Tensor:
    """uint8 [bytes of all]: the tensors behind one another; without a copy where they lie so already."""
    parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
    first, size = parts[0], sum(part.numel() for part in parts)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(parts)
        end += part.numel()
    return first.as_strided((size,), (1,))
