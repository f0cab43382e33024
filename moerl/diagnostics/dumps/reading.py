"""Shared state of the readers of all formats: options, counts of unusable rows, notes, names and version numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from moerl.diagnostics.dumps.build import Parts, build
from moerl.diagnostics.dumps.rollout import DumpedRollout, Unusable
from moerl.diagnostics.dumps.values import MAX_INT, RowError, shown


@dataclass(slots=True)
class Reading:
    """A dump that is being read."""

    moe_layers: Sequence[int] | None = None
    """The model's MoE layers, counted among all its layers; None if there is no model."""
    experts_per_token: int | None = None
    """For routes that come flat; None if there is no model."""
    unusable: Unusable = field(default_factory=Unusable)
    """Rows that could not be read so far."""
    notes: list[str] = field(default_factory=list)
    """Sentences for people, each once."""
    versions: VersionNumbers = field(default_factory=lambda: VersionNumbers())
    """Version strings that were seen, and their numbers."""
    _seen: dict[str, int] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def take(self, where: str, make: Callable[[], Parts]) -> Iterator[DumpedRollout]:
        """Yields the one rollout of a row; or none, and counts the reason, with the row's place for people.

        Args:
            make: finds the parts of the row; may raise `RowError`.
        """
        try:
            rollout = build(make(), self.moe_layers)
        except RowError as error:
            self.unusable.add(error.reason, f"{where}: {error.seen}")
        else:
            yield self.unique(rollout)

    def unique(self, rollout: DumpedRollout) -> DumpedRollout:
        """Returns the rollout, under a name that no other of the dump has."""
        name = self._unique(rollout.name)
        return rollout if name == rollout.name else replace(rollout, name=name)

    def version_numbers(self, versions: Iterable[object]) -> list[int]:
        """Returns the numbers of version strings. Raises `RowError` for a version that is neither text nor integer."""
        numbers = [self.versions.number(each) for each in versions]
        if self.versions.names:
            known = ", ".join(f"{number}: {shown(name)}" for name, number in list(self.versions.names.items())[:8])
            self.notes[:] = [note for note in self.notes if not note.startswith(_NUMBERED)]
            self.note(f"{_NUMBERED} in order of appearance ({known})")
        return numbers

    def _unique(self, name: str) -> str:
        count = self._seen[name] = self._seen.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}#{count}")


_NUMBERED = "policy versions are texts here and were numbered"


@dataclass(slots=True)
class VersionNumbers:
    """Version strings as numbers: their own if the first is a number, else in order of appearance."""

    names: dict[str, int] = field(default_factory=dict)
    """Numbers by text; empty if the first was a number."""
    _numeric: bool | None = None

    def number(self, version: object) -> int:
        """Returns the number of a version; -1 for None, for a text among numbers, and for SGLang's name of weights that
        were never updated.

        Raises:
            RowError: it is neither text nor integer.
        """
        if version is None or version == "default":
            return -1
        if type(version) is int:
            version = str(version) if abs(version) <= MAX_INT else None
        if not isinstance(version, str):
            raise RowError("policy versions: one is not a text", version)
        number = int(version) if version.isascii() and version.isdigit() and len(version) <= 10 else -1
        if self._numeric is None:
            self._numeric = 0 <= number <= MAX_INT
        if self._numeric:
            return number if number <= MAX_INT else -1
        return self.names.setdefault(version, len(self.names))
