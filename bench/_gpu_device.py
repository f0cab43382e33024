"""Device of the results of `gpu_check.py`, with driver, versions, commit and time. A check of its own."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from pathlib import Path

import torch
from _gpu_checks import ROOT, CannotRunError, Findings
from _report import Result
from torch.cuda.nccl import version as nccl_version

from moerl.launch.checks.gpus import query_gpus

PACKAGES = (
    "triton",
    "transformers",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "liger-kernel",
    "cut-cross-entropy",
)


def check(device: str) -> Findings:
    """Two results that begin every file of results.

    Raises:
        CannotRunError: a GPU is asked for, and torch can use none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        why = f"torch {torch.__version__} can use none"
        raise CannotRunError(f"{why}; {_listed()}")
    return Findings([_hardware(device), Result(_versions(), time.time(), unit="seconds since 1970")])


def _listed() -> str:
    gpus = query_gpus()
    if isinstance(gpus, str):
        return gpus
    return f"nvidia-smi lists {', '.join(gpu.name for gpu in gpus)}" if gpus else "nvidia-smi lists none"


def _hardware(device: str) -> Result:
    if device == "cpu":
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return Result(f"device: CPU, {names[0] if names else platform.processor()}", 1, unit="thread")
    properties = torch.cuda.get_device_properties(0)
    gpus = query_gpus()
    driver = gpus[0].driver if isinstance(gpus, list) and gpus else "unknown"
    name = f"device: {properties.name}, compute capability {properties.major}.{properties.minor}, driver {driver}"
    return Result(name, properties.total_memory / 2**30, unit="GiB")


def _versions() -> str:
    nccl = ".".join(map(str, nccl_version())) if torch.cuda.is_available() else "not used"
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"NCCL {nccl}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return f"commit {_commit()}; {', '.join(found)}"


def _commit() -> str:
    """Returns the commit of this repository, with a plus if its working tree has changes; "unknown" if git fails."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
