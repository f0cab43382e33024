"""How the trainer and its servers work together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Interrupt(StrEnum):
    """Treatment of responses under way by a weight update. drain: it waits for them. abort_resume: they are cut short,
    and asked for again behind the tokens that they have. retract: the server computes the keys and values of these
    tokens again with the new weights, and goes on."""

    DRAIN = "drain"
    ABORT_RESUME = "abort_resume"
    RETRACT = "retract"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the trainer and its servers work together.

    engine_id: of the engine; its servers are numbered. dtype: of the servers' weights; float32 or bfloat16.
    max_running: requests that are with one server together. response_seconds: longest time from asking for a response
    to having it. probe_seconds: silence of a busy server after which it is probed, and the time that a probe has.
    update_seconds: for each step of a weight update. bucket_bytes: largest group of tensors that are sent together.
    shapes: of every tensor the served model has, by its name in the checkpoint. tied: tensors that are another one's
    and may come, too, by name. say: told when a server was lost. interrupt: see there. keeps_copy: senders keep the
    weights that servers should hold in host memory; without them a server that was lost cannot be replaced.
    shares_devices: servers compute where senders do; NCCL takes a device once, so weights go through host memory.
    """

    engine_id: str
    dtype: str
    max_running: int
    response_seconds: float
    probe_seconds: float
    update_seconds: float
    bucket_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    say: Callable[[str], None]
    interrupt: Interrupt = Interrupt.RETRACT
    keeps_copy: bool = True
    shares_devices: bool = False
