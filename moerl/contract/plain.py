"""Any Python value as msgpack types and back: the form in which the quarantine writes a refused record.

A refused record may hold anything, so nothing here calls what a value itself defines but its `repr`, and that guarded.
What msgpack cannot hold becomes a map with the key `MARK`. Whatever is lost on the way (the class of a subclass,
objects without a plain form) is listed, by its place in the record. Any process.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

import numpy as np

MARK = "__moerl__"

_SCALARS = frozenset({type(None), bool, float, bytes})
_MAX_DEPTH = 100
_MAX_CONTAINERS = 1 << 21
"""Lists, maps and arrays of one record: a few that hold each other many times are more than memory holds."""
_MAX_NOTES = 100


_SHORT = reprlib.Repr(
    maxlevel=4,
    **dict.fromkeys(("maxtuple", "maxlist", "maxarray", "maxdict", "maxset", "maxfrozenset"), 16),
    **dict.fromkeys(("maxstring", "maxlong", "maxother"), 1 << 12),
)


def to_plain(value: object) -> tuple[Any, list[str]]:
    """Returns anything in msgpack types, and what of it is not there, as `place: what`.

    Texts, numbers, arrays, lists and maps are kept whole. Arrays, and all that msgpack cannot hold, are maps with the
    key `MARK`.
    """
    walk = _Walk()
    plain = walk.plain(value)
    notes = walk.notes[:_MAX_NOTES]
    if len(walk.notes) > _MAX_NOTES:
        notes.append(f"and {len(walk.notes) - _MAX_NOTES} more")
    return plain, notes


def safe_repr(value: object) -> str:
    """Returns the ASCII form of a value, cut if it is long or deep; if its repr raises, a text that says so."""
    try:
        text = _SHORT.repr(value)
    except Exception as error:  # noqa: BLE001 - a value may raise anything when it is looked at
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text.encode("ascii", "backslashreplace").decode()


def from_plain(value: Any) -> Any:
    """Restores a value that `to_plain` returned; one without a plain form becomes a map `{"repr": text}`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(MARK)
    if kind is None:
        return {name: from_plain(item) for name, item in value.items()}
    if kind == "array":
        dtype, shape = np.dtype(value["dtype"]), value["shape"]
        return np.frombuffer(value["data"], dtype).reshape(shape) if value["data"] else np.zeros(shape, dtype)
    if kind == "map":
        pairs = [(from_plain(key), from_plain(item)) for key, item in value["pairs"]]
        keys = [tuple(key) if isinstance(key, list) else key for key, _ in pairs]
        can_be_keys = all(isinstance(key, str | bytes | int | float | tuple | None) for key in keys)
        return dict(zip(keys, (item for _, item in pairs), strict=True)) if can_be_keys else pairs
    if kind == "integer":
        return int(value["hex"], 16)
    if kind == "text":
        return value["utf8"].decode(errors="surrogatepass")
    return {"repr": value["text"]}


