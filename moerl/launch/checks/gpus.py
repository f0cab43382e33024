"""GPUs of this machine, as the driver's tool lists them. Torch-free; starts `nvidia-smi` and nothing else."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moerl.processes.host import run_command

SMI_SECONDS = 30.0
_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
_DEVICE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver's tool lists it."""

    name: str
    """Product name, for example NVIDIA H100 80GB HBM3."""
    driver: str
    """Version of the driver."""
    total_mib: float
    """Its memory, in MiB."""
    used_mib: float
    """Memory that processes use now, in MiB."""


def query_gpus(command: Sequence[str] = _QUERY) -> list[Gpu] | str:
    """Returns the GPUs that the driver's tool lists, none if there are neither tool nor driver; a text if it fails."""
    try:
        done = run_command(command, SMI_SECONDS)
    except FileNotFoundError:
        return f"{_DEVICE} is there, and no nvidia-smi" if _DEVICE.exists() else []
    except OSError as error:
        return f"nvidia-smi: {error}"
    if done.returncode != 0:
        return f"nvidia-smi ended with {done.returncode}: {last_line(done.stdout + done.stderr)}"
    return read_gpus(done.stdout)


def read_gpus(text: str) -> list[Gpu] | str:
    """Returns the GPUs of an output of the driver's tool; a text if it cannot be read."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
        return [Gpu(name, driver, float(total), float(used)) for name, driver, total, used in rows]
    except ValueError:
        return f"nvidia-smi: {text[:200]!r}"


def usable_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu] | str:
    """Returns the GPUs that a run of this process would use: none if torch is built for CPUs, and no more than
    CUDA_VISIBLE_DEVICES names; a text if they cannot be asked."""
    try:
        if version("torch").endswith("+cpu"):
            return []
    except PackageNotFoundError:
        return []
    gpus = query_gpus()
    return gpus if isinstance(gpus, str) else visible_gpus(gpus, environment)


def visible_gpus(gpus: list[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Returns no more GPUs than CUDA_VISIBLE_DEVICES names; all if it is not set."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    named = [each.strip() for each in visible.split(",")]
    # CUDA ends the list at the first entry that is no device.
    count = next((i for i, each in enumerate(named) if each in ("", "-1")), len(named))
    return gpus[:count]


def last_line(text: str) -> str:
    """Returns the last line of what a program wrote, at most 300 characters."""
    return (text.strip().splitlines() or [""])[-1][:300]
