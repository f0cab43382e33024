"""Needs of the trackers of `metrics.sinks`: their libraries, and the environment of their processes. Torch-free.

A setting of its library decides whether a tracker sends anything. If the user has made none, the tracker stays on this
machine: it stores everything in the run directory, and asks nobody anything.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moerl.errors import ConfigError

LIBRARIES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""By tracker, the packages that it imports."""


def is_package_installed(package: str) -> bool:
    """Returns whether a package can be imported; a folder of its name in the current directory does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_trackers(sinks: Sequence[str], is_installed: Callable[[str], bool] = is_package_installed) -> None:
    """Raises `ConfigError` if the library of a tracker is not installed; imports none."""
    for name in sinks:
        missing = [package for package in LIBRARIES.get(name, ()) if not is_installed(package)]
        if missing:
            raise ConfigError(
                f"metrics.sinks: {name} is not installed",
                seen=f"no package {', '.join(missing)}",
                expected="what it needs in the environment of moerl",
                remedy=f'pip install "moerl[{name}]", or leave {name} out of metrics.sinks',
            )


def tracker_environment(name: str, folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment of a tracker's process: the user's variables, and settings that keep the tracker offline
    for those that the user has not set.

    Args:
        folder: of the tracker in the run directory.
    """
    return {**_quiet(name, folder, environment), **environment, "OMP_NUM_THREADS": "1"}


def _quiet(name: str, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a tracker that stays on this machine; the user's own go before them."""
    match name:
        case "wandb":
            offline = environment.get("WANDB_MODE", "offline") != "online"
            own = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder.parent), "WANDB_CACHE_DIR": str(folder / "cache")}
            return own | ({"WANDB_ERROR_REPORTING": "false"} if offline else {})
        case "mlflow":
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            return {"MLFLOW_TRACKING_URI": uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
        case _:
            is_remote = {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & environment.keys()
            return {"TRACKIO_DIR": str(folder)} | ({} if is_remote else {"HF_HUB_OFFLINE": "1"})
