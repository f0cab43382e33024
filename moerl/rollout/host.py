"""GPUs of this machine, and the device of the embedded engine's model: the CPU of the host, or a GPU. Runs in the
controller and inside the rollout engine."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from moerl.rollout.eight_bits import FLOAT8


def is_host(model: PreTrainedModel) -> bool:
    """Returns whether a model is on a CPU, for which the compiled kernels are."""
    return model.device.type == "cpu"


def engine_device(dtype: str) -> torch.device:
    """Returns the device that an engine of this process samples on: its GPU, if there is one.

    Args:
        dtype: as `rollout.dtype`; 8 bits are emulated on a CPU alone.
    """
    if dtype == FLOAT8 or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_bytes() -> int | None:
    """Returns the memory of the first GPU of this machine; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
