from __future__ import annotations

import numpy as np
import pytest
import tiny_moe
import torch

from moerl.contract.routing import mix as numpy_mix
from moerl.trainer import evidence


def test_torch_and_numpy_mix_every_bit_alike() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, size=1000, dtype=np.uint64)
    words[:4] = [0, 1, 2**63, 2**64 - 1]
    ours = evidence.mix(torch.from_numpy(words.view(np.int64).copy()))
    np.testing.assert_array_equal(ours.numpy().view(np.uint64), numpy_mix(words))


@pytest.mark.parametrize("multiple", [1, 64])
def test_the_routing_map_of_the_recorded_experts_has_the_checksum_of_the_trajectories(multiple: int) -> None:
    batches = tiny_moe.pack(tiny_moe.make_samples(51, (9, 30, 17)), token_budget=64, multiple=multiple)[0]
    for batch in batches:
        assert batch.expert_ids is not None
        assert batch.routing_checksums is not None
        expected_L = evidence.as_signed(batch.routing_checksums)
        keys_T = evidence.row_keys(batch, torch.device("cpu"))
        is_pad_T = torch.from_numpy(batch.is_pad)
        for layer in range(tiny_moe.SPEC.num_moe_layers):
            routing_map_TE = torch.zeros(batch.num_rows, tiny_moe.SPEC.num_experts, dtype=torch.bool)
            routing_map_TE.scatter_(1, torch.from_numpy(batch.expert_ids[:, layer].astype(np.int64)), True)
            assert evidence.map_checksum(routing_map_TE, keys_T, is_pad_T, layer) == expected_L[layer]
            halves = (slice(None, batch.num_rows // 2), slice(batch.num_rows // 2, None))
            parts = [evidence.map_checksum(routing_map_TE[h], keys_T[h], is_pad_T[h], layer) for h in halves]
            assert sum(parts) == expected_L[layer]
            assert evidence.map_checksum(routing_map_TE, keys_T, is_pad_T, layer + 1) != expected_L[layer]
            assert evidence.map_checksum(routing_map_TE.roll(1, 0), keys_T, is_pad_T, layer) != expected_L[layer]
