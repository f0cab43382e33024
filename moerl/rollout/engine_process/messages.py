"""Messages between the controller and the engine's process. MessagePack, no pickle.

    controller -> engine    StartEngine once; then Generate, Abort, Update, CloseEngine
    engine -> controller    EngineAnswer to StartEngine and to every Update but `begin`; FinishedRollouts while it
                            samples, in a frame of trajectories

Tensors come from senders, by `moerl.rollout.pushed`.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from moerl.config.engine_memory import DeviceOptions
from moerl.contract.commands import ReceiverAddress
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import ModelSpec
from moerl.contract.weight_update import WeightUpdate


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind"):
    pass


class StartEngine(_Message, tag="start"):
    """The first message: the engine that the process loads."""

    folder: str
    """Directory of the model."""
    dtype: str
    """Precision of weights and activations, as `rollout.dtype`."""
    spec: ModelSpec
    """Spec that the model must match."""
    max_running: int
    """Sequences that decode together, at most."""
    num_threads: int
    """Threads of torch in the process."""
    version: int
    """Policy version of the weights in `folder`; -1 if the engine waits for a first update."""
    on_device: DeviceOptions = DeviceOptions()
    """Options of an engine on a device."""
    host: str = "127.0.0.1"
    """Address at which senders of weights reach the process."""
    shares_memory: bool = True
    """True if all senders run on the machine of the process."""


class Generate(_Message, tag="generate"):
    """Requests of one call, to be sampled behind those that are there."""

    call: int
    """Number of the call; its `FinishedRollouts` have the same."""
    requests: list[RolloutRequest]
    """Requests of the call, checked by the controller."""


class Abort(_Message, tag="abort"):
    """A request to finish rollouts with what they have."""

    rollout_ids: list[str]
    """Rollouts of any calls; ids that are not there are ignored."""


class Update(_Message, tag="update"):
    """One call of a `CheckedSink`, or a question for the peak memory of the process."""

    do: Literal["begin", "end", "abandon", "held_dtypes", "verify", "memory"]
    """Method to call, without `_update`; `memory` asks for `EngineAnswer.peak_rss_bytes` alone."""
    update: WeightUpdate | None = None
    """Update that begins, for `begin`; else None."""
    checksums: dict[str, int] = {}
    """Checksums of the sent weights by checkpoint name, for `verify`; else empty."""


class CloseEngine(_Message, tag="close"):
    """The engine ends."""


class EngineAnswer(_Message, tag="answer"):
    """The answer to `StartEngine`, or to an `Update` other than `begin`."""

    problem: str = ""
    """Text of the error that was raised; empty if there was none."""
    is_sync: bool = False
    """True if the error is a `WeightSyncError`."""
    dtypes: dict[str, str] = {}
    """Names of dtypes by checkpoint name, in the answer to `held_dtypes`."""
    layer_numbers: list[int] = []
    """Decoder layers with experts, from 0, in the answer to `StartEngine`."""
    max_positions: int = 0
    """`max_position_embeddings` of the model, in the answer to `StartEngine`."""
    description: str = ""
    """Value of `EmbeddedEngine.description`, in the answer to `StartEngine`."""
    is_on_device: bool = False
    """Value of `EmbeddedEngine.is_on_device`, in the answer to `StartEngine`."""
    interrupted: int = 0
    """Rollouts, as in `SamplingCosts`, in answers to `Update`."""
    stalled_seconds: float = 0.0
    """Seconds, as in `SamplingCosts`, in answers to `Update`."""
    peak_rss_bytes: int = 0
    """Peak resident memory of the process, in answers to `Update`."""
    receiver: ReceiverAddress | None = None
    """Address to which senders push buckets, in the answer to `StartEngine`; else None."""


class FinishedRollouts(_Message, tag="records"):
    """Rollouts of a call that finished in one step, as trajectories in the frame of the message."""

    call: int
    """Number of the call, as in `Generate`."""
    without: list[str] = []
    """Ids of aborted rollouts that never got a token."""


ToEngine = StartEngine | Generate | Abort | Update | CloseEngine
ToController = EngineAnswer | FinishedRollouts

encode = msgspec.msgpack.Encoder().encode
decode_for_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_controller: Callable[[bytes], ToController] = msgspec.msgpack.Decoder(ToController).decode
