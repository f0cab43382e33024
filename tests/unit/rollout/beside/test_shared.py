"""Memory that two processes write weights to."""

from __future__ import annotations

import os

import pytest
import torch

from moerl.rollout.beside.shared import SharedMemory


@pytest.mark.parametrize("way", ["tensors", "content"])
def test_a_writer_with_less_to_say_leaves_the_memory_as_long_as_it_was(way: str) -> None:
    ours = SharedMemory()
    large, small = torch.arange(10_000), torch.arange(10)
    ours.put([("large", large)])
    before = os.fstat(ours.descriptor).st_size
    theirs = SharedMemory.of(ours.path)
    if way == "tensors":
        theirs.put([("small", small)])
    else:
        theirs.fill(small.numpy().tobytes())
    # Else the next write of ours would end this process.
    assert os.fstat(ours.descriptor).st_size == before
    [place] = ours.put([("large", large)])
    assert torch.equal(ours.view(place), large)
    theirs.close()
    ours.close()
