"""Errors among the replies of all ranks to a command. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.contract.commands import Reply
from moerl.errors import MoerlError, TrainerError, UnprovedError

GRACE_SECONDS = 10.0
"""Seconds for the replies of the other ranks, once one has failed: most errors are raised by all of them."""
CLOSING_SECONDS = 90.0
"""Seconds for a rank to end after its last reply."""


def check_replies(replies: Sequence[Reply], command: str) -> None:
    """Raises the first error of the ranks, if any of them failed. replies: in rank order."""
    failures = [(rank, reply.failure) for rank, reply in enumerate(replies) if reply.failure is not None]
    if failures:
        raise first_error([failure.error(rank, command) for rank, failure in failures])


def lost(rank: int, command: str, seen: str, expected: str) -> TrainerError:
    """Returns the error of a rank that is gone or silent."""
    return TrainerError(
        f"rank {rank} of the trainer was lost in {command!r}",
        seen=seen,
        expected=expected,
        remedy="correct the cause and go on from the last checkpoint; the other ranks were ended",
    )


def ranks_have_ended() -> TrainerError:
    """Returns the error of a command to ranks that have ended."""
    return TrainerError("the ranks of the trainer have ended", remedy="see the error before this one")


def first_error(errors: Sequence[MoerlError]) -> MoerlError:
    """Returns the error to raise for those of several ranks: the first that is no failed proof; else of the failed
    proofs one that says what was seen, with the first microbatch of all."""
    unproved = [error for error in errors if isinstance(error, UnprovedError)]
    if len(unproved) < len(errors):
        return next(error for error in errors if not isinstance(error, UnprovedError))
    numbers = [error.microbatch for error in unproved if error.microbatch >= 0]
    telling = next((error for error in unproved if error.seen), unproved[0])
    telling.microbatch = min(numbers, default=-1)
    return telling
