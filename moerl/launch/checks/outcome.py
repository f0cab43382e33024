"""Outcome of one look. Imports nothing of the other modules of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moerl.errors import MoerlError
from moerl.printable import printable

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")
"""In order, the worst last."""


@dataclass(frozen=True, slots=True)
class Check:
    """One look.

    level: green = as it should be; yellow = a run works, and something is worth knowing; red = a run fails or cannot be
    trusted. remedy: what to do, empty where it is green.
    """

    area: str
    name: str
    level: Level
    seen: str
    expected: str = ""
    remedy: str = ""


def green(area: str, name: str, seen: str) -> Check:
    """All is well."""
    return Check(area, name, "green", printable(seen))


def fault(level: Level, area: str, name: str, error: MoerlError) -> Check:
    """Makes the outcome of a look from the error that it raised."""
    seen = error.what if error.seen is None else f"{error.what}: {error.seen}"
    return Check(area, name, level, seen, error.expected or "", error.remedy or "mend what is named")


def worst(checks: Iterable[Check]) -> Level:
    """The worst level, green of none."""
    levels = [check.level for check in checks]
    return "red" if "red" in levels else "yellow" if "yellow" in levels else "green"
