"""Buckets of weights to one running SGLang server, in a process group with this process and other servers.

Runs in an event loop of the engine's process or of a sender. Buckets are flattened bytes of several tensors, that go
over gloo (CPU) or NCCL (GPU). `Broadcast` forms the group and sends; here are the calls to the server.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from urllib.parse import urlparse

import msgspec
import torch

from moerl.contract.commands import Target
from moerl.errors import WeightSyncError
from moerl.machine.interfaces import own_address
from moerl.rollout.fleet.backend import Bucket
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.broadcast import Broadcast
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.invitation import Invitation
from moerl.rollout.sglang.sender_group import GroupOptions
from moerl.rollout.sglang.update_calls import UpdateCalls

_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Address of a server for a process that sends weights to it."""

    endpoint: Endpoint
    """Address and keys of the server."""
    num_ranks: int
    """Tensor-parallel ranks of the server."""
    backend: str
    """gloo or nccl."""
    seconds: float
    """Seconds that each step of an update may take."""


def open_channel(target: Target, device: torch.device) -> SGLangChannel:
    """Opens a channel in another process than the engine's. device: that NCCL sends from."""
    address = msgspec.convert(target.address, ChannelAddress)
    http = SGLangHttp(address.endpoint, max_connections=1, timeout_seconds=address.seconds)
    return SGLangChannel(UpdateCalls(target.name, http, address.seconds), address, device, owned=http)


class SGLangChannel:
    """A `WeightChannel`, and a `Receiver` of its `Broadcast`.

    Args:
        owned: connections that end with the channel.
    """

    def __init__(
        self, calls: UpdateCalls, address: ChannelAddress, device: torch.device, owned: SGLangHttp | None = None
    ) -> None:
        self._calls, self._address, self._owned, self._device = calls, address, owned, device
        url = urlparse(address.endpoint.url)
        self._own_address = own_address(url.hostname or "", url.port or 80)
        self._group_name = ""
        self.name, self.num_ranks = calls.name, address.num_ranks
        # Servers that reach this process at one address reach one another.
        self.network = f"{address.backend} {self._own_address}"

    def new_group(self) -> Broadcast:
        address = self._address
        return Broadcast(GroupOptions(self._own_address, address.backend, self._device, address.seconds))

    async def join(self, invitation: Invitation) -> None:
        """Has the server's ranks join a group, and leave the one before."""
        await self._leave_group()
        self._group_name = invitation.group_name
        await self._calls.post("join", "/init_weights_update_group", asdict(invitation))

    async def take(self, bucket: Bucket, number: int) -> None:
        """Has the server receive a bucket from the group that it joined last, and load it."""
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        step = f"bucket {number} ({bucket[0][0]} and {len(bucket) - 1} more)"
        await self._calls.post(step, "/update_weights_from_distributed", body)

    async def abandon(self) -> None:
        """Leaves a server that is gone or hangs, without telling it."""
        if self._owned is not None:
            await self._owned.close()

    async def close(self) -> None:
        """Has the server leave its group. It keeps running."""
        await self._leave_group()
        await self.abandon()

    async def _leave_group(self) -> None:
        name, self._group_name = self._group_name, ""
        if name:
            with contextlib.suppress(WeightSyncError):  # one that is gone, or gave the group up, has left it
                await self._calls.post("leave", "/destroy_weights_update_group", {"group_name": name}, _CLOSE_SECONDS)
