"""How fuzzed inputs come about: damage to bytes, changes to documents, and objects of every odd kind. Seeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from moerl.contract.trajectory import KeptSets, Lineage, SamplingParams, Turn, TurnKind

Rng = np.random.Generator


def chance(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def choice(rng: Rng, items: Sequence[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def damaged(rng: Rng, data: bytes) -> bytes:
    """Bytes as a disk or a network may spoil them: never the same as before."""
    spoil = choice(rng, _DAMAGE)
    while (broken := spoil(rng, data)) == data:
        spoil = _flip
    return broken


def _flip(rng: Rng, data: bytes) -> bytes:
    broken = bytearray(data)
    for bit in rng.integers(0, 8 * len(data), int(rng.integers(1, 4))).tolist():
        broken[bit // 8] ^= 1 << bit % 8
    return bytes(broken)


def _cut(rng: Rng, data: bytes) -> bytes:
    return data[: int(rng.integers(len(data)))]


def _grow(rng: Rng, data: bytes) -> bytes:
    more = rng.bytes(int(rng.integers(1, 50)))
    return data + more if chance(rng, 0.7) else more + data


def _span(rng: Rng, data: bytes) -> tuple[int, int]:
    start = int(rng.integers(len(data)))
    return start, min(len(data), start + int(rng.integers(1, 64)))


def _lose(rng: Rng, data: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:start] + data[end:]


def _repeat(rng: Rng, data: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:end] + data[start:end] + data[end:]


def _overwrite(rng: Rng, data: bytes) -> bytes:
    start, end = _span(rng, data)
    fill = choice(rng, [b"\0", b"\xff", b"\x7f"]) * (end - start) if chance(rng, 0.5) else rng.bytes(end - start)
    return data[:start] + fill + data[end:]


def _move(rng: Rng, data: bytes) -> bytes:
    start, end = _span(rng, data)
    rest = data[:start] + data[end:]
    to = int(rng.integers(len(rest) + 1))
    return rest[:to] + data[start:end] + rest[to:]


_DAMAGE: list[Callable[[Rng, bytes], bytes]] = [_flip, _flip, _flip, _cut, _grow, _lose, _repeat, _overwrite, _move]

PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 0.5, 1.0, -1e300, 1e-320, float("inf"), float("-inf"), float("nan"),
    "", "a", "stop", "prompt", "sampled", "é" * 5, "a" * 5000, "\x00", "\u202e", "reward", b"", b"\0", b"\xff" * 32,
    [], [0], [[]], {}, {"a": 1}, {"": None}, [None] * 40,
]  # fmt: skip
"""Values that msgpack can have."""


def changed(rng: Rng, document: Any) -> Any:
    """A document with one value, key or element changed, somewhere."""
    if isinstance(document, dict) and document and chance(rng, 0.85):
        document = dict(document)
        key = choice(rng, list(document))
        how = rng.random()
        if how < 0.75:
            document[key] = changed(rng, document[key])
        elif how < 0.85:
            del document[key]
        else:
            document[choice(rng, ["", "a", key + "x", key[::-1], "spec", "routing"])] = document[key]
        return document
    if isinstance(document, list) and document and chance(rng, 0.85):
        document = list(document)
        index = int(rng.integers(len(document)))
        how = rng.random()
        if how < 0.7:
            document[index] = changed(rng, document[index])
        elif how < 0.8:
            del document[index]
        else:
            document[index:index] = [document[index]] * int(rng.integers(1, 12))
        return document
    if isinstance(document, bytes) and document and chance(rng, 0.8):
        return damaged(rng, document)
    if isinstance(document, int) and not isinstance(document, bool) and chance(rng, 0.6):
        return max(-(2**63), min(2**64 - 1, document + choice(rng, [-1, 1, -8, 8, 1 << 16, -(1 << 16), 1 << 33])))
    return choice(rng, PLAIN)


def doubled_key(rng: Rng, document: Any) -> bytes:
    """A document in which a pair of one of its maps stands twice."""

    def encode(value: Any, hit: bool) -> bytes:
        if isinstance(value, dict) and value:
            keys = list(value)
            down = [key for key in keys if isinstance(value[key], dict | list) and value[key]] if hit else []
            into = choice(rng, down) if down and chance(rng, 0.6) else None
            pairs = [msgspec.msgpack.encode(key) + encode(value[key], hit and key == into) for key in keys]
            pairs += [choice(rng, pairs)] if hit and into is None else []
            return b"\xdf" + len(pairs).to_bytes(4, "big") + b"".join(pairs)
        if isinstance(value, list) and value:
            index = int(rng.integers(len(value)))
            return (
                b"\xdd"
                + len(value).to_bytes(4, "big")
                + b"".join(encode(item, hit and i == index) for i, item in enumerate(value))
            )
        return msgspec.msgpack.encode(value)

    return encode(document, True)


def bomb(rng: Rng, document: Any, num_bytes: int) -> Any:
    """A document about `num_bytes` large: many elements, many names or long ones at a place where there are some."""
    document = dict(document)
    key = choice(rng, list(document))
    value = document[key]
    if isinstance(value, dict) and value and chance(rng, 0.7):
        document[key] = bomb(rng, value, num_bytes)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and chance(rng, 0.5):
        document[key] = [bomb(rng, value[0], num_bytes), *value[1:]]
    elif isinstance(value, list):
        item = value[0] if value else {}
        document[key] = [item] * (num_bytes // max(1, len(msgspec.msgpack.encode(item))))
    elif isinstance(value, bytes):
        document[key] = choice(rng, [b"\0", b"\x01\0\0\0", b"\xff"]) * (num_bytes // 4)
    elif isinstance(value, str):
        document[key] = "\x01" * num_bytes
    else:
        count = int(num_bytes ** rng.random())
        document[key] = {f"{i:x}": choice(rng, [1, 0.5, b"", "a"]) for i in range(min(count, 200_000))}
    return document


class Opaque:
    """Says nothing of itself without an error."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("no")

    __repr__ = __str__ = __hash__ = __eq__ = __len__ = __iter__ = __bool__ = __int__ = __float__ = _refuse  # pyright: ignore


