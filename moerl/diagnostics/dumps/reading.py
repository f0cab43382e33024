"""Shared state of the readers of all formats: options, counts of unusable rows, notes, names and version numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from moerl.diagnostics.dumps.build import Parts, build
from moerl.diagnostics.dumps.rollout import DumpedRollout, Unusable
from moerl.diagnostics.dumps.values import MAX_INT, RowError, shown

_NUMBERED = "policy versions are texts here and were numbered"


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
    version_names: dict[str, int] = field(default_factory=dict)
    """Numbers of version strings that were seen, in order of appearance; empty if the first was a number."""
    _is_numeric: bool | None = None
    _seen: dict[str, int] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def take[**P](
        self, where: str, make: Callable[P, Parts], *given: P.args, **named: P.kwargs
    ) -> Iterator[DumpedRollout]:
        """Yields the one rollout of a row; or none, and counts the reason, with the row's place for people.

        Args:
            make: finds the parts of the row from the other arguments; may raise `RowError`.
        """
        try:
            rollout = build(make(*given, **named), self.moe_layers)
        except RowError as error:
            self.unusable.add(error.reason, f"{where}: {error.seen}")
        else:
            yield self.unique(rollout)

    def unique(self, rollout: DumpedRollout) -> DumpedRollout:
        """Returns the rollout, under a name that no other of the dump has."""
        name = self._unique(rollout.name)
        return rollout if name == rollout.name else replace(rollout, name=name)

    def version_numbers(self, versions: Iterable[object]) -> list[int]:
        """Returns the numbers of version strings: their own if the first is a number, else in order of appearance; -1
        for None, for a text among numbers, and for SGLang's name of weights that were never updated.

        Raises:
            RowError: one is neither text nor integer.
        """
        numbers = [self._version_number(each) for each in versions]
        if self.version_names:
            known = ", ".join(f"{number}: {shown(name)}" for name, number in list(self.version_names.items())[:8])
            self.notes[:] = [note for note in self.notes if not note.startswith(_NUMBERED)]
            self.note(f"{_NUMBERED} in order of appearance ({known})")
        return numbers

    def _unique(self, name: str) -> str:
        count = self._seen[name] = self._seen.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}#{count}")

    def _version_number(self, version: object) -> int:
        if version is None or version == "default":
            return -1
        if type(version) is int:
            version = str(version) if abs(version) <= MAX_INT else None
        if not isinstance(version, str):
            raise RowError("policy versions: one is not a text", version)
        number = int(version) if version.isascii() and version.isdigit() and len(version) <= 10 else -1
        if self._is_numeric is None:
            self._is_numeric = 0 <= number <= MAX_INT
        if self._is_numeric:
            return number if number <= MAX_INT else -1
        return self.version_names.setdefault(version, len(self.version_names))
