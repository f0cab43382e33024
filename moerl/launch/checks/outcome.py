"""Outcome of one look. Imports nothing of the other modules of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moerl.errors import MoerlError
from moerl.printable import printable

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")
"""All levels, the worst last."""


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one look."""

    area: str
    """Group of looks that it is shown with."""
    name: str
    """Name of the look within its area."""
    level: Level
    """green = as it should be; yellow = a run works, and something is worth knowing; red = a run fails or cannot be
    trusted."""
    seen: str
    """State that the look found."""
    expected: str = ""
    """State that would be green; empty if it is."""
    remedy: str = ""
    """Advice to the user; empty if it is green."""


def green(area: str, name: str, seen: str) -> Check:
    """Makes the outcome of a look that found all well."""
    return Check(area, name, "green", printable(seen))


def fault(level: Level, area: str, name: str, error: MoerlError) -> Check:
    """Makes the outcome of a look from the error that it raised."""
    seen = error.what if error.seen is None else f"{error.what}: {error.seen}"
    return Check(area, name, level, seen, error.expected or "", error.remedy or "mend what is named")


def worst(checks: Iterable[Check]) -> Level:
    """Returns the worst level; green for no checks."""
    levels = [check.level for check in checks]
    return "red" if "red" in levels else "yellow" if "yellow" in levels else "green"
