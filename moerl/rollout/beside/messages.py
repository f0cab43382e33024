"""Messages between the controller and the engine's process. MessagePack, no pickle.

    controller -> engine    StartEngine once; then Generate, Abort, Update, CloseEngine
    engine -> controller    EngineAnswer to StartEngine and to every Update but `begin`; FinishedRollouts while it
                            samples, in a frame of trajectories

Tensors come from senders, by `moerl.rollout.pushed`.

Torch-free.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moerl.contract.commands import ReceiverAddress
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import ModelSpec


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind"):
    pass


class StartEngine(_Message, tag="start"):
    """folder: the model's. version: of its weights, -1 where the engine waits for a first update. record_steps: as
    `rollout.record_steps`. host, shares_memory: as of `BucketReceiver`."""

    folder: str
    dtype: str
    spec: ModelSpec
    max_running: int
    num_threads: int
    version: int
    record_steps: bool = True
    host: str = "127.0.0.1"
    shares_memory: bool = True


class Generate(_Message, tag="generate"):
    """Requests of one call, to be sampled behind those that are there."""

    call: int
    requests: list[RolloutRequest]


class Abort(_Message, tag="abort"):
    """Finishes these rollouts with what they have."""

    rollout_ids: list[str]


class Update(_Message, tag="update"):
    """One call of a `CheckedSink`, or a question for the memory that the process took."""

    do: Literal["begin", "end", "abandon", "held_dtypes", "verify", "memory"]
    version: int = -1
    checksums: dict[str, int] = {}


class CloseEngine(_Message, tag="close"):
    """The engine ends."""


class EngineAnswer(_Message, tag="answer"):
    """problem: what was raised, empty where nothing was; is_sync: whether it is a `WeightSyncError`.

    layer_numbers, max_positions: of the model, in the answer to `StartEngine`; description, is_on_device: of the
    engine; receiver: where it takes buckets of weights.
    costs: as `InterruptCosts`. peak_rss_bytes: of the process.
    """

    problem: str = ""
    is_sync: bool = False
    dtypes: dict[str, str] = {}
    layer_numbers: list[int] = []
    max_positions: int = 0
    description: str = ""
    is_on_device: bool = False
    interrupted: int = 0
    stalled_seconds: float = 0.0
    peak_rss_bytes: int = 0
    receiver: ReceiverAddress | None = None


class FinishedRollouts(_Message, tag="records"):
    """Rollouts of a call that finished in one step, in the frame; without: aborted ones that never got a token."""

    call: int
    without: list[str] = []


ToEngine = StartEngine | Generate | Abort | Update | CloseEngine
ToController = EngineAnswer | FinishedRollouts

encode = msgspec.msgpack.Encoder().encode
_for_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_for_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)


def decode_for_engine(data: bytes) -> ToEngine:
    return _for_engine.decode(data)


def decode_for_controller(data: bytes) -> ToController:
    return _for_controller.decode(data)
