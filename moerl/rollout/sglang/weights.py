"""Weights of a running SGLang server, replaced over a process group of the trainer's rank and the server's ranks.

Runs in the trainer process that holds the engine. A whole set is gathered and checked first, so that a set that is not
whole leaves the server as it was; then, in this order: pause, flush the prefix cache, begin, buckets (the version rides
on the last), end, continue. Buckets are flattened bytes of several tensors, broadcast over gloo (CPU) or NCCL (GPU).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlparse

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.server import free_port
from moerl.rollout.sglang.weight_set import WeightSet

PauseMode = Literal["abort", "retract"]
"""What happens to requests under way: `abort` answers them with what they have, `retract` computes their prefix again
with the new weights and goes on. Going on with the old cache is not offered: later requests would hit it."""


@dataclass(frozen=True, slots=True)
class WeightTransport:
    """How weights travel.

    shapes: of every tensor the served model has, by its name in the checkpoint. tied: tensors that are another one's
    and may come, too, by name. num_ranks: of the server.
    backend: gloo or nccl. bucket_bytes: tensors are sent together until they reach this.
    timeout_seconds: for each step of an update.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    backend: str = "gloo"
    bucket_bytes: int = 256 << 20
    pause: PauseMode = "retract"
    timeout_seconds: float = 300.0


class SGLangWeights:
    """A `WeightSink` around one server."""

    def __init__(self, endpoint: Endpoint, transport: WeightTransport, on_update: Callable[[], Any]) -> None:
        """on_update: called after every update, while the server holds the new weights."""
        self._transport = transport
        self._on_update = on_update
        self._host = urlparse(endpoint.url).hostname or ""
        self._client = httpx.Client(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.admin_key}"},
            timeout=httpx.Timeout(transport.timeout_seconds, connect=10.0),
            trust_env=False,
        )
        self._group: Any = None
        self._group_name = ""
        self._set = WeightSet(transport.shapes, transport.tied)

    def begin_update(self, version: int) -> None:
        """Starts a weight update; one that was never ended is forgotten."""
        self._set.begin(version)

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps tensors under their checkpoint names until the set is whole, in any order and any number of calls."""
        self._set.receive(tensors)

    def end_update(self) -> None:
        """Sends the set.

        Raises:
            WeightSyncError: the set is not whole: the server keeps its weights. Or as `send`.
        """
        self.send(*self._set.take())

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the server's weights by a whole set.

        Raises:
            WeightSyncError: a step failed. What the server then holds is unknown, and it serves nothing until an update
                succeeds.
        """
        if self._group is None:
            self._connect()
        self._post("/pause_generation", {"mode": self._transport.pause})
        self._post("/flush_cache", {})
        self._post("/begin_weight_update", {})
        buckets = list(_buckets(tensors, self._transport.bucket_bytes))
        for number, bucket in enumerate(buckets, 1):
            self._send(bucket, version if number == len(buckets) else None)
        self._post("/end_weight_update", {})
        self._post("/continue_generation", {})
        self._on_update()

    def abandon(self) -> None:
        """Leaves the process group without telling the server, which is gone or hangs."""
        if self._group is not None:
            self._drop_group()
        self._client.close()

    def close(self) -> None:
        """Leaves the process group. The server keeps running."""
        if self._group is not None:
            with contextlib.suppress(WeightSyncError):  # a server that is gone has left it, too
                self._post("/destroy_weights_update_group", {"group_name": self._group_name})
        self.abandon()

    def _connect(self) -> None:
        """Makes the process group: we are rank 0, the server's ranks come behind us."""
        world_size = 1 + self._transport.num_ranks
        port = free_port(self._host)
        name = f"moerl-{secrets.token_hex(8)}"
        body = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": self._transport.backend,
        }
        timeout = timedelta(seconds=self._transport.timeout_seconds)
        store = TCPStore(self._host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        call = _Call(lambda: self._post("/init_weights_update_group", body))
        # The server puts its keys under this prefix; without it both sides wait for ever.
        group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            Backend(self._transport.backend),
            PrefixStore(name, store),
            group_name=name,  # pyright: ignore[reportArgumentType]
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # pyright: ignore[reportArgumentType]
        call.result()
        self._group, self._group_name = group, name

    def _send(self, bucket: Mapping[str, Tensor], version: int | None) -> None:
        """Announces a bucket and broadcasts it; the last one carries the version.

        The server answers after the broadcast, or at once where it refuses; it does not join a refused broadcast.
        """
        body: dict[str, Any] = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket.values()])
        if self._transport.backend == "nccl":
            flat = flat.cuda()
        call = _Call(lambda: self._post("/update_weights_from_distributed", body))
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None
        while not work.is_completed():
            if call.has_failed:
                self._drop_group()
                break
            time.sleep(0.001)
        call.result()

    def _drop_group(self) -> None:
        _world.pg_group_ranks.pop(self._group, None)
        self._group = None

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        """One step; raises WeightSyncError unless the server says that it succeeded."""
        try:
            response = self._client.post(path, json=dict(body))
        except httpx.HTTPError as error:
            raise _failed(path, f"{type(error).__name__}: {error}") from error
        said = response.text[:500]
        if response.status_code != 200:
            raise _failed(path, f"status {response.status_code}: {said}")
        if response.headers.get("content-type", "").startswith("application/json"):
            content = response.json()
            if isinstance(content, dict) and content.get("success") is False:
                raise _failed(path, said)


class _Call:
    """A blocking call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except WeightSyncError as error:
            self._error = error


def _buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors; each bucket but the last reaches `bucket_bytes`."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        bucket[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _failed(path: str, seen: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight update: SGLang {path} failed",
        seen=seen,
        expected="success",
        remedy="look at the server's log; start it again if it no longer answers",
    )