class Text(str):
    __slots__ = ()
    __repr__ = __str__ = __hash__ = __eq__ = encode = Opaque._refuse  # pyright: ignore


class Whole(int):
    __repr__ = __str__ = __index__ = __eq__ = __hash__ = Opaque._refuse  # pyright: ignore


class Table(dict[Any, Any]):
    __repr__ = __iter__ = __len__ = keys = items = Opaque._refuse  # pyright: ignore


class Array(np.ndarray):
    __repr__ = __str__ = tobytes = Opaque._refuse  # pyright: ignore


def _loop() -> Any:
    inner: dict[Any, Any] = {}
    inner["again"] = [inner, inner]
    return inner


def _deep() -> Any:
    value: Any = []
    for _ in range(1500):
        value = [value]
    return value


_DTYPES = ["i4", ">i4", "f4", "?", "V0", "U3"]
_ODD: list[Callable[[Rng], Any]] = [
    lambda rng: choice(rng, PLAIN),
    lambda rng: choice(rng, PLAIN),
    lambda rng: Opaque(),
    lambda rng: Text("secret"),
    lambda rng: Whole(5),
    lambda rng: Table(a=1),
    lambda rng: np.arange(8, dtype=np.int32).view(Array),
    lambda rng: choice(rng, [-1, 1]) * 10**5000,
    lambda rng: choice(rng, ["\ud800", "a\udfff", "\ud800\udc00"]),
    lambda rng: bytearray(b"x"),
    lambda rng: _loop(),
    lambda rng: _deep(),
    lambda rng: np.ma.masked_array([1, 2], [True, False]),
    lambda rng: np.array([Opaque(), None, "x"], object),
    lambda rng: np.array(["2026-01-01"], "M8[D]"),
    lambda rng: np.zeros(2, [("a", "i4"), ("b", "f8")]),
    lambda rng: choice(rng, [np.longdouble(1), np.complex128(1j), np.str_("x")]),
    lambda rng: choice(rng, [np.int8(3), np.bool_(True), np.float16(2)]),
    lambda rng: {choice(rng, [b"\xff", ("a", 2), Opaque, "\ud800", 1, "1", None, 0.5]): i for i in range(3)},
    lambda rng: {"__moerl__": choice(rng, ["array", "map", "text", "integer"]), "dtype": "nonsense"},
    lambda rng: object.__new__(choice(rng, [Lineage, KeptSets, Turn, SamplingParams])),
    lambda rng: choice(rng, [Opaque, int, len, ..., {1, 2}, frozenset({"a"}), range(5), memoryview(b"ab")]),
    lambda rng: KeptSets(odd(rng), odd(rng)),
    lambda rng: (Turn(odd(rng), odd(rng), odd(rng), odd(rng)),),
    lambda rng: (Turn(0, 8, TurnKind.SAMPLED, SamplingParams(odd(rng), odd(rng), odd(rng), odd(rng), odd(rng))),),
    lambda rng: np.zeros(tuple(rng.integers(0, 4, int(rng.integers(0, 4)))), choice(rng, _DTYPES)),
]  # fmt: skip


