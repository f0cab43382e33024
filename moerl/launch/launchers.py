"""Other programs that start this one. Torch-free; runs in the process that a user started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moerl.errors import ConfigError


def refuse_other_launchers(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses to be one of several processes of torchrun or mpirun: each of them would be a controller.

    Raises:
        ConfigError: WORLD_SIZE is not 1.
    """
    world_size = environment.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            "WORLD_SIZE: another launcher started this process",
            seen=world_size,
            expected="no launcher: moerl starts its own ranks",
            remedy="run `moerl train` directly, without torchrun or mpirun",
        )
