from __future__ import annotations

import pytest
import torch

from moerl.rollout.cache import SlotCache


def _states(num_rows: int, num_tokens: int, fill: float) -> torch.Tensor:
    return torch.full((num_rows, 2, num_tokens, 4), fill)


def _prefilled(num_slots: int = 4) -> SlotCache:
    cache = SlotCache(num_slots, max_tokens=200)
    cache.begin_prefill(torch.arange(3), 5)
    for layer in range(2):
        prompts = torch.arange(3.0).reshape(3, 1, 1, 1) + 10 * layer + _states(3, 5, 1.0)
        cache.update(prompts, -prompts, layer)
    return cache


def test_a_prompt_attends_to_itself_and_is_stored():
    cache = _prefilled()
    states = _states(1, 5, 7.0)
    cache.begin_prefill(torch.tensor([3]), 5)
    keys, _ = cache.update(states, states, 0)
    assert torch.equal(keys, states)
    cache.begin_decode(torch.tensor([5, 5, 5, 5]), 6)
    keys, values = cache.update(_states(4, 1, 9.0), _states(4, 1, -9.0), 0)
    assert keys[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0, 7.0]
    assert values[:, 0, 0, 0].tolist() == [-1.0, -2.0, -3.0, 7.0]


def test_prompts_go_to_the_slots_that_were_named():
    cache = SlotCache(4, max_tokens=200)
    cache.begin_prefill(torch.tensor([3, 1]), 5)
    prompts = torch.cat([_states(1, 5, 1.0), _states(1, 5, 2.0)])
    cache.update(prompts, -prompts, 0)
    cache.begin_decode(torch.tensor([5, 5, 5, 5]), 6)
    keys, values = cache.update(_states(4, 1, 9.0), _states(4, 1, -9.0), 0)
    assert keys[:, 0, 4, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
    assert values[:, 0, 4, 0].tolist() == [0.0, -2.0, 0.0, -1.0]


def test_layers_are_there_before_a_pass_and_grow_with_it():
    cache = SlotCache(4, max_tokens=200)
    shapes = [(2, 4), (1, 6)]
    for keys, values in cache.layers_of(shapes, 5):
        keys[1, :, 4], values[1, :, 4] = 1.0, -1.0
    small = cache.capacity
    found = cache.layers_of(shapes, 150)
    assert [tuple(keys.shape) for keys, _ in found] == [(4, 2, cache.capacity, 4), (4, 1, cache.capacity, 6)]
    assert small < 150 <= cache.capacity
    for keys, values in found:
        assert (keys[1, :, 4].unique().item(), values[1, :, 4].unique().item()) == (1.0, -1.0)
        assert keys.count_nonzero() == keys[1, :, 4].numel()


def test_each_row_writes_at_its_own_position():
    cache = _prefilled()
    cache.begin_decode(torch.tensor([5, 2, 4]), 6)
    keys, _ = cache.update(_states(3, 1, 9.0), _states(3, 1, 9.0), 1)
    assert keys.shape == (3, 2, cache.capacity, 4)
    assert [(keys[row, 0, :, 0] == 9.0).nonzero().flatten().tolist() for row in range(3)] == [[5], [2], [4]]


def test_a_step_reads_a_view_and_not_a_copy():
    cache = _prefilled()
    cache.begin_decode(torch.tensor([5, 5]), 6)
    first, _ = cache.update(_states(2, 1, 1.0), _states(2, 1, 1.0), 0)
    cache.begin_decode(torch.tensor([6, 6]), 7)
    second, _ = cache.update(_states(2, 1, 1.0), _states(2, 1, 1.0), 0)
    assert first.data_ptr() == second.data_ptr()


def test_growing_keeps_what_was_stored_and_stays_within_bounds():
    cache = _prefilled()
    small = cache.capacity
    cache.begin_decode(torch.tensor([150, 5, 5]), 151)
    keys, _ = cache.update(_states(3, 1, 9.0), _states(3, 1, 9.0), 0)
    assert small < cache.capacity <= 200
    assert keys[:, 0, 4, 0].tolist() == [1.0, 2.0, 3.0]
    assert keys[0, 0, 150, 0] == 9.0


@pytest.fixture
def nan_in_fresh_memory():
    """Makes torch fill what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_fresh_memory")
def test_places_nobody_wrote_hold_numbers():
    # A masked place has weight zero, and zero times NaN is NaN.
    cache = _prefilled()
    cache.begin_decode(torch.tensor([199, 5, 5]), 200)
    keys, values = cache.update(_states(3, 1, 9.0), _states(3, 1, 9.0), 0)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


def test_copying_a_slot_copies_every_layer():
    cache = _prefilled()
    cache.copy(torch.tensor([2]), torch.tensor([0]), 5)
    cache.begin_decode(torch.tensor([5, 5]), 6)
    for layer in range(2):
        keys, values = cache.update(_states(2, 1, 0.0), _states(2, 1, 0.0), layer)
        assert keys[:, 0, 4, 0].tolist() == [3.0 + 10 * layer, 2.0 + 10 * layer]
        assert values[0, 0, 4, 0] == -3.0 - 10 * layer
