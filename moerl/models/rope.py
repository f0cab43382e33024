"""Rotary parameters of a Hugging Face config in one shape. Pure; any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.errors import ConfigError


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters in one shape: transformers 5 nests them, 4 had `rope_theta` and others at the top.

    Raises:
        ConfigError: there is no rotary base.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise ConfigError(
            "model config: rope_theta",
            seen=theta,
            expected="a number, at the top level or in rope_parameters",
            remedy="correct the model config",
        )
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        rope["partial_rotary_factor"] = partial
    numbers = {name: float(value) for name, value in rope.items() if type(value) in (int, float)}
    return {**rope, **numbers, "rope_theta": float(theta)}
