"""The exception hierarchy.

Every error a user can meet says what was seen, what was expected and what to do next. All of them survive
pickling, because they cross process boundaries. Their text may come from a server or a file: control characters in it
are made visible, so that it can be printed anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from moerl.printable import printable


class MoerlError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: one clause that names the fault, with the dotted path or field if there is one.
        seen: value that is wrong.
        expected: value that would have been right.
        remedy: next step for the reader.
    """

    def __init__(self, what: str, *, seen: object = None, expected: object = None, remedy: str = "") -> None:
        self.what = printable(what)
        self.seen = None if seen is None else printable(str(seen))
        self.expected = None if expected is None else printable(str(expected))
        self.remedy = printable(remedy)
        super().__init__(self.what)

    def add_note(self, note: str) -> None:
        """Adds a note, with control characters made visible: notes quote logs of servers."""
        super().add_note(printable(note))

    def __str__(self) -> str:
        parts = [self.what]
        if self.seen is not None:
            parts.append(f"seen: {self.seen}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return "; ".join(parts)

    def __reduce__(self):
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[MoerlError], state: dict[str, object]) -> MoerlError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    Exception.__init__(error, state.get("what", ""))
    return error


class ConfigError(MoerlError):
    """Error of the configuration: unknown key, wrong type, impossible combination."""


def as_config_error(error: MoerlError, what: str) -> ConfigError:
    """Returns an error of the configuration that has a clause of its own and otherwise says what another error says."""
    return ConfigError(what, seen=error.seen, expected=error.expected, remedy=error.remedy)


class ContractError(MoerlError):
    """Breach of the data contract by a trajectory, frame, file or batch. Nothing is repaired; refused records are kept.

    Args:
        reason: stable reason code, for example ``expert_id_out_of_range``.
        field: field of the record that breaks the invariant.
    """

    def __init__(
        self,
        reason: str,
        *,
        field: str,
        seen: object = None,
        expected: object = None,
        remedy: str = "inspect the quarantined record; the engine and trainer must agree on model and version",
    ) -> None:
        super().__init__(f"contract: {reason} in field '{field}'", seen=seen, expected=expected, remedy=remedy)
        self.reason = reason
        self.field = field


class EngineError(MoerlError):
    """Request that a rollout engine refused or failed."""


class RequestRefusedError(EngineError):
    """Request that no engine of this model can carry out; other requests are not affected."""


class EpisodeError(MoerlError):
    """Call of a session that its state does not allow, or an episode that its environment did not end."""


class SessionOverError(EpisodeError):
    """Turn that was asked of a session in which nothing more can be sampled."""


class ReplayError(MoerlError):
    """Keep Routing that cannot be enforced, or that was not proved; no optimizer update was applied."""


class UnprovedError(ReplayError):
    """Failed proof of some rank; raised on every rank alike, so that all can look for the reason together.

    Args:
        microbatch: index of a microbatch of this rank whose checksum is wrong, or -1.
    """

    def __init__(
        self, what: str, *, seen: object = None, expected: object = None, remedy: str = "", microbatch: int = -1
    ) -> None:
        super().__init__(what, seen=seen, expected=expected, remedy=remedy)
        self.microbatch = microbatch


class TrainerError(MoerlError):
    """Failure of a rank of the trainer: it failed, died or did not answer in time."""


class WeightSyncError(MoerlError):
    """Failed weight update: weights did not reach an engine whole."""


class CheckpointError(MoerlError):
    """Checkpoint that is missing, corrupt or of another run."""


class RewardError(MoerlError):
    """Failure of a reward function: it failed, or returned something that is not a finite number.

    Args:
        reward: name of the reward; empty if it has none.
    """

    def __init__(
        self, what: str, *, seen: object = None, expected: object = None, remedy: str = "", reward: str = ""
    ) -> None:
        super().__init__(what, seen=seen, expected=expected, remedy=remedy)
        self.reward = reward


class ScoreError(MoerlError):
    """Failure of a scorer of tokens: it failed, or gave something that is not a finite number for each token."""


def told(error: MoerlError | OSError) -> MoerlError:
    """Returns the error as a process shows it: an error of the system that no other code caught gets the form of a
    `MoerlError`."""
    if isinstance(error, MoerlError):
        return error
    kind = "" if type(error) is OSError or error.filename is not None else f"{type(error).__name__}: "
    return MoerlError(
        f"the system refused {error.filename if error.filename is not None else 'what was asked'}",
        seen=f"{kind}{error.strerror or error}",
        expected="that it is done",
        remedy="make room, or mend what is named, and try again; --traceback shows where it was raised",
    )


class _Closable(Protocol):
    """Something that is closed once it is not needed any more."""

    def close(self) -> object: ...


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block fails or is interrupted. The error of the block is raised whatever `undo` does; an
    error of `undo` becomes a note of the block's: a disk that is full, or a process that is gone, fails both.

    `finally`, and `except` with a call and `raise`, would raise the later error instead; calls there must not fail
    (`tests/unit/test_endings.py`).
    """
    try:
        yield
    except BaseException as first:
        try:
            undo()
        except Exception as later:
            if isinstance(first, GeneratorExit):  # whose notes nobody sees
                raise
            note_later(first, later)
        raise


@contextmanager
def ending(end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` after the block, however the block ends; after an error as `undoing` does."""
    with undoing(end):
        yield
    end()


@contextmanager
def closing[T: _Closable](thing: T) -> Iterator[T]:
    """Closes a thing after the block, as `ending` does."""
    with ending(thing.close):
        yield thing


def note_later(first: BaseException, later: Exception) -> None:
    """Adds an error that came after another to the first as a note, unless both say the same."""
    text = str(later) if isinstance(later, MoerlError) else f"{type(later).__name__}: {later}"
    if str(later) != str(first):
        first.add_note(printable(f"and {text}"))
    for note in getattr(later, "__notes__", ()):
        first.add_note(note)
