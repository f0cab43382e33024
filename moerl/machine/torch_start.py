"""Settings that a process makes before it imports torch. Torch-free; every process of a run that imports torch.

torch computes with the threads of an OpenMP library (libgomp), which reads its variables once, as torch is imported.
NVIDIA's libraries read the precision of products from the environment, too.
"""

from __future__ import annotations

import atexit
import gc
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

SPINS = "GOMP_SPINCOUNT"
"""How often a thread of libgomp asks whether a wait is over before it sleeps; one round takes 10 to 60 ns."""

NUM_SPINS = 1000
"""Rounds that take tens of microseconds: the next operation of a small model comes within them. libgomp's own 300,000
take milliseconds, in which the thread that is waited for does not run if both share a core
(docs/decisions/one-thread.md)."""

TF32 = "NVIDIA_TF32_OVERRIDE"
"""Read by NVIDIA's libraries as they are loaded; 0: products of float32 numbers are exact, whatever a caller asks for.
Transformer Engine asks for TF32 in every float32 product, and torch's own switches do not reach it."""

_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of a process with deterministic kernels only: Transformer Engine's attention asks for the first one, cuBLAS
reads the second one as it is loaded."""

_OF_THE_USER = (SPINS, "OMP_WAIT_POLICY")
_LIBRARIES = r".*[/\\](site|dist)-packages[/\\]"


def before_torch(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds how long threads of torch spin, in this process and in those that it starts, unless the user has set that;
    ignores syntax warnings of libraries that are compiled for the first time in a new environment; and has the process
    end without a search for garbage among all that these libraries hold, which takes two seconds."""
    if not any(name in environment for name in _OF_THE_USER):
        environment[SPINS] = str(NUM_SPINS)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=_LIBRARIES)
    atexit.register(gc.freeze)


@contextmanager
def uncollected() -> Iterator[None]:
    """Has Python look for no garbage inside the block, for imports of many modules: they leave none, and looking for it
    takes a second of seven."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cuda_variables(tf32: str, *, deterministic: bool) -> dict[str, str]:
    """Returns the variables of a process that computes as `trainer.tf32` and `trainer.deterministic` say."""
    return ({TF32: "0"} if tf32 == "off" else {}) | (_DETERMINISTIC if deterministic else {})


def before_cuda(tf32: str, *, deterministic: bool = False, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tells NVIDIA's libraries how to compute on a GPU in this process, before it imports torch.

    Args:
        tf32: as `trainer.tf32`; the variable that a user has set stays if this is on.
        deterministic: as `trainer.deterministic`.
    """
    environment.update(cuda_variables(tf32, deterministic=deterministic))


def has_tf32(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether products of float32 numbers may be TF32's in a process with this environment."""
    return environment.get(TF32) != "0"
