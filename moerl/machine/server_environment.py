"""The environment variables of an SGLang server's process. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moerl.machine.interfaces import interface_variables


def server_environment(
    device: str,
    num_ranks: int,
    environment: Mapping[str, str] = os.environ,
    cores: tuple[int, ...] | None = None,
    *,
    first_device: int = 0,
    host: str = "127.0.0.1",
) -> dict[str, str]:
    """Returns our variables without those that would leak into another Python environment and those of Ray, and with
    those that a CPU server needs.

    Args:
        device: cuda or cpu.
        num_ranks: tensor-parallel ranks; on CPU each has one thread, and a core of its own if SGLang can bind it. With
            more threads a tiny model is 20 times slower.
        cores: to choose from, the last ones first; by default those this process may use.
        first_device: number of GPUs or cores that other servers have.
        host: address of the server, on which its process groups listen, too.
    """
    kept = {
        name: value for name, value in environment.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "RAY_"))
    }
    kept |= interface_variables(host, kept)
    # A torch.py or json.py in the current directory is not what a server, or what it starts, imports.
    kept["PYTHONSAFEPATH"] = "1"
    if device != "cpu":
        return kept
    usable = tuple(sorted(os.sched_getaffinity(0))) if cores is None else cores
    chosen = [usable[-1 - rank % len(usable)] for rank in range(first_device, first_device + num_ranks)]
    return kept | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in chosen),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Compiling the few functions that ask for it takes longer than they ever run here.
        "TORCH_COMPILE_DISABLE": "1",
        # A file that is not there: ranks would open the NCCL that torch for CUDA brings, and end for want of a GPU.
        "SGLANG_NCCL_SO_PATH": "no-nccl-on-cpu",
    }
