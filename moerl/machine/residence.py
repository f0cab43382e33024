"""Places of a colocated run's memory at each moment of a step: the one table of what sleeps. Pure; any process.

`moerl.config.run_memory` counts by it; docs/sglang.md prints it. A step has three moments: servers sample; the new
weights are sent to them; the trainer works on the rollouts. `trainer.sleep` decides two rows;
`trainer.optimizer_offload` is the share of the optimizer state that lies in host memory in all moments.
"""

from __future__ import annotations

from typing import Literal

Moment = Literal["sampling", "sending", "training"]
MOMENTS_OF_A_RUN: tuple[Moment, ...] = ("sampling", "sending", "training")
Place = Literal["device", "host", "freed"]

ASLEEP: dict[str, tuple[Place, Place, Place]] = {
    "rank: weights": ("host", "device", "device"),
    "rank: reference weights": ("host", "device", "device"),
}
"""By row of the table, its place in each moment with trainer.sleep=true; with false it is the device in all of them."""

ALWAYS: dict[str, tuple[Place, Place, Place]] = {
    "rank: gradients": ("freed", "freed", "device"),
    "rank: optimizer state": ("device", "device", "device"),
    "rank: pieces of optimizer state": ("freed", "freed", "device"),
    "rank: activations": ("freed", "freed", "device"),
    "rank: scoring": ("freed", "freed", "device"),
    "rank: embedding's gradient": ("freed", "freed", "device"),
    "buckets of a weight update": ("freed", "device", "freed"),
    "server: weights": ("device", "device", "freed"),
    "server: cache": ("device", "freed", "freed"),
}
"""By row of the table, its place in each moment with any setting."""


def moments_on_device(what: str, *, sleeps: bool) -> tuple[Moment, ...]:
    """Returns the moments in which a colocated run has `what`, a row of the table, on the device.

    Args:
        sleeps: `trainer.sleep`.
    """
    if what in ASLEEP and not sleeps:
        return MOMENTS_OF_A_RUN
    places = (ASLEEP | ALWAYS)[what]
    return tuple(moment for moment, place in zip(MOMENTS_OF_A_RUN, places, strict=True) if place == "device")
