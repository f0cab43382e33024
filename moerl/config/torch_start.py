"""Settings that a process makes before it imports torch. Torch-free; every process of a run that imports torch.

torch computes with the threads of an OpenMP library (libgomp), which reads its variables once, as torch is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping

SPINS = "GOMP_SPINCOUNT"
"""How often a thread of libgomp asks whether a wait is over before it sleeps; one round takes 10 to 60 ns."""

NUM_SPINS = 1000
"""Tens of microseconds: the next operation of a small model comes within them. libgomp's own 300,000 are milliseconds,
in which the thread that is waited for does not run if both share a core (docs/decisions/one-thread.md)."""

_OF_THE_USER = (SPINS, "OMP_WAIT_POLICY")
_LIBRARIES = r".*[/\\](site|dist)-packages[/\\]"


def before_torch(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds how long threads of torch spin, in this process and in those that it starts, unless the user has said it;
    and ignores what the compiler says of libraries that are compiled for the first time in a new environment."""
    if not any(name in environment for name in _OF_THE_USER):
        environment[SPINS] = str(NUM_SPINS)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=_LIBRARIES)
