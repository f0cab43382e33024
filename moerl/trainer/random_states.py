"""The states of a rank's random generators, for checkpoints. Runs in every trainer rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from moerl.trainer.collectives import all_gather_bytes, to_bytes, to_tensor


def gather_random_states() -> list[dict[str, Any]]:
    """Gathers the random states of all ranks: of torch's generators, and those that Megatron keeps for parallel
    regions."""
    mine = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu() if torch.cuda.is_available() else None,
        "regions": {name: value.cpu() for name, value in _regions().get_states().items()},
    }
    return [_decode_states(each) for each in all_gather_bytes(_encode_states(mine))]


def _encode_states(states: Mapping[str, Any]) -> bytes:
    """Encodes states of generators, which are uint8 [bytes]."""
    return msgspec.msgpack.encode(states, enc_hook=to_bytes)


def _decode_states(data: bytes) -> dict[str, Any]:
    sent = msgspec.msgpack.decode(data, type=_RandomStates)
    cpu = torch.device("cpu")
    return {
        "cpu": to_tensor(sent.cpu, cpu),
        "device": None if sent.device is None else to_tensor(sent.device, cpu),
        "regions": {name: to_tensor(state, cpu) for name, state in sent.regions.items()},
    }


class _RandomStates(msgspec.Struct):
    cpu: bytes
    device: bytes | None
    regions: dict[str, bytes]


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    _regions().set_states(dict(state["regions"]))


def _regions() -> Any:
    """Returns Megatron's generators of parallel regions."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
