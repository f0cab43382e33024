"""A weight update as a value: version, kind and list of tensors; and the check that it arrived whole. Torch-free; any
process.

Every receiver of an update, from the engine to a file's reader, gets the value at the begin, and compares with it what
arrives: each tensor that the update lists once, and no other. An engine calls `check_update`, too, which says if it can
take such a list. A new kind is a value of `UpdateKind`, a function and its line in `REQUIREMENTS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from moerl.errors import WeightSyncError

REMEDY = "send each tensor that the update lists once, and no other; the old weights stay in use"
_NAMED = 5

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by checkpoint name."""


class UpdateKind(StrEnum):
    """Kind of a weight update: the part of the engine's weights that it replaces."""

    FULL = "full"
    """Every tensor that the engine holds, by a new value."""


class WeightUpdate(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One update of an engine's weights, before any tensor of it has come.

    Raises:
        WeightSyncError: the version is negative.
    """

    version: int
    """Policy version of the weights that the engine has after the update, >= 0."""
    kind: UpdateKind
    """Part of the engine's weights that it replaces."""
    tensors: Shapes
    """Shape of every tensor that it brings, by checkpoint name."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise WeightSyncError(
                "weight update: policy version",
                seen=self.version,
                expected="at least 0",
                remedy="number updates from 0 upwards",
            )


class Arrivals:
    """Record of the tensors of one update that one receiver, or one of several senders, has got.

    Attributes:
        update: the open update.
        names: of the tensors that have come. The receiver adds a name once it has the tensor, checked before.
    """

    def __init__(self, update: WeightUpdate) -> None:
        self.update = update
        self.names: set[str] = set()
        self._refused: WeightSyncError | None = None

    def check(self, name: str, shape: Collection[int]) -> None:
        """Checks a tensor that has just come.

        Raises:
            WeightSyncError: the update does not list it, or with another shape; or it has come before. The update
                cannot be whole any more.
        """
        expected = self.update.tensors.get(name)
        if expected == tuple(shape) and name not in self.names:
            return
        is_second = name in self.names
        self._refused = self._refused or WeightSyncError(
            f"weight update to version {self.update.version}: tensor {name!r}",
            seen="a second time" if is_second else f"shape {tuple(shape)}",
            expected="once" if is_second else expected or f"one of the {len(self.update.tensors)} that it lists",
            remedy=REMEDY,
        )
        raise self._refused

    def require_whole(self) -> None:
        """Raises WeightSyncError unless each tensor that the update lists has come once, and no other."""
        self.require_good()
        require_whole(self.update, [self.names])

    def require_good(self) -> None:
        """Raises the first error of `check` again, if there was one."""
        if self._refused is not None:
            raise self._refused


def require_open[T](update: T | None) -> T:
    """Returns an open update. Raises WeightSyncError if there is none."""
    if update is None:
        raise WeightSyncError("weight update: none is open", remedy="call begin_update first")
    return update


def require_whole(update: WeightUpdate, parts: Iterable[Collection[str]]) -> None:
    """Raises WeightSyncError unless the parts of all senders, by their tensors' names, make up the update."""
    counts = Counter(name for part in parts for name in part)
    for problem, names, expected in (
        ("are missing", update.tensors.keys() - counts.keys(), f"all {len(update.tensors)} that it lists"),
        ("are not in its list", counts.keys() - update.tensors.keys(), f"the {len(update.tensors)} that it lists"),
        ("came twice", {name for name, count in counts.items() if count > 1}, "each tensor once"),
    ):
        if names:
            raise WeightSyncError(
                f"weight update to version {update.version}: tensors {problem}",
                seen=first_few([repr(name) for name in sorted(names)]),
                expected=expected,
                remedy=REMEDY,
            )


def first_few(problems: Collection[str]) -> str:
    """Returns the number of problems and the first of them, for an error."""
    listed = "; ".join(list(problems)[:_NAMED]) + ("; ..." if len(problems) > _NAMED else "")
    return f"{len(problems)}: {listed}"


def check_update(update: WeightUpdate, held: Shapes, tied: Mapping[str, str]) -> None:
    """Compares the list of an update with the tensors of an engine, as the update's kind requires.

    Args:
        held: shape of every tensor that the engine holds, by checkpoint name.
        tied: names that may come, too, each with the held tensor that it must equal.

    Raises:
        WeightSyncError: the engine cannot take such an update.
    """
    problems = sorted(REQUIREMENTS[update.kind](update.tensors, held, tied))
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


REQUIREMENTS: Mapping[UpdateKind, Callable[[Shapes, Shapes, Mapping[str, str]], Iterator[str]]] = {
    UpdateKind.FULL: _full
}
"""Function of each kind, with the arguments of `check_update`: yields the problems of a list."""
