"""Errors of ranks as messages: the same error is raised in the controller, with the rank's name. Torch-free; any
process."""

from __future__ import annotations

from typing import Self

import msgspec

from moerl.errors import ContractError, MoerlError, ReplayError, TrainerError, UnprovedError, told


class Failure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An error of a rank."""

    kind: str
    """Name of the error's class in `moerl.errors`; empty for any other error, which `what` names."""
    what: str
    """The problem, in words."""
    seen: str | None = None
    """Value seen; None if the error has none."""
    expected: str | None = None
    """Value expected; None if the error has none."""
    remedy: str = ""
    """Advice; may be empty."""
    notes: tuple[str, ...] = ()
    """Notes that were added to the error."""
    reason: str = ""
    """Code of a `ContractError`, else empty."""
    field: str = ""
    """Field of a `ContractError`, else empty."""
    microbatch: int = -1
    """Index of a microbatch of the rank whose checksum is wrong; -1 if the error names none."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        notes = tuple(getattr(error, "__notes__", ()))
        if isinstance(error, OSError):
            error = told(error)
        if not isinstance(error, MoerlError):
            return cls("", f"{type(error).__name__}: {error}", notes=notes)
        is_contract = isinstance(error, ContractError)
        return cls(
            type(error).__name__,
            error.what,
            error.seen,
            error.expected,
            error.remedy,
            notes,
            reason=str(error.reason) if is_contract else "",
            field=error.field if is_contract else "",
            microbatch=error.microbatch if isinstance(error, UnprovedError) else -1,
        )

    def error(self, rank: int, command: str) -> MoerlError:
        """Returns the same error, which names the rank."""
        error = self._error(rank, command)
        for note in self.notes:
            error.add_note(note)
        return error

    def _error(self, rank: int, command: str) -> MoerlError:
        seen = f"rank {rank}: {self.seen}" if self.seen is not None else f"rank {rank}"
        if self.kind == ContractError.__name__:
            return ContractError(self.reason, field=self.field, seen=seen, expected=self.expected, remedy=self.remedy)
        if self.kind in (UnprovedError.__name__, ReplayError.__name__):
            if self.kind == ReplayError.__name__:
                return ReplayError(self.what, seen=self.seen, expected=self.expected, remedy=self.remedy)
            return UnprovedError(
                self.what, seen=self.seen, expected=self.expected, remedy=self.remedy, microbatch=self.microbatch
            )
        known = {each.__name__: each for each in (MoerlError, *MoerlError.__subclasses__())}
        if self.kind in known:
            return known[self.kind](self.what, seen=seen, expected=self.expected, remedy=self.remedy)
        return TrainerError(f"rank {rank} failed in {command!r}", seen=self.what)
