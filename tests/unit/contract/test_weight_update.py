"""An update arrives whole: each tensor that it lists once, no other."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import ValidationError

from moerl.contract.weight_update import Arrivals, UpdateKind, WeightUpdate, require_whole
from moerl.errors import WeightSyncError

UPDATE = WeightUpdate(7, UpdateKind.FULL, {"a": (2, 3), "b": (4,)})


def test_an_update_comes_out_of_a_message_as_it_went_in():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(UPDATE), type=WeightUpdate) == UPDATE
    unknown = msgspec.msgpack.encode({"version": 7, "kind": "some", "tensors": {}})
    with pytest.raises(ValidationError, match="some"):
        msgspec.msgpack.decode(unknown, type=WeightUpdate)


def test_a_negative_version_is_refused():
    with pytest.raises(WeightSyncError, match="policy version; seen: -1; expected: at least 0"):
        WeightUpdate(-1, UpdateKind.FULL, {})


@pytest.fixture
def arrivals() -> Arrivals:
    made = Arrivals(UPDATE)
    made.check("a", (2, 3))
    made.names.add("a")
    return made


def test_an_update_is_whole_once_each_tensor_of_its_list_has_come(arrivals: Arrivals):
    with pytest.raises(WeightSyncError, match="version 7: tensors are missing; seen: 1: 'b'; expected: all 2"):
        arrivals.require_whole()
    arrivals.check("b", (4,))
    arrivals.names.add("b")
    arrivals.require_whole()


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("c", (4,), r"'c'; seen: shape \(4,\); expected: one of the 2 that it lists"),
        ("b", (2, 3), r"'b'; seen: shape \(2, 3\); expected: \(4,\)"),
        ("a", (2, 3), "'a'; seen: a second time; expected: once"),
    ],
    ids=["unknown", "misshaped", "twice"],
)
def test_a_tensor_that_does_not_belong_is_refused_and_the_update_is_never_whole(
    name: str, shape: tuple[int, ...], said: str, arrivals: Arrivals
):
    with pytest.raises(WeightSyncError, match=said):
        arrivals.check(name, shape)
    arrivals.names.add("b")
    with pytest.raises(WeightSyncError, match=said):
        arrivals.require_whole()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"a"}], "are missing; seen: 1: 'b'"),
        ([{"a"}, {"b", "c"}], "are not in its list; seen: 1: 'c'"),
        ([{"a"}, {"a", "b"}], "came twice; seen: 1: 'a'"),
        ([{"a"}, {"b"}], ""),
    ],
    ids=["missing", "unknown", "twice", "whole"],
)
def test_parts_of_senders_make_up_an_update_with_each_tensor_once(parts: list[set[str]], said: str):
    if not said:
        require_whole(UPDATE, parts)
        return
    with pytest.raises(WeightSyncError, match=said):
        require_whole(UPDATE, parts)
