"""Lengths of responses that were admitted against lengths of those that were trained.

Whatever leaves admitted responses out (filters, `rl.keep`, age) may prefer short ones or long ones, and the policy
learns that preference. Pure; runs in the controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

WINDOW = 4096
"""Latest responses of each kind that are compared."""
MIN_RESPONSES = 256
"""Fewest responses for a warning: by chance alone two samples of this size differ by 0.12 once in twenty times."""
FAR = 0.15
"""Distance above which there is a warning."""


class Lengths:
    """The latest lengths, in tokens, of responses offered to training and of those that were trained."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._trained: deque[int] = deque(maxlen=WINDOW)
        self._has_warned = False

    def offer(self, number: int, lengths: Iterable[int]) -> None:
        """Adds the lengths of the admitted responses of a group, trained later or not. number: the group's."""
        self._offered.extend((number, length) for length in lengths)

    def train(self, lengths: Iterable[int]) -> None:
        """Adds the lengths of the responses in a batch."""
        self._trained.extend(lengths)

    @property
    def distance(self) -> float:
        """Largest difference of the two distribution functions (Kolmogorov-Smirnov), 0 to 1; 0 before there is data."""
        if not self._offered or not self._trained:
            return 0.0
        lengths = (length for _, length in self._offered), self._trained
        offered, trained = (np.sort(np.fromiter(each, np.int64)) for each in lengths)
        at = np.union1d(offered, trained)
        shares = (np.searchsorted(each, at, side="right") / len(each) for each in (offered, trained))
        return float(np.abs(np.subtract(*shares)).max())

    def warn(self, notify: Callable[[str], None]) -> None:
        """Says a warning the first time that `distance` is above `FAR` over `MIN_RESPONSES` or more."""
        has_few = min(len(self._offered), len(self._trained)) < MIN_RESPONSES
        if self._has_warned or has_few or self.distance <= FAR:
            return
        self._has_warned = True
        notify(
            "WARNING: responses that are trained differ in length from those that were sampled (lengths/distance"
            f" {self.distance:.2f}): what rl.filters, rl.keep and quarantine leave out biases the policy"
        )

    def metrics(self) -> dict[str, float]:
        """Returns metrics for a run's log, by the names of docs/metrics.md; call it after the first batch."""
        return {
            "lengths/offered_mean": float(np.mean([length for _, length in self._offered])),
            "lengths/trained_mean": float(np.mean(self._trained)),
            "lengths/distance": self.distance,
        }

    def snapshot(self, open_numbers: Iterable[int]) -> dict[str, Any]:
        """Returns plain JSON.

        Args:
            open_numbers: numbers of groups that are asked for again after a resume, and offer their lengths again.
        """
        again = set(open_numbers)
        offered = [length for number, length in self._offered if number not in again]
        return {"offered": offered, "trained": list(self._trained), "warned": self._has_warned}

    @classmethod
    def restored(cls, snapshot: Mapping[str, Any]) -> Lengths:
        """Returns the lengths of a checkpoint; none if it has none."""
        lengths = cls()
        if snapshot:
            # Groups that are settled are not asked for again: their numbers do not matter.
            lengths.offer(-1, snapshot["offered"])
            lengths.train(snapshot["trained"])
            lengths._has_warned = snapshot["warned"]
        return lengths
