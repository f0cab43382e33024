"""Whatever a refused record holds is kept: whole where it can be, otherwise with a note of what is missing."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from factories import SPEC
from quarantine_records import broken, gate, only_entry, record

from moerl.contract import plain as plain_module
from moerl.contract.quarantine import read_quarantined
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import KeptSets, Lineage


def test_values_of_any_kind_can_be_kept(tmp_path: Path):
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    odd = {"rewards": {1: 2**70, "b": {3}, "c": "\ud800", "d": np.float32(0.5)}, "turns": deep, "attempt": b"x"}
    assert gate(tmp_path, "r0").admit(record(**odd), trainer_version=3) is None
    content = read_quarantined(only_entry(tmp_path))[1]
    assert content["rewards"] == {1: 2**70, "b": {"repr": "{3}"}, "c": "\ud800", "d": 0.5}
    assert content["attempt"] == b"x"


def refuse_to_say(*_: object) -> Any:
    raise RuntimeError("no")


class Opaque:
    """Says nothing of itself without an error."""

    __repr__ = __str__ = __hash__ = __eq__ = __len__ = __iter__ = __bool__ = refuse_to_say  # pyright: ignore


class Text(str):
    __slots__ = ()
    __repr__ = __str__ = __hash__ = __eq__ = encode = refuse_to_say  # pyright: ignore


class Whole(int):
    __repr__ = __str__ = __index__ = __eq__ = __hash__ = refuse_to_say  # pyright: ignore


class Table(dict[Any, Any]):
    __repr__ = __iter__ = __len__ = keys = items = refuse_to_say  # pyright: ignore


class Array(np.ndarray):
    __repr__ = __str__ = tobytes = refuse_to_say  # pyright: ignore


def loop() -> list[Any]:
    inner: dict[str, Any] = {}
    inner["again"] = [inner, inner]
    return [inner, inner]


def laughs() -> list[Any]:
    value: list[Any] = ["ha"]
    for _ in range(40):
        value = [value, value]
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: dict[str, Callable[[], Any]] = {
    "an object that says nothing": Opaque,
    "a text of a subclass": lambda: Text("secret"),
    "an integer of a subclass": lambda: Whole(5),
    "a map of a subclass": lambda: Table(a=1),
    "an array of a subclass": lambda: np.arange(3).view(Array),
    "a masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "an array of objects": lambda: np.array([Opaque(), None, "x"], object),
    "an array of texts": lambda: np.array(["a", "\ud800"]),
    "an array of dates": lambda: np.array(["2026-01-01"], "M8[D]"),
    "an array of records": lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "an array of nothing": lambda: np.zeros(3, "V0"),
    "an array without dimensions": lambda: np.array(3),
    "every other element": lambda: np.arange(10, dtype=">i4")[::2],
    "a long double": lambda: np.longdouble(1),
    "a complex number": lambda: np.complex128(1j),
    "a huge integer": lambda: -(10**5000),
    "not a number": lambda: float("nan"),
    "a lone surrogate": lambda: "\udfff",
    "bytes that change": lambda: bytearray(b"x"),
    "a map of odd keys": lambda: {b"\xff": 1, ("a", 2): 2, Opaque: 3, "\ud800": 4, 1: 5, "1": 6, float("nan"): 7},
    "a map that looks like an array": lambda: {"dtype": "nonsense", "shape": [], "data": b""},
    "a map that looks like ours": lambda: {"__moerl__": "array", "dtype": "nonsense"},
    "a loop": loop,
    "a thousand million laughs": laughs,
    "very deep lists": lambda: nested(5_000),
    "a lineage without its fields": lambda: object.__new__(Lineage),
    "a type": lambda: Opaque,
    "a generator": lambda: (i for i in range(3)),
    "a kept set of rubbish": lambda: KeptSets(cast(Any, Opaque()), cast(Any, {})),
    "a tuple of a subclass": lambda: sys.version_info,
}


@pytest.fixture
def few_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_module, "_MAX_CONTAINERS", 1000)


@pytest.mark.parametrize("name", ODD)
def test_whatever_a_record_holds_it_is_kept_and_counted(tmp_path: Path, name: str, few_containers: None):
    quarantine = gate(tmp_path, "r0", spec=SPEC)
    good = record()
    fields = ("token_ids", "rewards", "lineage", "turns", "attempt", "spec", "kept", "scores", "engine_id", "timings")
    for number, field in enumerate(fields, start=1):
        bad = dataclasses.replace(good, values={**good.values, field: ODD[name]()})
        assert quarantine.admit(bad, trainer_version=3) is None
        assert quarantine.num_refused == number
    assert len(list(tmp_path.iterdir())) == len(fields)
    for entry in tmp_path.iterdir():
        why, content = read_quarantined(entry)
        assert why["reason"] in set(Reason)
        assert content["token_ids"] is not None
        assert set(content) == set(good.values)


@pytest.mark.parametrize("name", ODD)
def test_whatever_the_ids_of_a_record_are_it_is_kept_and_counted(tmp_path: Path, name: str, few_containers: None):
    quarantine = gate(tmp_path, "r0")
    odd = ODD[name]
    for number, bad in enumerate(
        (
            dataclasses.replace(record(), rollout_id=odd()),
            dataclasses.replace(broken(), engine_id=odd(), policy_version=odd()),
            dataclasses.replace(record(), values=odd()),
            record(lineage=dataclasses.replace(record().values["lineage"], rollout_id=odd())),
            record(lineage=dataclasses.replace(record().values["lineage"], group_id=odd())),
        ),
        start=1,
    ):
        assert quarantine.admit(bad, trainer_version=3) is None
        assert quarantine.num_refused == number
    assert all(read_quarantined(entry)[0]["reason"] in set(Reason) for entry in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == quarantine.num_refused


def kept(folder: Path, value: object) -> tuple[dict[str, Any], Any]:
    """`record.json` and a value as it is read back, after it stood for the attempt of a refused record."""
    assert gate(folder, "r0").admit(record(attempt=value, engine_id=0), trainer_version=3) is None
    why, content = read_quarantined(only_entry(folder))
    return why, content["attempt"]


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(10**5000),
        "\ud800",
        b"\xff",
        {1: 2, "1": 3, b"k": [None]},
        {"__moerl__": "array"},
        {"dtype": "nonsense", "shape": [], "data": b""},
        nested(40),
    ],
    ids=["wide", "huge", "surrogate", "bytes", "keys", "marked", "like an array", "deep"],
)
def test_what_can_be_represented_is_kept_whole_and_nothing_is_said(tmp_path: Path, value: object):
    why, back = kept(tmp_path, value)
    assert back == value
    assert why["incomplete"] == []


@pytest.mark.parametrize(
    "value", [np.arange(10, dtype=">i4")[::2], np.array(3), np.zeros((0, 3)), np.array(["a\ud800"])]
)
def test_arrays_of_any_layout_are_kept_whole(tmp_path: Path, value: np.ndarray):
    why, back = kept(tmp_path, value)
    assert (back.dtype, back.shape, back.tolist()) == (value.dtype, value.shape, value.tolist())
    assert why["incomplete"] == []


@pytest.mark.parametrize(
    ("value", "what", "back"),
    [
        (Opaque(), "attempt: Opaque", {"repr": "<Opaque instance>"}),
        ([1, {"a": Text("b")}], "attempt[1]['a']: Text", [1, {"a": "b"}]),
        (Whole(5), "attempt: Whole", 5),
        (Table(a=1), "attempt: Table", {"a": 1}),
        (np.array([Opaque(), 7], object), "attempt[0]: Opaque", [{"repr": "<Opaque instance>"}, 7]),
    ],
    ids=["opaque", "text", "integer", "map", "objects"],
)
def test_what_cannot_be_represented_is_said(tmp_path: Path, value: object, what: str, back: object):
    why, content = kept(tmp_path, value)
    assert re.sub(" at 0x[0-9a-f]+", "", str(content)) == str(back)
    assert [note for note in why["incomplete"] if note.startswith(what)]


def test_a_loop_is_kept_once_around(tmp_path: Path):
    value: list[Any] = [1]
    value.append(value)
    why, back = kept(tmp_path, value)
    assert back[0] == 1
    assert "holds itself" in back[1]["repr"]
    assert why["incomplete"] == ["attempt[1]: list that holds itself"]
