"""The states of a rank's random generators, for checkpoints. Runs in every trainer rank."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec
import torch
from torch import Tensor

from moerl.kernels.transfer import HOST
from moerl.trainer.collectives import all_gather_bytes, to_bytes, to_tensor


class RandomState(TypedDict):
    """States of a rank's generators, each uint8 [bytes]."""

    cpu: Tensor
    """State of torch's generator of the host."""
    device: Tensor | None
    """State of torch's generator of the rank's GPU; None on a CPU."""
    regions: dict[str, Tensor]
    """States that Megatron keeps for parallel regions, by name."""


def gather_random_states() -> list[RandomState]:
    """Gathers the random states of all ranks, in rank order."""
    mine: RandomState = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu() if torch.cuda.is_available() else None,
        "regions": {name: value.cpu() for name, value in _regions().get_states().items()},
    }
    decoder = msgspec.msgpack.Decoder(RandomState, dec_hook=lambda kind, data: to_tensor(data, HOST))
    return [decoder.decode(each) for each in all_gather_bytes(msgspec.msgpack.encode(mine, enc_hook=to_bytes))]


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state["cpu"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    _regions().set_states(state["regions"])


def _regions() -> Any:
    """Returns Megatron's generators of parallel regions."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
