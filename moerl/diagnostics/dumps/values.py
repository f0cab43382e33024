"""Values of strangers' files as arrays: types, sizes and ranges are checked, nothing is repaired. numpy only.

Lists come from JSON, Arrow or a loaded checkpoint; arrays from the latter two. No list is handed to numpy before its
elements are known to be plain numbers: lists that hold each other would otherwise grow without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 22
"""Most tokens of one rollout."""

MAX_IDS = 1 << 28
"""Most expert ids, or ids of kept sets, of one rollout."""

_MAX_LISTED = 1 << 26
"""The same for ids that come in lists of lists."""

MAX_INT = (1 << 31) - 1
_MAX_SHOWN = 60


class RowError(Exception):
    """A row that cannot be used. reason: short, without numbers. seen: the value found instead."""

    def __init__(self, reason: str, seen: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.seen = shown(seen)


def shown(value: object) -> str:
    """Returns a value in at most a few dozen characters; of values that may be large, type and length."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, str | bytes | int | float | None):
        text = value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value
        if isinstance(text, int) and abs(text) > 10**30:
            return "an integer of more than 30 digits"
        return repr(text)[: _MAX_SHOWN + 3]
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def ints(value: object, name: str, *, most: int = MAX_TOKENS, least: int = 0) -> NDArray[np.int32]:
    """Returns int32 [n] of a list or array of integers in [least, 2^31). Raises `RowError`."""
    return in_range(_array(value, name, most, "integer", "iu", np.int64), name, least)


def in_range(array: NDArray[Any], name: str, least: int = 0) -> NDArray[np.int32]:
    """Returns the integers as int32. Raises `RowError` for one that is not in [least, 2^31)."""
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < least or high > MAX_INT:
            wrong = low if low < least else high
            raise RowError(f"{name}: an id is out of range", wrong)
    return array.astype(np.int32)


def floats(value: object, name: str, *, most: int = MAX_TOKENS) -> NDArray[np.float32]:
    """Returns float32 [n] of a list or array of numbers, not finite ones too. Raises `RowError`."""
    array = _array(value, name, most, "number", "fiu", np.float64)
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def flags(value: object, name: str, *, most: int = MAX_TOKENS) -> NDArray[np.bool_]:
    """Returns bool [n] of a list or array of booleans, or of numbers that are 0 or 1. Raises `RowError`."""
    array = _one_dimension(value, name, most)
    if isinstance(array, list):
        is_sound = set(map(type, array)) <= {bool, int, float} and all(each in (0, 1) for each in array)
    else:
        is_sound = array.dtype.kind in "biuf" and bool(np.isin(array, (0, 1)).all())
    if not is_sound:
        raise RowError(f"{name}: not all are 0 or 1", value)
    return np.array(array, np.bool_)


def routes(value: object, name: str) -> NDArray[np.int32]:
    """Returns int32 [R, L, K] of an array, or of lists of lists of lists; negative ids stay. Raises `RowError`."""
    if isinstance(value, np.ndarray):
        if value.ndim != 3 or value.dtype.kind not in "iu" or value.size > MAX_IDS:
            raise RowError(f"{name}: not rows of layers of ids", value)
        return in_range(value, name, -MAX_INT)
    rows = _lists(value, name, MAX_TOKENS)
    layers = _children(rows, name)
    ids = _children(layers, name)
    shape = (len(rows), *(len(each[0]) if each else 0 for each in (rows, layers)))
    return ints(ids, name, most=MAX_IDS, least=-MAX_INT).reshape(shape)


def flat_routes(value: object, name: str, num_layers: int, experts_per_token: int) -> NDArray[np.int32]:
    """Returns int32 [R, L, K] of flat ids. Raises `RowError` if they do not divide into rows."""
    ids = ints(value, name, most=MAX_IDS, least=-MAX_INT)
    width = num_layers * experts_per_token
    if width == 0 or len(ids) % width:
        raise RowError(f"{name}: ids do not divide into rows", f"{len(ids)} ids, {num_layers} x {experts_per_token}")
    return ids.reshape(-1, num_layers, experts_per_token)


def integer(value: object, name: str, *, least: int = 0) -> int:
    """Returns one integer in [least, 2^31); 3.0 is one: pandas writes it so if another is missing. Raises
    `RowError`."""
    value = _plain(value, "iu")
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_INT:
        raise RowError(f"{name}: not an integer in range", value)
    return value


def _plain(value: object, kinds: str) -> object:
    """Returns the Python value of a number of numpy's whose dtype is of these kinds, and all else as it is."""
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 and value.dtype.kind in kinds:
        return value.item()
    return value


_LARGEST = float(np.finfo(np.float32).max)  # compares with integers of any size


def number(value: object, name: str) -> float:
    """Returns one finite number. Raises `RowError`."""
    value = _plain(value, "fiu")
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # pyright: ignore[reportArgumentType]
        raise RowError(f"{name}: not a finite number", value)
    return float(value)  # pyright: ignore[reportArgumentType]


def text(value: object, name: str) -> str:
    """Returns a text, or the decimal of an integer; empty for None. Raises `RowError`."""
    if value is None:
        return ""
    if isinstance(value, np.integer):
        value = int(value)
    if type(value) is int:
        return str(integer(value, name, least=-MAX_INT))
    if not isinstance(value, str):
        raise RowError(f"{name}: not a text", value)
    return value


def _array(value: object, name: str, most: int, what: str, kinds: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Returns a list of plain numbers as this dtype, or an array whose dtype is of these kinds as it is. what: one of
    the numbers, "integer" or "number"."""
    array = _one_dimension(value, name, most)
    if isinstance(array, list):
        is_sound = set(map(type, array)) <= ({int} if what == "integer" else {int, float})
    else:
        is_sound = array.dtype.kind in kinds
    if not is_sound:
        raise RowError(f"{name}: not all are {what}s", value)
    try:
        return np.array(array, dtype) if isinstance(array, list) else array
    except OverflowError as error:
        raise RowError(f"{name}: {'an' if what == 'integer' else 'a'} {what} is too large", value) from error


def _one_dimension(value: object, name: str, most: int) -> list[Any] | NDArray[Any]:
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise RowError(f"{name}: not one list", value)
    elif isinstance(value, tuple):
        value = list(value)
    elif not isinstance(value, list):
        raise RowError(f"{name}: missing" if value is None else f"{name}: not a list", value)
    if len(value) > most:
        raise RowError(f"{name}: too many", value)
    return value


def _lists(value: object, name: str, most: int) -> list[Any]:
    array = _one_dimension(value, name, most)
    if not isinstance(array, list):
        raise RowError(f"{name}: not rows of layers of ids", value)
    return array


def _children(parents: Sequence[object], name: str) -> list[Any]:
    """Returns the elements of lists that are all equally long."""
    lists = [_lists(each, name, MAX_TOKENS) for each in parents]
    lengths = {len(each) for each in lists}
    if len(lengths) > 1:
        raise RowError(f"{name}: rows are not equally long", f"{min(lengths)} to {max(lengths)}")
    if sum(map(len, lists)) > _MAX_LISTED:
        raise RowError(f"{name}: too many", f"{sum(map(len, lists))} ids")
    return list(chain.from_iterable(lists))
