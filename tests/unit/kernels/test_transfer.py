"""Arrays that go to a device in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moerl.kernels.transfer import transfer

ARRAYS = {
    "flags": np.array([True, False, True]),
    "none": np.zeros((0,), np.int64),
    "numbers": np.arange(6).reshape(2, 3),
    "small": np.array([1.5], np.float32),
    "every_other": np.arange(8, dtype=np.int32)[::2],
}


def test_arrays_arrive_with_their_shapes_and_dtypes() -> None:
    sent = transfer(ARRAYS, torch.device("cpu"))
    assert list(sent) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert sent[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(sent[name].numpy(), array)
        assert sent[name].data_ptr() % 16 == 0 or not array.size


def test_what_arrives_is_a_copy() -> None:
    array = np.arange(3)
    sent = transfer({"array": array}, torch.device("cpu"))["array"]
    array[0] = 9
    assert sent.tolist() == [0, 1, 2]


def test_all_arrays_are_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    to = torch.Tensor.to

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append(kwargs)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    transfer(ARRAYS, torch.device("meta"))
    assert copies == [{"non_blocking": True}]
