"""How the trainer and its servers work together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Interrupt(StrEnum):
    """Treatment of responses under way by a weight update."""

    DRAIN = "drain"
    """The update waits for them."""
    ABORT_RESUME = "abort_resume"
    """They are cut short, and asked for again behind the tokens that they have."""
    RETRACT = "retract"
    """The server computes the keys and values of their tokens again with the new weights, and goes on."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the trainer and its servers for working together."""

    engine_id: str
    """Id of the engine; its servers are numbered."""
    dtype: str
    """Dtype of the servers' weights: float32 or bfloat16."""
    max_running: int
    """Requests that one server has at a time, at most."""
    response_seconds: float
    """Seconds from asking for a response to having it, at most."""
    probe_seconds: float
    """Seconds of silence after which a busy server is probed, and seconds that a probe may take."""
    update_seconds: float
    """Seconds that each step of a weight update may take."""
    bucket_bytes: int
    """Bytes of tensors that are sent together, at most; a larger tensor is sent alone."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor of the served model, by its name in the checkpoint."""
    tied: Mapping[str, str]
    """Names of tensors that must equal another one and may come, too, each with the name of that one."""
    notify: Callable[[str], None]
    """Called in the engine's event loop with a line for people when a server is lost, replaced or given up."""
    interrupt: Interrupt = Interrupt.RETRACT
    """Treatment of responses under way when an update begins."""
    keeps_copy: bool = True
    """True if senders keep the weights that servers should hold in host memory; without these a server that was lost
    cannot be replaced."""
    shares_devices: bool = False
    """True if servers compute on the devices of senders; NCCL takes a device once, so weights then go through host
    memory."""
