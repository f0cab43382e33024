"""Typed messages between the controller and trainer ranks, no pickle. Torch-free; any process.

Most commands stand for the method of `Trainer` of the same name. A frame (`moerl.contract.batch_wire`) may follow a
command. Arrays travel as bytes with dtype and shape, which are compared before anything is built. An error of a rank is
raised again in the controller, with the rank's number (a `ReplayError` as the rank raised it).
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from moerl.contract.parallel import RankCoordinates
from moerl.contract.trainer import DeviceUse, PassReport, Stage
from moerl.contract.trajectory import ModelSpec
from moerl.contract.weight_update import UpdateKind
from moerl.errors import ContractError, MoerlError, ReplayError, TrainerError, UnprovedError, told


class Command(msgspec.Struct, tag=True, tag_field="do", forbid_unknown_fields=True):
    """Base of all commands; every rank gets the same one, in the same order."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


class Start(Command):
    """The first command: the rank joins the other ranks."""

    config: str
    """Sections that a rank reads (`moerl.config.ranks.RankConfig`), JSON."""
    rank: int
    """Number of the receiving rank, from 0."""
    rendezvous: str
    """Place where the ranks meet, ``file://`` or ``tcp://``."""
    local_ranks: int
    """Ranks that see the same GPUs, this one included."""


