"""Sums over routing maps, against the checksums of trajectories and a loop over rows.

`test_sparse_triton.py` runs this file again with Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import AT_LENGTH, INTERPRETED
from routing_sums import routing_checksums as recorded_checksums

from moerl.contract.routing import mix as numpy_mix
from moerl.contract.routing import row_checksums as recorded_rows
from moerl.contract.trainer import STATISTICS
from moerl.kernels import routing
from moerl.kernels.mixing import mix
from moerl.kernels.routing_inputs import Choices, RoutedRows

SIZES = [*((1, 4, 2), (37, 8, 2), (130, 6, 3), (50, 128, 8), (7, 3, 3)), pytest.param(70, 160, 6, marks=AT_LENGTH)]
"""Rows, experts, experts per token."""

CHOICES_BY_TORCH = routing.add_choices
"""Reference for Triton's kernel."""


@pytest.fixture(autouse=True)
def implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton where it is interpreted, in blocks of which the last one is not full."""
    if INTERPRETED:
        from moerl.kernels import routing_triton

        monkeypatch.setattr(routing_triton, "BLOCK_ELEMENTS", 1024)
        monkeypatch.setattr(routing_triton, "PROGRAMS", 3)
        for name in ("add_map_sums", "row_checksums", "add_choices"):
            monkeypatch.setattr(routing, name, getattr(routing_triton, name))


def routes(num_rows: int, num_experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """uint16 [rows, 1, K]: distinct experts."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((num_rows, num_experts)), axis=1)[:, None, :top_k].astype(np.uint16)


def map_of(expert_ids: np.ndarray, num_experts: int) -> torch.Tensor:
    routing_map = torch.zeros(len(expert_ids), num_experts, dtype=torch.bool)
    return routing_map.scatter_(1, torch.from_numpy(expert_ids[:, 0].astype(np.int64)), True)


def keys_of(key: int, num_rows: int) -> torch.Tensor:
    salts = numpy_mix(np.uint64(key) + np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy(salts.view(np.int64))


def test_torch_and_numpy_mix_every_bit_alike() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, size=1000, dtype=np.uint64)
    words[:4] = [0, 1, 2**63, 2**64 - 1]
    ours = mix(torch.from_numpy(words.view(np.int64).copy()))
    np.testing.assert_array_equal(ours.numpy().view(np.uint64), numpy_mix(words))


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("moe_layer", [0, 5])
def test_a_routing_map_adds_the_checksum_of_its_trajectory_and_the_rows_of_each_expert(
    num_rows: int, num_experts: int, top_k: int, moe_layer: int
) -> None:
    expert_ids, key = routes(num_rows, num_experts, top_k), 2**63 + 12345
    rng = np.random.default_rng(1)
    counted, real = rng.random(num_rows) < 0.7, rng.random(num_rows) < 0.9
    rows = RoutedRows(keys_of(key, num_rows), torch.from_numpy(counted), torch.from_numpy(real))
    layers = np.repeat(expert_ids, moe_layer + 1, axis=1)
    expected = int(recorded_checksums(key, layers, counted)[moe_layer])
    sums = torch.tensor([7, 0])
    load = torch.ones(num_experts, dtype=torch.int64)
    routing.add_map_sums(map_of(expert_ids, num_experts), rows, moe_layer, sums[0], load)
    assert (int(sums[0]) - 7) % 2**64 == expected
    assert int(sums[1]) == 0
    assert (load - 1).tolist() == np.bincount(expert_ids[real].ravel(), minlength=num_experts).tolist()
    assert (expected != 0) == bool(counted.any())
    routing.add_map_sums(map_of(expert_ids, num_experts), rows, moe_layer, sums[1], None)
    assert torch.equal(sums[0] - 7, sums[1])
    twice = torch.ones_like(load)
    routing.add_map_sums(map_of(expert_ids, num_experts), rows, moe_layer, None, twice)
    assert twice.tolist() == load.tolist()


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), SIZES)
def test_the_checksum_of_each_row_is_that_of_the_trajectory(num_rows: int, num_experts: int, top_k: int) -> None:
    expert_ids, key = np.repeat(routes(num_rows, num_experts, top_k), 3, axis=1), 99
    found = routing.row_checksums(map_of(expert_ids, num_experts), keys_of(key, num_rows), 2)
    np.testing.assert_array_equal(found.numpy().view(np.uint64), recorded_rows(key, expert_ids)[:, 2])


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), SIZES)
def test_choices_are_compared_row_by_row_and_in_sum(num_rows: int, num_experts: int, top_k: int) -> None:
    rng = np.random.default_rng(2)
    scores = torch.from_numpy(rng.standard_normal((num_rows, num_experts)).astype(np.float32))
    own = scores.topk(top_k).indices
    recorded = (scores + 0.3 * torch.from_numpy(rng.standard_normal(scores.shape).astype(np.float32))).topk(top_k)
    routed = torch.from_numpy(rng.random(num_rows) < 0.8)
    counted = routed & torch.from_numpy(rng.random(num_rows) < 0.9)
    choices = Choices(scores, own, recorded.indices, routed, counted)
    differing = torch.full((num_rows,), 4, dtype=torch.int32)
    # Triton adds up in three programs, see `implementation`.
    statistics = routing.partial_statistics(1, torch.device("cpu"))[0].repeat(3 if INTERPRETED else 1, 1)
    routing.add_choices(choices, differing, statistics)
    routing.add_choices(choices, differing, statistics)
    differs, expected = torch.zeros_like(differing), torch.zeros(1, len(STATISTICS), dtype=torch.float64)
    CHOICES_BY_TORCH(choices, differs, expected)
    assert (differing - 4).tolist() == (2 * differs).tolist()
    np.testing.assert_allclose(statistics.sum(0).numpy(), 2 * expected[0].numpy(), rtol=1e-12)
    again = torch.zeros_like(statistics)
    for _ in range(2):
        routing.add_choices(choices, differing, again)
    assert torch.equal(again, statistics)


