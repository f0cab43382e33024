"""Kinds of weight updates: the demand of each on an engine, checked when the update begins. Torch-free; any process.

A new kind is a value of `UpdateKind`, a function here and its line in `DEMANDS`. An engine calls `check_update` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from moerl.contract.weight_update import UpdateKind, WeightUpdate, first_few
from moerl.errors import WeightSyncError

Shapes = Mapping[str, tuple[int, ...]]


def check_update(update: WeightUpdate, held: Shapes, tied: Mapping[str, str]) -> None:
    """Compares the list of an update with the tensors of an engine, as the update's kind demands.

    Args:
        held: shape of every tensor that the engine holds, by checkpoint name.
        tied: names that may come, too, each with the held tensor that it must equal.

    Raises:
        WeightSyncError: the engine cannot take such an update.
    """
    problems = sorted(DEMANDS[update.kind](update.tensors, held, tied))
    if problems:
        raise WeightSyncError(
            f"weight update to version {update.version}, kind {update.kind.value}: not for the tensors of this engine",
            seen=first_few(problems),
            expected=f"the {len(held)} tensors that the engine holds, with their shapes",
            remedy="list the tensors of the architecture that the engine serves; it keeps the weights it had",
        )


def _full(listed: Shapes, held: Shapes, tied: Mapping[str, str]) -> Iterator[str]:
    """Yields the differences of a list from all tensors of an engine; tied names may stand in the list or not."""
    for name in held.keys() - tied.keys() - listed.keys():
        yield f"missing {name!r}"
    for name, shape in listed.items():
        expected = held.get(tied.get(name, name))
        if expected is None:
            yield f"unknown {name!r}"
        elif shape != expected:
            yield f"{name!r} has shape {shape}, not {expected}"


DEMANDS: Mapping[UpdateKind, Callable[[Shapes, Shapes, Mapping[str, str]], Iterator[str]]] = {UpdateKind.FULL: _full}
"""Function of each kind, with the arguments of `check_update`: yields the problems of a list."""
