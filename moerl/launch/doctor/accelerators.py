"""GPUs, their driver, NCCL and Transformer Engine. Torch is asked in a child process and not loaded here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moerl.launch.checks.gpus import Gpu, last_line
from moerl.launch.checks.outcome import Check, green
from moerl.processes.host import run_command

AREA = "accelerators"
TORCH_SECONDS = 300.0
BUSY_SHARE = 0.05
"""Share of a GPU's memory that others may use before a run starts; more is worth a note."""
_PROBE = """
import json, torch
cuda, nccl = torch.cuda, None
if torch.distributed.is_available() and torch.distributed.is_nccl_available():
    nccl = ".".join(map(str, cuda.nccl.version()))
count = cuda.device_count() if cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, "gpus": count,
                  "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available()}))
"""
_ENGINES = ("transformer-engine", "transformer-engine-torch")


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts that torch reports about itself."""

    version: str
    """Version with its local part, for example 2.9.0+cpu."""
    cuda: str | None
    """Version of CUDA; None if torch was built without it."""
    nccl: str | None
    """Version of NCCL; None if torch was built without it."""
    gpus: int
    """GPUs that torch can use."""
    gloo: bool
    """True if torch was built with gloo."""


def accelerator_checks(gpus: Sequence[Gpu] | str, torch: Torch | str, installed: Mapping[str, str]) -> list[Check]:
    """Returns the looks at GPUs and at the libraries that use them. gpus, torch: a text says why they could not be
    asked."""
    if isinstance(torch, str):
        remedy = f"run `{sys.executable} -c 'import torch'` and mend what it says; `make setup` installs it"
        failed = Check(AREA, "torch", "red", torch, "a process that imports torch", remedy)
        return [failed, check_gpus(gpus, None)]
    return [
        green(AREA, "torch", f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs'}"),
        check_gpus(gpus, torch),
        check_collectives(gpus, torch),
        check_transformer_engine(gpus, installed),
    ]


def ask_torch(python: str = sys.executable) -> Torch | str:
    """Returns torch as a process of `python` sees it; a text if it cannot be imported."""
    try:
        done = run_command([python, "-W", "ignore", "-c", _PROBE], TORCH_SECONDS, folder="/")
    except OSError as error:
        return str(error)
    try:
        return Torch(**json.loads(done.stdout))
    except (ValueError, TypeError):
        return last_line(done.stderr) or f"torch answered {done.stdout[:200]!r}"


def check_gpus(gpus: Sequence[Gpu] | str, torch: Torch | None) -> Check:
    """Checks that torch can use the GPUs of the machine, and that nobody else does."""
    if isinstance(gpus, str):
        remedy = "mend the NVIDIA driver, until `nvidia-smi` lists the GPUs"
        return Check(AREA, "GPUs", "red", gpus, "GPUs that the driver lists", remedy)
    if not gpus:
        return green(AREA, "GPUs", f"none: a machine of {len(os.sched_getaffinity(0))} CPU cores")
    each = f"{len(gpus)} x {gpus[0].name}, {gpus[0].total_mib / 1024:.0f} GiB, driver {gpus[0].driver}"
    if torch is not None and torch.gpus == 0:
        why = f"built for CUDA {torch.cuda}" if torch.cuda else "built for CPUs"
        return Check(
            AREA,
            "GPUs",
            "red",
            f"{each}; torch {torch.version}, {why}, can use none",
            "GPUs that torch can use",
            "install a newer driver, or unset CUDA_VISIBLE_DEVICES" if torch.cuda else "install torch built for CUDA",
        )
    busy = [gpu.used_mib for gpu in gpus if gpu.used_mib > BUSY_SHARE * gpu.total_mib]
    if busy:
        seen = f"{each}; {len(busy)} of them hold up to {max(busy) / 1024:.1f} GiB of others"
        return Check(AREA, "GPUs", "yellow", seen, "GPUs that nobody uses", "end what `nvidia-smi` lists, or wait")
    hidden = "" if torch is None or torch.gpus == len(gpus) else f"; torch may use {torch.gpus} of them"
    return green(AREA, "GPUs", each + hidden)


def check_collectives(gpus: Sequence[Gpu] | str, torch: Torch) -> Check:
    """Checks that torch was built with NCCL for GPUs, and with gloo for CPUs."""
    if gpus and torch.nccl is None:
        return Check(AREA, "NCCL", "red", "torch was built without it", "NCCL", "install torch built for CUDA")
    if not torch.gloo:
        return Check(AREA, "gloo", "red", "torch was built without it", "gloo", "install torch of PyTorch's own index")
    if not gpus:
        return green(AREA, "NCCL", "not needed on CPUs: gloo does its work")
    return green(AREA, "NCCL", f"{torch.nccl}")


def check_transformer_engine(gpus: Sequence[Gpu] | str, installed: Mapping[str, str]) -> Check:
    """Checks that Transformer Engine is installed on a machine with GPUs: Megatron's layers there are its layers."""
    found = [f"{name} {installed[name]}" for name in _ENGINES if name in installed]
    if found:
        return green(AREA, "Transformer Engine", ", ".join(found))
    if not gpus:
        return green(AREA, "Transformer Engine", "absent; CPU machines need none")
    remedy = "`make gpu` in a checkout, or pip install --no-build-isolation 'moerl[gpu]'"
    return Check(AREA, "Transformer Engine", "red", "absent", "installed on machines with GPUs", remedy)
