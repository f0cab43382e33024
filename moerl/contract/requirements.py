"""Requirements on single values: of exactly the expected type, in range, text that travels.

A subclass is refused: it may compare, hash or print as it likes, and no format we write keeps it. For the same reason
nothing here calls what a value itself defines, not even for a message. Any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.reasons import Reason
from moerl.errors import ContractError

MAX_TEXT_BYTES = 4096
"""Longest id or name, as UTF-8."""

MAX_NAMES = 64
"""Most rewards, timings or scores of a trajectory."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_INTEGERS = (int, *{np.dtype(code).type for code in "bBhHiIlLqQ"})
_NUMBERS = (*_INTEGERS, float, *{np.dtype(code).type for code in "efd"})
_SHOWN_BITS = 256


def is_int(value: object) -> bool:
    """Returns True for Python and numpy integers, not for booleans."""
    return type(value) in _INTEGERS


def is_number(value: object) -> bool:
    """Returns True for integers and for floats that float64 holds."""
    return type(value) in _NUMBERS


def is_finite(value: Any) -> bool:
    """Returns True for a number that float64 holds."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def shown(value: object) -> str:
    """Returns a value for a message: the value itself if it is short and safe to write, otherwise its type."""
    if type(value) is int and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str and len(value) > MAX_TEXT_BYTES:
        return f"a text of {len(value)} characters"
    if value is None or type(value) in (bool, str, *_NUMBERS):
        return ascii(value)
    return f"a value of type {type(value).__name__}"


def require(holds: object, reason: Reason, field: str, seen: object, expected: object, **others: str) -> None:
    """Raises `ContractError` unless a requirement holds. others: `remedy`, if it is not the usual one."""
    if not holds:
        raise ContractError(reason, field=field, seen=seen, expected=expected, **others)


def require_type(value: object, kind: type, name: str) -> None:
    """Raises `wrong_type` for anything but a `kind` itself; a dataclass must have all its fields."""
    require(type(value) is kind, Reason.WRONG_TYPE, name, type(value).__name__, kind.__name__)
    take_fields = _field_getter(kind)
    if take_fields is None:
        return
    try:
        take_fields(value)
    except AttributeError as error:
        raise ContractError(
            Reason.WRONG_TYPE, field=name, seen=f"{kind.__name__} without some of its fields", expected=kind.__name__
        ) from error


@cache
def _field_getter(kind: type) -> Callable[[Any], Any] | None:
    """Takes all fields of an instance of a dataclass; None for other types."""
    return attrgetter(*(field.name for field in fields(kind))) if is_dataclass(kind) else None


def require_range(value: Any, low: int, high: int, name: str, reason: Reason = Reason.VALUE_OUT_OF_RANGE) -> None:
    """Raises `reason` for anything but a Python integer in [low, high]."""
    inside = type(value) is int and low <= value <= high
    require(inside, reason, name, shown(value), f"an integer in [{low}, {high}]")


def require_text(value: object, name: str) -> None:
    """Raises `wrong_type`, `text_not_utf8` or `text_too_long`."""
    require_type(value, str, name)
    try:
        size = len(str(value).encode())
    except UnicodeEncodeError as error:
        raise ContractError(
            Reason.TEXT_NOT_UTF8, field=name, seen=shown(value), expected="text that UTF-8 can encode"
        ) from error
    require(size <= MAX_TEXT_BYTES, Reason.TEXT_TOO_LONG, name, f"{size} bytes", f"at most {MAX_TEXT_BYTES} bytes")


def refuse_where(field: str, values: NDArray[Any], *rules: tuple[NDArray[np.bool_], Reason, str]) -> None:
    """Raises `ContractError` for the first rule that `values` break; it names the first such index, and how many there
    are.

    Args:
        rules: for each the places that break it, its reason, and the values that are expected there.
    """
    for bad, reason, expected in rules:
        if not np.count_nonzero(bad):  # several times faster than any() for short arrays
            continue
        index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        where = index[0] if len(index) == 1 else index
        seen = f"{values[index]} at index {where} ({int(bad.sum())} of {bad.size} wrong)"
        raise ContractError(reason, field=field, seen=seen, expected=expected)


def require_scores(scores: Mapping[str, object], names: Iterable[str]) -> None:
    """Raises `ContractError` for the first of `names` under which a trajectory has no side scores."""
    for name in names:
        if name not in scores:
            raise ContractError(
                Reason.MISSING_FIELD,
                field=f"scores[{name!r}]",
                seen=", ".join(scores) or "no scores",
                expected="a number for each token, which the algorithm needs (algorithm.scores)",
                remedy="write the dump with a column of these scores, or take the name out of algorithm.scores",
            )
