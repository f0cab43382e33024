"""Time limits of replies, and the error to raise for those of several ranks. Runs in the controller and in actors."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.errors import MoerlError, UnprovedError

GRACE_SECONDS = 10.0
"""Seconds for the replies of the other ranks, once one has failed: most errors are raised by all of them."""
CLOSING_SECONDS = 90.0
"""Seconds for a rank to end after its last reply."""


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
