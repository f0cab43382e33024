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
        seen = f"rank {rank}: {self.seen}" if self.seen is not None else f"rank {rank}"
        expected, remedy = self.expected, self.remedy
        known = {each.__name__: each for each in (MoerlError, UnprovedError, *MoerlError.__subclasses__())}
        kind = known.get(self.kind)
        if kind is None:
            error = TrainerError(f"rank {rank} failed in {command!r}", seen=self.what)
        elif kind is ContractError:
            error = ContractError(self.reason, field=self.field, seen=seen, expected=expected, remedy=remedy)
        elif kind is UnprovedError:
            index = self.microbatch
            error = UnprovedError(self.what, seen=self.seen, expected=expected, remedy=remedy, microbatch=index)
        else:
            error = kind(self.what, seen=self.seen if kind is ReplayError else seen, expected=expected, remedy=remedy)
        for note in self.notes:
            error.add_note(note)
        return error