class ReceiverAddress(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Address at which an engine's process receives buckets of weights."""

    host: str
    """Name or address of the machine, as senders reach it."""
    port: int
    """TCP port."""
    key: bytes
    """Both sides prove that they know it."""
    shares_memory: bool
    """True if senders are on the receiver's machine: it reads their memory. Else tensors go over the connection."""

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
    stage: Stage
    """Training stage of the policy."""
    model: str
    """Path of a Hugging Face directory."""
    spec: ModelSpec
    """The model facts that engines and trainer agreed on."""
    receiver: ReceiverAddress | None = None
    """Address to which senders push weights; None without an engine, or if they reach it in another way."""


class Load(Command):
    """This rank's share of one minibatch; its frame follows the command."""

    number: int
    """Number of the minibatch, from 0; 0 forgets the batch before."""


class Score(Command):
    minibatch: int
    """Number of a loaded minibatch, from 0."""
    enforce: bool
    """True if tokens go to the recorded experts; False leaves the choice to the router."""
    prove: bool
    """True if the proof of routing is wanted."""
    full: bool
    """True if scores over the full vocabulary are wanted, too."""


class Prepare(Command):
    minibatch: int
    """Number of a loaded minibatch, from 0."""
    prove: bool
    """True if the proof of routing is wanted."""


class Step(Command):
    minibatch: int
    """Number of a loaded minibatch, from 0."""
    prove: bool
    """True if the proof of routing is wanted."""
    advantages: NDArray[np.float32] | None = None
    """float32, one per sample of the minibatch, in place of those in its frame; None keeps those."""


class Trace(Command):
    microbatch: int
    """Index of the microbatch to trace, from 0, in the pass whose proof failed."""


class Publish(Command):
    """Senders push this version to receivers whose updates are open."""

    version: int
    """Policy version of the weights."""
    kind: UpdateKind
    """Kind of the update; its tensors are those of the ranks' plan."""
    dtypes: dict[str, str] | None
    """Dtypes of the engine for checksums, as in `CheckedSink.held_dtypes`; None if no checksums are wanted."""
    targets: tuple[Target, ...] = ()
    """The engine's servers, if senders send to servers."""


class KeepWeights(Command):
    version: int
    """Policy version that senders keep from now on for servers that come late."""


class Resend(Command):
    """Senders send the version that they keep to servers whose updates are open."""

    version: int
    """Policy version that senders keep."""
    targets: tuple[Target, ...]
    """The servers."""


class GiveBack(Command):
    """Gives memory that an update alone needs back to the device, before servers take it."""

    stage: bool
    """True if the state for the next `Save` is copied first, while the weights are on the device."""


class UseOfDevice(Command):
    """Question for the peaks of the device's memory since the last time."""


class Profile(Command):
    step: int
    """Step whose trace begins now, on rank 0; 0 ends the trace and writes it."""


class Save(Command):
    checkpoint: str
    """Name of the checkpoint."""
    state: dict[str, Any]
    """The controller's part of the checkpoint, plain JSON."""
    corrupt: list[str]
    """Names of older checkpoints that do not count as kept."""


class PollSave(Command):
    wait: bool
    """True if the reply waits until no checkpoint is in flight."""


class Restore(Command):
    checkpoint: str
    """Path of a checkpoint."""


class Export(Command):
    folder: str
    """Path of the directory to write."""
    like: str
    """Path of a Hugging Face directory whose config and tokenizer are copied."""


class Rewrite(Command):
    model: str
    """Path of the model's Hugging Face directory."""
    checkpoint: str
    """Path of a checkpoint of the SFT stage."""
    folder: str
    """Path of the directory to write."""


class Close(Command):
    """The last command."""


PassCommand = Score | Prepare | Step | Trace
"""Passes over a loaded batch."""
SyncCommand = Publish | KeepWeights | Resend
"""Weights on their way from senders to receivers."""
CheckpointCommand = Save | PollSave | Restore | Export | Rewrite
"""Checkpoints, and model directories that are written from them or like them."""
AnyCommand = (
    Start | Build | Load | PassCommand | SyncCommand | GiveBack | UseOfDevice | Profile | CheckpointCommand | Close
)


class Failure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An error of a rank."""

    kind: str
    """Name of the error's class in `moerl.errors`; empty for any other error, which `what` names."""
    what: str
    """The problem, in words."""
    seen: str | None = None
    """Value seen; None if the error has none."""
    expected: str | None = None
    """Value expected; None if the error has none."""
    remedy: str = ""
    """Advice; may be empty."""
    notes: tuple[str, ...] = ()
    """Notes that were added to the error."""
    reason: str = ""
    """Code of a `ContractError`, else empty."""
    field: str = ""
    """Field of a `ContractError`, else empty."""
    microbatch: int = -1
    """Index of a microbatch of the rank whose checksum is wrong; -1 if the error names none."""

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
        """Returns the same error with the rank in it; a `ReplayError` as it is, an unknown class as `TrainerError`."""
        seen = f"rank {rank}: {self.seen}" if self.seen is not None else f"rank {rank}"
        expected, remedy = self.expected, self.remedy
        known = {each.__name__: each for each in (MoerlError, UnprovedError, *MoerlError.__subclasses__())}
        kind = known.get(self.kind)
        if kind is None:
            error = TrainerError(f"rank {rank} failed in {command!r}", seen=self.what)
        elif kind is ContractError:
            error = ContractError(self.reason, field=self.field, seen=seen, expected=expected, remedy=remedy)
        elif kind is UnprovedError:
            index = self.microbatch
            error = UnprovedError(self.what, seen=self.seen, expected=expected, remedy=remedy, microbatch=index)
        else:
            error = kind(self.what, seen=self.seen if kind is ReplayError else seen, expected=expected, remedy=remedy)
        for note in self.notes:
            error.add_note(note)
        return error


class Reply(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Reply of one rank to one command."""

    progress: tuple[int, int] | None = None
    """Microbatches begun, and of how many, in replies while the command goes on; None in the last reply."""
    failure: Failure | None = None
    """The error that ended the command; None if it succeeded."""
    coordinates: RankCoordinates | None = None
    """Set in the reply to `Build`."""
    report: PassReport | None = None
    """Set in replies to `Score`, `Prepare` and `Step`."""
    tables: tuple[NDArray[np.int64], ...] = ()
    """int64, columns `WORDS`, in the reply to `Trace`: rows dispatched, and rows recorded if there are any."""
    metrics: dict[str, float] = {}
    """Metrics of `Publish`, by name."""
    device: DeviceUse | None = None
    """Set in the reply to `UseOfDevice`; None on CPUs."""
    peak_rss_bytes: int = 0
    """Peak resident memory of the rank's process."""
    notes: list[str] = []
    """Notes for the user about the rank's device, in the reply to `Build`."""
    shares_prompts: bool = False
    """True if the rank shares prompts, in the reply to `Build`."""
    tensors: dict[str, tuple[int, ...]] = {}
    """Shapes of all tensors that the ranks publish, by checkpoint name, in the reply of rank 0 to `Build`."""
    checksums: dict[str, int | None] = {}
    """Checksums of the tensors that the rank sent, by name, in the reply to `Publish`; None if none were wanted."""
    failed: dict[str, str] = {}
    """Servers that are out of the update, by key, with the reason."""


class _Array(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A numpy array as it travels: its elements are little-endian, in C order."""

    dtype: Literal["float32", "float64", "int64"]
    shape: tuple[int, ...]
    data: bytes


def _packed(array: Any) -> _Array:
    if not isinstance(array, np.ndarray) or array.dtype.name not in ("float32", "float64", "int64"):
        raise TypeError(f"{getattr(array, 'dtype', type(array))} in a message")
    return _Array(array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def _unpacked(_: type, value: Any) -> NDArray[Any]:
    """Returns a fresh array in C order."""
    packed = msgspec.convert(value, _Array)
    dtype = np.dtype(packed.dtype)
    if min(packed.shape, default=0) < 0 or math.prod(packed.shape) * dtype.itemsize != len(packed.data):
        raise TrainerError(
            "a worker's reply: an array", seen=f"{len(packed.data)} bytes", expected=f"{packed.dtype} {packed.shape}"
        )
    return np.frombuffer(packed.data, dtype.newbyteorder("<")).astype(dtype).reshape(packed.shape)


encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
"""Encoder of a command or a reply."""
decode_command = msgspec.msgpack.Decoder(AnyCommand, dec_hook=_unpacked).decode
decode_reply = msgspec.msgpack.Decoder(Reply, dec_hook=_unpacked).decode
