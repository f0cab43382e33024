"""Memory that two processes write weights to."""

from __future__ import annotations

import os

import torch

from moerl.rollout.shared_memory import SharedMemory, tensor_at, write_flat


def test_shared_memory_holds_tensors_of_every_dtype_and_grows() -> None:
    memory = SharedMemory()
    for size in (3, 1000):
        tensors = {"a": torch.randn(size, 5).T, "b": torch.randn(size).bfloat16(), "c": torch.zeros(0, 4)}
        places, written = write_flat(tensors.items(), memory.grown)
        other = SharedMemory(os.dup(memory.descriptor))
        flat = other.mapped(written.numel())
        for place in places:
            assert torch.equal(tensor_at(flat, place), tensors[place.name])
        other.close()
    memory.close()


def test_a_writer_with_less_to_say_leaves_the_memory_as_long_as_it_was() -> None:
    ours = SharedMemory()
    large, small = torch.arange(10_000), torch.arange(10)
    write_flat([("large", large)], ours.grown)
    before = os.fstat(ours.descriptor).st_size
    theirs = SharedMemory(os.open(ours.path, os.O_RDWR))
    write_flat([("small", small)], theirs.grown)
    # Else the next write of ours would end this process.
    assert os.fstat(ours.descriptor).st_size == before
    [place], written = write_flat([("large", large)], ours.grown)
    assert torch.equal(tensor_at(ours.mapped(written.numel()), place), large)
    theirs.close()
    ours.close()