def odd(rng: Rng) -> Any:
    """Any Python value; each time a fresh one."""
    return choice(rng, _ODD)(rng)


def odd_values(rng: Rng, values: dict[str, Any]) -> dict[str, Any]:
    """Field values of a trajectory, arrays copied by the caller, with one to three of them changed or replaced."""
    values = dict(values)
    for _ in range(int(rng.integers(1, 4))):
        name = choice(rng, list(values))
        how = rng.random()
        if how < 0.1:
            del values[name]
        elif how < 0.14:
            values[choice(rng, ["surprise", "", "\ud800", "token_idz"])] = odd(rng)
        elif how < 0.3:
            values[name] = odd(rng)
        else:
            values[name] = _bent(rng, values[name])
        if not values:
            break
    return values


def _bent(rng: Rng, value: Any) -> Any:
    """A value of the same kind, a little wrong or a little different."""
    if isinstance(value, np.ndarray):
        return _bent_array(rng, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        present = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        if not present:
            return value
        name = choice(rng, present)
        return dataclasses.replace(value, **{name: _bent(rng, getattr(value, name))})
    return _bent_plain(rng, value)


def _bent_plain(rng: Rng, value: Any) -> Any:
    if type(value) is dict:
        changes = {choice(rng, ["reward", "a", "", "x" * 5000]): choice(rng, [odd(rng), 1.0, _bent(rng, 0.5)])}
        return {**value, **changes}
    if type(value) is tuple and value:
        index = int(rng.integers(len(value)))
        bent = choice(rng, [(), (_bent(rng, value[index]),), (value[index],) * 2])
        return value[:index] + bent + value[index + 1 :]
    if type(value) is int:
        return value + choice(rng, [-1, 1, 1 << 31, 10**5000])
    if type(value) is float:
        return choice(rng, [value + 1e-6, -value, float("nan"), float("inf"), 1, np.float32(0.5), 10**400])
    return odd(rng)


def _bent_array(rng: Rng, array: np.ndarray) -> Any:
    if type(array) is not np.ndarray or not array.size or array.dtype.kind not in "biuf":
        return odd(rng)
    how = int(rng.integers(6))
    if how == 0:
        return array[: int(rng.integers(len(array) + 1))] if array.ndim else odd(rng)
    if how == 1:
        with np.errstate(all="ignore"):
            return array.astype(choice(rng, ["i4", "i8", ">i4", "f4", "f8", "u1", "u2", "?", "O", "S2"]))
    if how == 2:
        return array[..., None] if chance(rng, 0.5) else array.reshape(-1)
    array = array.copy()
    where = int(rng.integers(array.size))
    values = (
        [0, 1, -1, 2, 99, 100, 2**31 - 1, -(2**31)]
        if array.dtype.kind in "iu"
        else [0.0, -0.0, -1.0, 1e-7, np.nan, np.inf]
    )
    with np.errstate(all="ignore"):
        array.reshape(-1)[where] = np.array(choice(rng, values)).astype(array.dtype)
    return array
