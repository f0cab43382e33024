from __future__ import annotations

import pytest
import torch
from full_updates import full

from moerl.errors import WeightSyncError
from moerl.rollout.fleet.sender import WeightSet

A, B = torch.ones(2, 3), torch.zeros(4)


@pytest.fixture
def weights() -> WeightSet:
    made = WeightSet({"head": "a"})
    made.begin(full(7, {"a": A, "b": B, "head": A}))
    return made


def test_a_whole_set_comes_out_in_the_order_of_the_list_without_what_is_tied(weights: WeightSet):
    weights.receive([("b", B), ("head", A.clone())])
    weights.receive([("a", A)])
    names, tensors = weights.part(7)
    assert list(tensors) == ["a", "b"]
    assert names == {"a", "b", "head"}


def test_tensors_are_copies(weights: WeightSet):
    source = A.clone()
    weights.receive([("a", source), ("b", B)])
    source.zero_()
    copy = weights.part(7)[1]["a"]
    assert copy is not None
    assert torch.equal(copy, A)


@pytest.mark.parametrize(
    ("name", "tensor", "said"), [("c", B, "one of the 3"), ("b", A, r"\(4,\)"), ("a", A, "once"), ("head", B, r"2, 3")]
)
def test_what_does_not_belong_is_named_and_never_part_of_a_set(
    weights: WeightSet, name: str, tensor: torch.Tensor, said: str
):
    weights.receive([("a", A)])
    with pytest.raises(WeightSyncError, match=said):
        weights.receive([(name, tensor)])
    with pytest.raises(WeightSyncError, match=said):
        weights.part(7)


def test_a_part_of_another_version_is_refused(weights: WeightSet):
    with pytest.raises(WeightSyncError, match="version 7"):
        weights.part(8)


def test_a_tied_tensor_of_other_values_is_refused(weights: WeightSet):
    weights.receive([("a", A), ("b", B), ("head", 2 * A)])
    with pytest.raises(WeightSyncError, match="head"):
        weights.part(7)


def test_nothing_is_taken_or_received_outside_an_update(weights: WeightSet):
    weights.receive([("a", A), ("b", B)])
    weights.part(7)
    for call in (lambda: weights.part(7), lambda: weights.receive([("a", A)])):
        with pytest.raises(WeightSyncError, match="begin_update"):
            call()
