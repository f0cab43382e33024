"""The parts of Ray that a run uses: untyped, so that types can be checked without Ray."""

from __future__ import annotations

from typing import Any

import ray as _ray  # pyright: ignore[reportMissingImports]
import ray.exceptions as _exceptions  # pyright: ignore[reportMissingImports]
import ray.util as _util  # pyright: ignore[reportMissingImports]
from ray._private.authentication import authentication_utils as _tokens  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

ray: Any = _ray
util: Any = _util
tokens: Any = _tokens
AtBundle: Any = PlacementGroupSchedulingStrategy
OnNode: Any = NodeAffinitySchedulingStrategy
ActorUnavailableError: type[Exception] = _exceptions.ActorUnavailableError
RayError: type[Exception] = _exceptions.RayError
GetTimeoutError: type[Exception] = _exceptions.GetTimeoutError
"""Is a `RayError`."""


def start_actor(kind: type, **options: Any) -> Any:
    """Starts an actor that Ray does not start again if it is lost."""
    return ray.remote(kind).options(max_restarts=0, max_task_retries=0, **options).remote()


def first_line(error: Exception) -> str:
    """Returns the first line of an error of Ray, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
