from __future__ import annotations

import numpy as np
import pytest
import tiny_moe
import torch

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.shares import cut_share
from moerl.kernels.routing import add_map_sums
from moerl.kernels.routing_inputs import RoutedRows
from moerl.trainer.replay_rows import as_signed, row_keys


def checksum(routing_map_tE: torch.Tensor, keys_t: torch.Tensor, left_out_t: torch.Tensor, layer: int) -> int:
    total = torch.zeros((), dtype=torch.int64)
    add_map_sums(routing_map_tE, RoutedRows(keys_t, ~left_out_t, ~left_out_t), layer, total, None)
    return int(total)


@pytest.mark.parametrize("multiple", [1, 64])
def test_the_routing_map_of_the_recorded_experts_has_the_checksum_of_the_trajectories(multiple: int) -> None:
    batches = tiny_moe.pack(tiny_moe.make_samples(51, (9, 30, 17)), token_budget=64, multiple=multiple)[0]
    for batch in batches:
        assert batch.routing_checksums is not None
        expected_L = as_signed(batch.routing_checksums)
        keys_T = row_keys(batch, context=1, context_rank=0)
        is_pad_T = torch.from_numpy(batch.is_pad)
        for layer in range(tiny_moe.SPEC.num_moe_layers):
            routing_map_TE = map_of(batch, layer)
            assert checksum(routing_map_TE, keys_T, is_pad_T, layer) == expected_L[layer]
            halves = (slice(None, batch.num_rows // 2), slice(batch.num_rows // 2, None))
            parts = [checksum(routing_map_TE[h], keys_T[h], is_pad_T[h], layer) for h in halves]
            assert (sum(parts) - int(expected_L[layer])) % 2**64 == 0
            assert checksum(routing_map_TE, keys_T, is_pad_T, layer + 1) != expected_L[layer]
            assert checksum(routing_map_TE.roll(1, 0), keys_T, is_pad_T, layer) != expected_L[layer]


def map_of(batch: Microbatch, layer: int) -> torch.Tensor:
    """bool [t, E]: the routing map of a batch's recorded experts in one layer."""
    assert batch.expert_ids is not None
    routing_map_tE = torch.zeros(batch.num_rows, tiny_moe.SPEC.num_experts, dtype=torch.bool)
    return routing_map_tE.scatter_(1, torch.from_numpy(batch.expert_ids[:, layer].astype(np.int64)), True)


def test_the_checksums_of_context_parallel_shares_add_up_to_that_of_the_trajectories() -> None:
    samples = tiny_moe.make_samples(52, (9, 30, 17), uncaptured=0.25)
    (batch,) = tiny_moe.pack(samples, sequence=4, uncaptured="live")[0]
    assert not batch.routed.all()
    assert batch.routing_checksums is not None
    for layer in range(tiny_moe.SPEC.num_moe_layers):
        total = 0
        for rank in (0, 1):
            share = cut_share(batch, RankCoordinates(ParallelDims(context=2), rank))
            keys_t = row_keys(share, context=2, context_rank=rank)
            left_out_t = torch.from_numpy(share.is_pad | ~share.routed)
            total += checksum(map_of(share, layer), keys_t, left_out_t, layer)
        assert (total - int(as_signed(batch.routing_checksums)[layer])) % 2**64 == 0
