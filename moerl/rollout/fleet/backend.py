"""Interface of the fleet to a kind of server. A kind is a folder of its own next to `fleet`, whose `ServerKind` has a
line in `moerl.rollout.server_kinds`."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moerl.config.schema import LaunchConfig
from moerl.contract.commands import Target
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import EngineError, WeightSyncError
from moerl.models.description import ModelDescription
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.segments import Segment

Bucket = Sequence[tuple[str, Any]]
"""Tensors that are sent together, by checkpoint name. Torch-free: what only talks to a server needs no torch."""


class TransportError(EngineError):
    """No whole answer arrived, or the server said that it cannot serve now; the call may be repeated."""


class KeyRefusedError(EngineError):
    """The server does not know our key: another one listens at that address now, or the server file is stale."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the trainer's model."""

    spec: ModelSpec
    """Spec of the model."""
    moe_layers: tuple[int, ...]
    """Indices of its MoE layers among its decoder layers."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a rollout."""

    request: RolloutRequest
    """Request for the whole rollout."""
    request_id: str
    """Id of this attempt alone."""
    policy_version: int
    """Version of the weights that servers hold; prefix caches of other versions must not be hit."""
    sampled_ids: tuple[int, ...] = ()
    """Tokens of the response that are there already. The answer goes on behind them; draws depend on seed and position
    alone, and so come out as without the interruption."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt."""

    reason: FinishReason
    """Reason for which the attempt ended."""
    segment: Segment | None
    """Tokens that were sampled; None if none were."""
    asked_tokens: int = 0
    """Tokens that the server was sent, if it said how many of them it had; else 0."""
    cached_tokens: int = 0
    """Tokens of these whose keys and values were in its prefix cache."""


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """An answer to an attempt as it arrived."""

    is_aborted: bool
    """True if the server broke the attempt off, or was told to."""
    raw: Mapping[str, Any]
    """Values for the quarantine, if the answer cannot be read."""
    decode: Callable[[], AttemptResult]
    """Function that returns the result; raises ContractError if the answer cannot be read."""


class WeightChannel(Protocol):
    """The way of weights from this process to one server, in updates that the engine's process begins and ends."""

    network: str
    """Name of the network: servers with the same one can be sent to as one `WeightGroup`."""

    def new_group(self) -> WeightGroup:
        """Returns a group without members, for servers of this network."""
        ...

    async def close(self) -> None:
        """Leaves a server that keeps running."""

    async def abandon(self) -> None:
        """Leaves a server that is gone or hangs; what is under way fails."""


class WeightGroup(Protocol):
    """Servers that one sender sends to together; they may pass buckets on to one another. One call at a time."""

    async def send(self, bucket: Bucket, channels: Mapping[str, Any], number: int, /) -> Mapping[str, WeightSyncError]:
        """Sends tensors to servers, by the keys of their channels; returns those that failed, and why. All others have
        the tensors. A server that fails costs the others one time limit of a step at most.

        Args:
            channels: of this group's network and kind.
            number: of the bucket in its update, for messages.
        """
        ...

    def leave(self) -> None:
        """Ends the group: nothing more is sent. Servers keep running."""


class ServerBackend(Protocol):
    """One running server as the engine's process uses it, in the engine's event loop.

    A step of a weight update raises `WeightSyncError` if it failed or took too long; its message names the server. The
    weights of the server are then unknown, and it reports no version until an update succeeds.
    """

    max_request_tokens: int
    """Prompt and new tokens that one request may have together."""
    first_version: int
    """Policy version of the weights that it held when it was connected; -1 for nobody's."""
    address: Mapping[str, Any]
    """Address of the server, with all that `open_channel` in another process needs; JSON."""

    async def ask(self, attempt: Attempt) -> AttemptReply:
        """Returns the answer to an attempt. Raises TransportError if no whole answer came, KeyRefusedError, or
        EngineError if the server refused the attempt."""
        ...

    async def abort(self, request_id: str) -> None:
        """Has a request answered with what it has. A request that is not there is no error.

        Raises:
            EngineError: the call to the server failed.
        """

    async def probe(self) -> None:
        """Has one token sampled: a server whose scheduler hangs can answer health checks all the same.

        Raises:
            EngineError: no token came in time.
        """

    async def policy_version(self) -> int:
        """Asks for the version of the server's weights; returns -1 if they have none. Raises EngineError if it does not
        say."""
        ...

    async def sleep(self) -> None:
        """Has the server give back the memory of its weights and prefix cache; it then holds nobody's weights. The next
        update of all weights takes the memory again. Called when the server has no request."""

    async def begin_update(self) -> None:
        """Stops sampling, flushes the prefix cache, labels the weights as nobody's and opens an update; one that was
        broken off is closed first. Responses under way are computed again with the new weights, and continued behind
        what they have."""

    async def end_update(self, version: int) -> None:
        """Takes the new weights into use as `version`; sampling waits for `resume`."""

    async def resume(self) -> None:
        """Has the server sample again."""

    async def digests(self) -> Mapping[str, int]:
        """Returns `moerl.kernels.checksum` of every tensor that the server computes with, by checkpoint name."""
        ...

    async def dtypes(self) -> Mapping[str, str]:
        """Returns names of dtypes (float32, bfloat16) by checkpoint name: the server casts each tensor to its dtype."""
        ...

    def open_channel(self) -> WeightChannel:
        """Opens a channel from this process, over the connections that it has already."""
        ...

    async def close(self) -> None:
        """Leaves the server; what is under way fails."""


Connect = Callable[[str, Endpoint], Awaitable[ServerBackend]]
"""Connects to the server of a name and an address; raises EngineError if it is not what the trainer needs."""


class ServerLauncher(Protocol):
    """A source of running servers: one at a time, as often as one is needed."""

    def open(self) -> Endpoint:
        """Returns a server that is ready now. Called again if the one before failed.

        Raises:
            EngineError: there is none in time.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Facts about a run by which its servers are started."""

    model: ModelDescription
    """Model of a Hugging Face directory."""
    version: int
    """Policy version of the weights in that directory; -1 if servers must wait for a first update."""
    launch: LaunchConfig
    """Machines of the run. On Ray, Ray chooses the node and the devices of each server."""
    folder: Path
    """Run directory; servers have a folder of their kind's name there."""
    launcher: Callable[[Any, Path, float], ServerLauncher]
    """Makes the launcher of one server, from options of its kind, a folder for its files, and the longest start-up in
    seconds: on this machine or on a Ray cluster."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of servers that a run can sample with."""

    title: str
    """Its name in messages."""
    launchers: Callable[[Any, ServedRun], Sequence[ServerLauncher]]
    """Makes the launchers of a run's servers, from the section `rollout` of this kind: they start servers, or wait for
    servers that others start."""
    connect: Callable[[ModelFacts, EngineOptions], Connect]
    """Makes the function that connects to servers of a model."""
    open_channel: Callable[[Target, Any], WeightChannel]
    """Opens a way for weights to a server from another process than the engine's; takes the torch device that they are
    sent from."""


def new_request_id(rollout_id: str) -> str:
    """Returns another id for every attempt. Aborts may match prefixes of ids: its beginning is unique and of one
    length."""
    return f"{secrets.token_hex(8)}-{rollout_id}"
