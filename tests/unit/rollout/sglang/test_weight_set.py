from __future__ import annotations

import pytest
import torch

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.weight_set import WeightSet

A, B = torch.ones(2, 3), torch.zeros(4)


@pytest.fixture
def weights() -> WeightSet:
    made = WeightSet({"a": (2, 3), "b": (4,)}, {"head": "a"})
    made.begin(7)
    return made


def test_a_whole_set_comes_out_in_the_order_of_the_checkpoint(weights: WeightSet):
    weights.receive([("b", B), ("head", A.clone())])
    weights.receive([("a", A)])
    version, tensors = weights.take()
    assert (version, list(tensors)) == (7, ["a", "b"])


def test_tensors_are_copies(weights: WeightSet):
    source = A.clone()
    weights.receive([("a", source), ("b", B)])
    source.zero_()
    assert torch.equal(weights.take()[1]["a"], A)


@pytest.mark.parametrize(
    ("name", "tensor", "said"), [("c", B, "a name that"), ("b", A, r"\(4,\)"), ("a", A, "once"), ("head", B, r"2, 3")]
)
def test_what_does_not_belong_is_named(weights: WeightSet, name: str, tensor: torch.Tensor, said: str):
    weights.receive([("a", A)])
    with pytest.raises(WeightSyncError, match=said):
        weights.receive([(name, tensor)])


def test_a_missing_tensor_is_named(weights: WeightSet):
    weights.receive([("a", A)])
    with pytest.raises(WeightSyncError, match="'b'"):
        weights.take()


def test_a_tied_tensor_of_other_values_is_refused(weights: WeightSet):
    weights.receive([("a", A), ("b", B), ("head", 2 * A)])
    with pytest.raises(WeightSyncError, match="head"):
        weights.take()


def test_nothing_is_taken_or_received_outside_an_update(weights: WeightSet):
    weights.receive([("a", A), ("b", B)])
    weights.take()
    for call in (weights.take, lambda: weights.receive([("a", A)])):
        with pytest.raises(WeightSyncError, match="begin_update"):
            call()


def test_versions_count_from_zero(weights: WeightSet):
    with pytest.raises(WeightSyncError, match="at least 0"):
        weights.begin(-1)
