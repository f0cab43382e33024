"""The requirements of each kind of update on an engine."""

from __future__ import annotations

import pytest

from moerl.contract.weight_update import REQUIREMENTS, UpdateKind, WeightUpdate, check_update
from moerl.errors import WeightSyncError

HELD = {"a": (2, 3), "b": (4,)}
TIED = {"head": "a"}


def test_every_kind_has_its_requirement():
    assert REQUIREMENTS.keys() == set(UpdateKind)


@pytest.mark.parametrize("changes", [{}, {"head": (2, 3)}], ids=["plain", "with a tied name"])
def test_a_full_update_lists_all_tensors_of_the_engine(changes: dict[str, tuple[int, ...]]):
    check_update(WeightUpdate(7, UpdateKind.FULL, HELD | changes), HELD, TIED)


def test_a_tied_name_may_stand_among_the_tensors_of_the_engine():
    check_update(WeightUpdate(7, UpdateKind.FULL, HELD), HELD | {"head": (2, 3)}, TIED)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({"a": (2, 3)}, r"missing 'b'"),
        (HELD | {"c": (1,)}, r"unknown 'c'"),
        (HELD | {"b": (5,)}, r"'b' has shape \(5,\), not \(4,\)"),
        (HELD | {"head": (3, 2)}, r"'head' has shape \(3, 2\), not \(2, 3\)"),
        ({"head": (2, 3), "b": (4,)}, r"missing 'a'"),
    ],
)
def test_a_full_update_with_another_list_is_refused(listed: dict[str, tuple[int, ...]], said: str):
    with pytest.raises(WeightSyncError, match=f"version 7, kind full.*seen: 1: {said}.*the 2 tensors.*remedy: list"):
        check_update(WeightUpdate(7, UpdateKind.FULL, listed), HELD, TIED)
