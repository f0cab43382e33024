"""Typed messages between the controller and worker ranks, no pickle. Torch-free; any process.

A command may be followed by a frame (`moerl.contract.batch_wire`), a byte string of its own. Arrays travel as their
bytes with dtype and shape, which are compared before anything is built.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from moerl.contract.parallel import RankCoordinates
from moerl.contract.trainer import DeviceUse, PassReport, Stage, UpdateReport
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ContractError, MoerlError, ReplayError, TrainerError, UnprovedError, told

Dtype = Literal["float32", "float64", "int64"]


class Command(msgspec.Struct, tag=True, tag_field="do", forbid_unknown_fields=True):
    """Base of all commands; every rank gets the same one, in the same order."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


class Start(Command):
    """The first: joins the other ranks. config: the resolved configuration, JSON. rendezvous: where ranks meet,
    ``file://`` or ``tcp://``. local_ranks: that see the same GPUs, this one included."""

    config: str
    rank: int
    rendezvous: str
    local_ranks: int


class Array(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A numpy array, little-endian."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        dtype: Any = array.dtype.name
        if dtype not in ("float32", "float64", "int64"):
            raise TypeError(f"an array of {dtype}")
        return cls(dtype, array.shape, np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())

    def array(self) -> NDArray[Any]:
        dtype = np.dtype(self.dtype)
        if min(self.shape, default=0) < 0 or math.prod(self.shape) * dtype.itemsize != len(self.data):
            raise TrainerError(
                "a worker's reply: an array", seen=f"{len(self.data)} bytes", expected=f"{self.dtype} {self.shape}"
            )
        return np.frombuffer(self.data, dtype.newbyteorder("<")).astype(dtype).reshape(self.shape)


class ReceiverAddress(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Address at which the process of an engine takes buckets of weights."""

    host: str
    port: int
    key: bytes
    """Both sides prove that they know it."""
    shares_memory: bool
    """Senders are on its machine: it reads their memory. Else tensors go over the connection."""

    def __repr__(self) -> str:
        return f"ReceiverAddress(host={self.host!r}, port={self.port})"


class Target(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A server as senders of weights reach it."""

    key: str
    """Key of the engine's connection to this server; a server that replaces this one has another key."""
    name: str
    """For messages."""
    address: dict[str, Any]
    """Address of the server, as in `ServerBackend.address`."""


class Build(Command):
    """receiver: of the engine's process, for senders that push weights there; None if they reach the engine in another
    way, and without an engine."""

    stage: Stage
    model: str
    spec: ModelSpec
    receiver: ReceiverAddress | None = None


class Load(Command):
    """Followed by this rank's frame. number: of the minibatch, from 0; 0 forgets the batch before."""

    number: int


class Score(Command):
    minibatch: int
    enforce: bool
    prove: bool
    full: bool


class Prepare(Command):
    minibatch: int
    prove: bool


class Step(Command):
    """advantages: float32, one per sample of the minibatch, in place of those in its frame."""

    minibatch: int
    prove: bool
    advantages: Array | None = None


class Trace(Command):
    """After a proof that failed: of the pass that it failed in."""

    microbatch: int


class Publish(Command):
    """Senders push this version to receivers whose updates are open."""

    version: int
    dtypes: dict[str, str] | None
    """Dtypes of the engine for checksums, as in `CheckedSink.held_dtypes`; None if no checksums are wanted."""
    targets: tuple[Target, ...] = ()
    """The engine's servers, if senders send to servers."""


class Hold(Command):
    """From now on this version is what senders keep for servers that come late."""

    version: int


class Resend(Command):
    """Senders send what they keep, which is this version, to servers whose updates are open."""

    version: int
    targets: tuple[Target, ...]


class GiveBack(Command):
    """Memory that an update alone needs goes back to the device, before servers take it. stage: copy the state for the
    next `Save` before, while the weights are there."""

    stage: bool


class UseOfDevice(Command):
    """Peaks of the device's memory since the last time."""


class Profile(Command):
    """step: whose trace begins now, on rank 0; 0 ends and writes it."""

    step: int


class Save(Command):
    checkpoint: str
    state: dict[str, Any]
    corrupt: list[str]


class PollSave(Command):
    wait: bool


class Restore(Command):
    checkpoint: str


class Export(Command):
    folder: str
    like: str


class Rewrite(Command):
    model: str
    checkpoint: str
    folder: str


class Close(Command):
    """The last."""


AnyCommand = (
    Start
    | Build
    | Load
    | Score
    | Prepare
    | Step
    | Trace
    | Publish
    | GiveBack
    | Hold
    | Resend
    | UseOfDevice
    | Profile
    | Save
    | PollSave
    | Restore
    | Export
    | Rewrite
    | Close
)


class RankPassReport(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Mirrors `PassReport`, of one rank."""

    rows: Array
    loss_sum: float | None
    rows_verified: int
    load: Array
    agreement: Array
    live_rows: Array
    update: UpdateReport | None

    @classmethod
    def of(cls, report: PassReport) -> Self:
        return cls(
            Array.of(report.rows_RC),
            report.loss_sum,
            report.rows_verified,
            Array.of(report.load_LE),
            Array.of(report.agreement_LS),
            Array.of(report.live_rows_L),
            report.update,
        )

    def report(self) -> PassReport:
        return PassReport(
            self.rows.array(),
            self.loss_sum,
            self.rows_verified,
            self.load.array(),
            self.agreement.array(),
            self.live_rows.array(),
            self.update,
        )


class Failure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An error of a rank. kind: name of its class in `moerl.errors`; of another error, "" and `what` names it."""

    kind: str
    what: str
    seen: str | None = None
    expected: str | None = None
    remedy: str = ""
    notes: tuple[str, ...] = ()
    reason: str = ""
    field: str = ""
    microbatch: int = -1

    @classmethod
    def of(cls, error: Exception) -> Self:
        notes = tuple(getattr(error, "__notes__", ()))
        if isinstance(error, OSError):
            error = told(error)
        if not isinstance(error, MoerlError):
            return cls("", f"{type(error).__name__}: {error}", notes=notes)
        is_contract = isinstance(error, ContractError)
        return cls(
            type(error).__name__,
            error.what,
            error.seen,
            error.expected,
            error.remedy,
            notes,
            reason=str(error.reason) if is_contract else "",
            field=error.field if is_contract else "",
            microbatch=error.microbatch if isinstance(error, UnprovedError) else -1,
        )

    def error(self, rank: int, command: str) -> MoerlError:
        """The same error, of the rank that it names."""
        error = self._error(rank, command)
        for note in self.notes:
            error.add_note(note)
        return error

    def _error(self, rank: int, command: str) -> MoerlError:
        seen = f"rank {rank}: {self.seen}" if self.seen is not None else f"rank {rank}"
        if self.kind == ContractError.__name__:
            return ContractError(self.reason, field=self.field, seen=seen, expected=self.expected, remedy=self.remedy)
        if self.kind in (UnprovedError.__name__, ReplayError.__name__):
            if self.kind == ReplayError.__name__:
                return ReplayError(self.what, seen=self.seen, expected=self.expected, remedy=self.remedy)
            return UnprovedError(
                self.what, seen=self.seen, expected=self.expected, remedy=self.remedy, microbatch=self.microbatch
            )
        known = {each.__name__: each for each in (MoerlError, *MoerlError.__subclasses__())}
        if self.kind in known:
            return known[self.kind](self.what, seen=seen, expected=self.expected, remedy=self.remedy)
        return TrainerError(f"rank {rank} failed in {command!r}", seen=self.what)


class Reply(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Reply of one rank to one command. progress: microbatches begun, and of how many, while the command goes on; such
    a reply is not the last. peak_rss_bytes: of the rank's process. notes, shares_prompts: in the reply to `Build`, what
    a user should know about the rank's device, and whether the rank shares prompts. checksums: in the reply to
    `Publish`, by name of the tensors that the rank sent; None if none was wanted. failed: servers that are out of the
    update, by key, and why."""

    progress: tuple[int, int] | None = None
    failure: Failure | None = None
    coordinates: RankCoordinates | None = None
    report: RankPassReport | None = None
    tables: tuple[Array, ...] = ()
    metrics: dict[str, float] = {}
    device: DeviceUse | None = None
    peak_rss_bytes: int = 0
    notes: list[str] = []
    shares_prompts: bool = False
    checksums: dict[str, int | None] = {}
    failed: dict[str, str] = {}


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(AnyCommand)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes | memoryview) -> AnyCommand:
    return _commands.decode(data)


def decode_reply(data: bytes | memoryview) -> Reply:
    return _replies.decode(data)
