from __future__ import annotations

import pytest
import torch

from moerl.errors import WeightSyncError
from moerl.rollout.fleet.weight_set import WeightSet, check_whole

A, B = torch.ones(2, 3), torch.zeros(4)


@pytest.fixture
def weights() -> WeightSet:
    made = WeightSet({"a": (2, 3), "b": (4,)}, {"head": "a"})
    made.begin(7)
    return made


def test_a_whole_set_comes_out_in_the_order_of_the_checkpoint(weights: WeightSet):
    weights.receive([("b", B), ("head", A.clone())])
    weights.receive([("a", A)])
    assert list(weights.part(7)) == ["a", "b"]


def test_tensors_are_copies(weights: WeightSet):
    source = A.clone()
    weights.receive([("a", source), ("b", B)])
    source.zero_()
    copy = weights.part(7)["a"]
    assert copy is not None
    assert torch.equal(copy, A)


@pytest.mark.parametrize(
    ("name", "tensor", "said"), [("c", B, "a name that"), ("b", A, r"\(4,\)"), ("a", A, "once"), ("head", B, r"2, 3")]
)
def test_what_does_not_belong_is_named(weights: WeightSet, name: str, tensor: torch.Tensor, said: str):
    weights.receive([("a", A)])
    with pytest.raises(WeightSyncError, match=said):
        weights.receive([(name, tensor)])


@pytest.mark.parametrize(
    ("parts", "said"), [([{"a"}], "missing.*'b'"), ([{"a"}, {"a", "b"}], "two senders.*'a'"), ([{"a"}, {"b"}], "")]
)
def test_parts_make_up_the_model_with_each_tensor_once(parts: list[set[str]], said: str):
    if not said:
        check_whole(parts, {"a": (2, 3), "b": (4,)})
        return
    with pytest.raises(WeightSyncError, match=said):
        check_whole(parts, {"a": (2, 3), "b": (4,)})


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


def test_versions_count_from_zero(weights: WeightSet):
    with pytest.raises(WeightSyncError, match="at least 0"):
        weights.begin(-1)
