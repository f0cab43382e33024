"""Weights of one running SGLang server, replaced over a process group of the trainer's rank and the server's ranks.

Runs in the engine's process and in senders; every call blocks, from any thread, one at a time. Of one update, in this
order: pause, flush the prefix cache, label the weights as nobody's, begin; buckets; end, label; continue. Buckets are
flattened bytes of several tensors, broadcast over gloo (CPU) or NCCL (GPU). Every server has a group of its own, so
that one that dies or hangs holds up no other.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from moerl.config.interfaces import own_address
from moerl.errors import WeightSyncError
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.handshake import UNSYNCED
from moerl.rollout.sglang.reading import AS_IT_IS, MAX_SAID_BYTES, TransportError, read

_CLOSE_SECONDS = 5.0
_OPEN_SESSION = "already open"
"""Part of what a server says to a second begin."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """num_ranks: of the server. backend: gloo or nccl. timeout_seconds: for each step of an update."""

    num_ranks: int
    backend: str
    timeout_seconds: float


class WeightLink:
    """The way of weights to one server.

    Every method raises `WeightSyncError` where a step failed or took too long; the message names server and step. What
    the server then holds is unknown, and it reports no version until an update succeeds.

    Attributes:
        key: of this link; another link to the same server has another one.
    """

    def __init__(self, name: str, endpoint: Endpoint, options: LinkOptions, device: torch.device) -> None:
        """name: of the server, for messages. device: that NCCL sends from."""
        self._name, self.options = name, options
        self.key = secrets.token_hex(8)
        self._device = device if options.backend == "nccl" else torch.device("cpu")
        url = urlparse(endpoint.url)
        self._host, self._port = url.hostname or "", url.port or 80
        self._client = httpx.Client(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.admin_key}", **AS_IT_IS},
            timeout=httpx.Timeout(options.timeout_seconds, connect=10.0),
            trust_env=False,
        )
        self._group: Any = None
        self._store: TCPStore | None = None
        self._group_name = ""
        self._step = "begin"

    def begin(self) -> None:
        """Stops sampling and opens an update; one that was broken off is closed first.

        Responses under way are computed again with the new weights and continued behind what they have.
        """
        self._step = "begin"
        self._post("/pause_generation", {"mode": "retract"})
        self._post("/flush_cache", {})
        self._label(UNSYNCED)
        try:
            self._post("/begin_weight_update", {})
        except WeightSyncError as error:
            if _OPEN_SESSION not in str(error):
                raise
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def join(self) -> None:
        """Makes the process group, where there is none. A sender needs nothing else in an update that another process
        began."""
        if self._group is None:
            self._connect()

    def send(self, bucket: Sequence[tuple[str, Tensor]], number: int) -> None:
        """Sends tensors under their checkpoint names; number: of the bucket in its update, for messages."""
        self._step = f"bucket {number} ({bucket[0][0]} and {len(bucket) - 1} more)"
        group = self._group
        if group is None:
            raise self._failed("broadcast", "no process group: it was given up")
        flat = flattened(bucket).to(self._device)
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        # The server answers after the broadcast, or at once where it refuses; it does not join a refused broadcast.
        call = _Call(lambda: self._post("/update_weights_from_distributed", body))
        work = dist.broadcast(flat, src=0, group=group, async_op=True)
        assert work is not None
        while not work.is_completed():
            if call.has_failed or self._group is None:
                self._drop_group()
                break
            time.sleep(0.0005)
        call.result()
        if not work.is_completed():
            raise self._failed("broadcast", "it was given up")
        work.wait()  # raises what went wrong

    def end(self, version: int) -> None:
        """Takes the new weights into use as `version`; sampling waits for `go_on`."""
        self._step = "end"
        self._post("/end_weight_update", {})
        self._label(str(version))

    def go_on(self) -> None:
        """Sampling goes on."""
        self._step = "going on"
        self._post("/continue_generation", {})

    def abandon(self) -> None:
        """Leaves the process group without telling the server, which is gone or hangs."""
        self._drop_group()
        self._client.close()

    def close(self) -> None:
        """Leaves the process group. The server keeps running."""
        self._step = "close"
        if self._group is not None:
            self._client.timeout = httpx.Timeout(_CLOSE_SECONDS)
            with contextlib.suppress(WeightSyncError):  # a server that is gone has left it, too
                self._post("/destroy_weights_update_group", {"group_name": self._group_name})
        self.abandon()

    def _label(self, version: str) -> None:
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _connect(self) -> None:
        """Makes the process group: we are rank 0, the server's ranks come behind us."""
        name, world_size = f"moerl-{secrets.token_hex(8)}", 1 + self.options.num_ranks
        own = own_address(self._host, self._port)
        timeout = timedelta(seconds=self.options.timeout_seconds)
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
            "backend": self.options.backend,
        }
        asked = _Call(lambda: self._post("/init_weights_update_group", body))
        made = _Call(lambda: _make_group(store, name, world_size, self.options.backend, timeout))
        while not made.is_done:
            if asked.has_failed:  # we would wait for it until the time is up
                break
            time.sleep(0.002)
        asked.result()
        self._group, self._group_name = made.result(), name

    def _drop_group(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None:
            # What is under way on it never ends: not to be waited for.
            threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True).start()

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        """One call; raises WeightSyncError unless the server says that it succeeded."""
        try:
            with self._client.stream("POST", path, json=dict(body)) as response:
                content = read(path, response, MAX_SAID_BYTES)
        except TransportError as error:
            raise self._failed(path, f"{error.what}: {error.seen}") from error
        except (httpx.HTTPError, RuntimeError) as error:  # the latter where it was closed meanwhile
            raise self._failed(path, f"{type(error).__name__}: {error}") from error
        said = content[:500].decode(errors="replace")
        if response.status_code != 200:
            raise self._failed(path, f"status {response.status_code}: {said}")
        if response.headers.get("content-type", "").startswith("application/json"):
            try:
                answer = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise self._failed(path, said) from error
            if isinstance(answer, dict) and answer.get("success") is False:
                raise self._failed(path, said)

    def _failed(self, path: str, seen: str) -> WeightSyncError:
        return WeightSyncError(
            f"weight update: server {self._name!r}, {self._step}: {path} failed",
            seen=seen,
            expected=f"success within {self.options.timeout_seconds} s",
            remedy="look at the server's log; one that no longer answers is started again",
        )


class _Call:
    """A blocking call in a thread of its own; `result` waits for it and returns or raises what it did."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._value = call, None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:  # noqa: BLE001 - thread boundary: raised by `result`
            self._error = error


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


def flattened(bucket: Sequence[tuple[str, Tensor]]) -> Tensor:
    """uint8 [bytes of all]: the tensors behind one another; without a copy where they lie so already."""
    parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
    first, size = parts[0], sum(part.numel() for part in parts)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(parts)
        end += part.numel()
    return first.as_strided((size,), (1,))