class _Walk:
    """One walk over a value, with its place in the value, the containers around that place, and notes of what could not
    be kept."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._path: list[str] = []
        self._inside: set[int] = set()
        self._left = _MAX_CONTAINERS

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is str:
            return _text(value)
        if kind is int:
            return _integer(value)
        if issubclass(kind, str):
            if not issubclass(kind, StrEnum):
                self._note(f"{kind.__name__}, kept as text")
            return _text(str.__str__(value))
        if issubclass(kind, int):
            self._note(f"{kind.__name__}, kept as an integer")
            return _integer(int.__int__(value))
        if issubclass(kind, np.ndarray | np.generic):
            return self._array(value)
        if issubclass(kind, float):
            self._note(f"{kind.__name__}, kept as a float")
            return float.__float__(value)
        if issubclass(kind, bytes | bytearray):
            self._note(f"{kind.__name__}, kept as bytes")
            return bytes(memoryview(value))
        if issubclass(kind, dict | list | tuple) or is_dataclass(kind):
            return self._container(value, kind)
        return self._unknown(value)

    def _note(self, what: str) -> None:
        self.notes.append(f"{''.join(self._path).lstrip('.') or 'the record'}: {what}")

    @contextmanager
    def _at(self, place: str) -> Iterator[None]:
        self._path.append(place)
        yield
        self._path.pop()

    def _unknown(self, value: object) -> dict[str, str]:
        text = safe_repr(value)
        self._note(f"{type(value).__name__}, kept as text for people")
        return {MARK: "repr", "text": text}

    def _left_out(self, kind: type, why: str) -> dict[str, str]:
        self._note(f"{kind.__name__} {why}")
        return {MARK: "repr", "text": f"<{kind.__name__} {why}>"}

    def _container(self, value: Any, kind: type) -> Any:
        if id(value) in self._inside:
            return self._left_out(kind, "that holds itself")
        if len(self._inside) == _MAX_DEPTH:
            return self._left_out(kind, f"nested deeper than {_MAX_DEPTH}")
        self._left -= 1
        if self._left < 0:
            return self._left_out(kind, f"behind {_MAX_CONTAINERS} others")
        self._inside.add(id(value))
        try:
            return self._content(value, kind)
        finally:
            self._inside.discard(id(value))

    def _content(self, value: Any, kind: type) -> Any:
        if issubclass(kind, dict):
            if kind is not dict:
                self._note(f"{kind.__name__}, kept as a map")
            return self._map(list(dict.items(value)))
        if issubclass(kind, list | tuple):
            if kind is not list and kind is not tuple:
                self._note(f"{kind.__name__}, kept as a list")
            base = list if issubclass(kind, list) else tuple
            return self._list(list(base.__iter__(value)))
        present = [(each.name, getattr(value, each.name, _ABSENT)) for each in fields(kind)]
        if any(item is _ABSENT for _, item in present):
            self._note(f"{kind.__name__} without some of its fields")
        return self._map([(name, item) for name, item in present if item is not _ABSENT])

    def _list(self, items: list[Any]) -> list[Any]:
        kinds = set(map(type, items))
        # Numbers by the million are not looked at one by one.
        if kinds <= {float, bool} or (kinds == {int} and min(items) >= -(2**63) and max(items) < 2**64):
            return items
        plain = []
        for index, item in enumerate(items):
            with self._at(f"[{index}]"):
                plain.append(self.plain(item))
        return plain

    def _map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        is_plain = all(type(key) is str and key != MARK and _encodes(key) for key, _ in pairs)
        items = []
        for key, item in pairs:
            with self._at(f".{key}" if is_plain and not self._path else f"[{safe_repr(key)}]"):
                items.append((key if is_plain else self.plain(key), self.plain(item)))
        return dict(items) if is_plain else {MARK: "map", "pairs": items}

    def _array(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, np.generic):
            item = value.item()
            return item if type(item) in (bool, int, float) else self._bytes(np.asarray(value))
        if kind is not np.ndarray:
            self._note(f"{kind.__name__}, kept as an array")
        base = np.ndarray.view(value, np.ndarray)
        if base.dtype.char == "O":
            self._note(f"array of objects {base.shape}, kept as a list")
            return self._container(base.reshape(-1).tolist(), list)
        return self._bytes(base)

    def _bytes(self, array: np.ndarray) -> Any:
        """Returns raw bytes with dtype and shape; without a copy if the array is contiguous."""
        if array.dtype.hasobject:
            return self._unknown(array)
        if array.dtype.names:
            self._note(f"fields {array.dtype.names}, kept as bytes")
        flat = np.ascontiguousarray(array).reshape(-1)
        data = memoryview(flat.view(np.uint8)) if flat.nbytes else b""
        return {MARK: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": data}


_ABSENT = object()


def _text(value: str) -> Any:
    return value if _encodes(value) else {MARK: "text", "utf8": value.encode(errors="surrogatepass")}


def _integer(value: int) -> Any:
    return value if -(2**63) <= value < 2**64 else {MARK: "integer", "hex": hex(value)}


def _encodes(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
