"""Updates that bring every tensor of a model, as tests send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moerl.contract.weight_update import UpdateKind, WeightUpdate


def full(version: int, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> WeightUpdate:
    """Returns the update that brings these tensors, each with its shape."""
    return WeightUpdate(version, UpdateKind.FULL, {name: tuple(each.shape) for name, each in dict(tensors).items()})


def send(engine: Any, version: int, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Sends a whole update, in one bucket."""
    pairs = dict(tensors)
    engine.begin_update(full(version, pairs))
    engine.receive(pairs.items())
    engine.end_update()
