"""Values and exceptions as JSON, between the process of a program and that of its tests. Runs in the sandbox, in both.

Values of the types here cross as copies: what the reader gets is made by the reader, of Python's own types, and holds
nothing of the writer's. Anything else crosses as the reader and the writer agree (`Export`, `Import`);
of an exception its classes, from the most special one on, and its arguments.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Wire = Any
"""JSON: None, a boolean, a number, a text, or a list whose first item is a tag."""

Export = Callable[[Any], Wire]
"""Gives the wire form of an object that does not cross as a copy."""

Import = Callable[[list[Any]], Any]
"""Gives the object of a wire form that `Export` gave. Raises `ValueError` if there is none."""

_MAX_PLAIN_INT = 1 << 53


def _range(text: str) -> range:
    return range(*map(int, text.split()))


def _timedelta(text: str) -> timedelta:
    return timedelta(*map(int, text.split()))


_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("int", hex, lambda text: int(text, 16)),
    complex: ("complex", repr, complex),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    range: ("range", lambda value: f"{value.start} {value.stop} {value.step}", _range),
    Decimal: ("decimal", str, Decimal),
    Fraction: ("fraction", str, Fraction),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    timedelta: ("timedelta", lambda value: f"{value.days} {value.seconds} {value.microseconds}", _timedelta),
}
_SEQUENCES: dict[type, tuple[str, Callable[[Iterable[Any]], Any]]] = {
    list: ("list", list),
    tuple: ("tuple", tuple),
    set: ("set", set),
    frozenset: ("frozenset", frozenset),
    deque: ("deque", deque),
}
_MAPPINGS: dict[type, tuple[str, Callable[[Iterable[tuple[Any, Any]]], Any]]] = {
    dict: ("dict", dict),
    # Its factory does not cross.
    defaultdict: ("dict", dict),
    OrderedDict: ("ordered", OrderedDict),
    Counter: ("counter", lambda pairs: Counter(dict(pairs))),
}
_FROM_TEXT = {tag: read for tag, _, read in _TEXTS.values()}
_FROM_SEQUENCE = dict(_SEQUENCES.values())
_FROM_MAPPING = dict(_MAPPINGS.values())


def encode(value: Any, export: Export) -> Wire:
    """Returns the wire form of a value.

    Raises:
        RecursionError: the value is too deep, or holds itself.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < _MAX_PLAIN_INT):
        return value
    if kind in _TEXTS:
        tag, write, _ = _TEXTS[kind]
        return [tag, write(value)]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind][0], *(encode(each, export) for each in value)]
    if kind in _MAPPINGS:
        pairs = value.items()
        return [_MAPPINGS[kind][0], *([encode(key, export), encode(each, export)] for key, each in pairs)]
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind in "biufcU":
            return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]
        if value.shape == () and kind.__name__ != "ndarray":
            return encode(value.item(), export)
    return export(value)


def decode(wire: Wire, import_object: Import) -> Any:
    """Returns the value of a wire form.

    Raises:
        ValueError, TypeError, ArithmeticError, RecursionError: `wire` is no wire form.
    """
    if wire is None or isinstance(wire, bool | int | float | str):
        return wire
    if not isinstance(wire, list) or not wire:
        raise ValueError("a value that is no wire form")
    tag, content = wire[0], wire[1:]
    if not isinstance(tag, str):
        raise ValueError("a tag that is no text")
    if tag in _FROM_TEXT:
        [text] = content
        if not isinstance(text, str):
            raise ValueError("a text that is none")
        return _FROM_TEXT[tag](text)
    if tag in _FROM_SEQUENCE:
        return _FROM_SEQUENCE[tag]([decode(each, import_object) for each in content])
    if tag in _FROM_MAPPING:
        return _FROM_MAPPING[tag]([(decode(key, import_object), decode(each, import_object)) for key, each in content])
    if tag == "array":
        return _array(*content)
    return import_object(wire)


def _array(dtype: str, shape: list[int], data: str) -> Any:
    import numpy as np  # seconds on a cold disk, and few programs use it

    if not re.fullmatch(r"[<>|][biufcU]\d{1,9}", dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array of an unknown form")
    found = np.frombuffer(bytes.fromhex(data), np.dtype(dtype)).reshape(shape).copy()
    return found if shape else found[()]


def update(old: Any, new: Any) -> Any:
    """Makes a container equal to its newer copy, in place, and the containers in it likewise.

    Returns:
        The old object; the new one if the old one cannot be changed.
    """
    kind = type(old)
    if kind is not type(new):
        return new
    if kind in (list, deque):
        pairs = zip(list(old), list(new), strict=False)
        items = [update(*pair) for pair in pairs] + list(new)[len(old) :]
        old.clear()
        old.extend(items)
    elif kind in (dict, OrderedDict, Counter):
        items = {key: update(old[key], each) if key in old else each for key, each in new.items()}
        old.clear()
        old.update(items)
    elif kind is set:
        old.clear()
        old.update(new)
    elif kind is bytearray:
        old[:] = new
    elif kind is tuple:
        items = tuple(update(*pair) for pair in zip(old, new, strict=False)) + new[len(old) :]
        return old if len(items) == len(old) and all(a is b for a, b in zip(items, old, strict=True)) else items
    elif kind.__module__ == "numpy" and getattr(old, "shape", ()) != () and old.shape == new.shape:
        old[...] = new
    else:
        return new
    return old


def describe_class(kind: type, number_of: Callable[[Any], int]) -> list[Wire]:
    """Returns the classes of an exception class, the most special one first: module and name of those of Python;
    nothing, the name and the number of those of the program."""
    found: list[Wire] = []
    for each in kind.__mro__:
        if each is object:
            continue
        module = each.__module__
        if module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names:
            found.append([module, each.__qualname__])
        else:
            found.append(["", each.__name__, number_of(each)])
    return found


def describe(error: BaseException, number_of: Callable[[Any], int], export: Export) -> list[Wire]:
    """Returns the answer that says what was raised."""
    try:
        arguments = encode(list(error.args), export)
    except Exception:  # noqa: BLE001 - process boundary: a program's objects can raise anything
        arguments = ["list"]
    return ["raise", describe_class(type(error), number_of), arguments, number_of(error)]


def python_class(module: Any, name: Any) -> type[BaseException] | None:
    """Returns an exception class of Python that this process has imported already; None if it has not."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