def sums_of_rows(scores_tE: np.ndarray, recorded_tK: np.ndarray, counted_t: np.ndarray) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(STATISTICS, 0.0)
    for scores_E, recorded_K, counted in zip(scores_tE, recorded_tK, counted_t, strict=True):
        if not counted:
            continue
        order = np.argsort(-scores_E)
        k = len(recorded_K)
        natural, recorded = set(order[:k].tolist()), set(recorded_K.tolist())
        margin = float(scores_E[order[k - 1]] - scores_E[order[k]]) if k < len(order) else 0.0
        sums["rows"] += 1
        sums["flips"] += natural != recorded
        sums["jaccard"] += len(natural & recorded) / len(natural | recorded)
        sums["margin_at_flips" if natural != recorded else "margin_elsewhere"] += margin
    return sums


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (16, 8), (4, 4), (3, 1)])
def test_statistics_of_choices_are_those_of_a_loop_over_rows(num_experts: int, k: int) -> None:
    rng = np.random.default_rng(num_experts)
    scores_tE = rng.standard_normal((200, num_experts)).astype(np.float32)
    noisy_tE = scores_tE + 0.3 * rng.standard_normal(scores_tE.shape)
    recorded_tK = rng.permuted(np.argsort(-noisy_tE, axis=1)[:, :k], axis=1)
    counted_t = rng.random(200) < 0.8
    scores, recorded, counted = map(torch.from_numpy, (scores_tE, recorded_tK, counted_t))
    differing, found = torch.zeros(200, dtype=torch.int32), torch.zeros(1, len(STATISTICS), dtype=torch.float64)
    CHOICES_BY_TORCH(Choices(scores, scores.topk(k).indices, recorded, counted, counted), differing, found)
    expected = sums_of_rows(scores_tE, recorded_tK, counted_t)
    np.testing.assert_allclose(found[0].numpy(), list(expected.values()), rtol=1e-6)
    assert int(differing.sum()) == expected["flips"]
    assert (expected["flips"] > 0) == (k < num_experts)
