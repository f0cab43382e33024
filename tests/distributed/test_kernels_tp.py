"""Vocabulary-parallel scores in several processes equal those of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError
from moerl.kernels.full import kl_full, score_full
from moerl.kernels.kept import KeptRows, kl_kept
from moerl.kernels.support import score_support
from moerl.kernels.vocab_parallel import VocabShard

VOCAB, ROWS = 21, 6
PADDED_BY_WORLD_SIZE = {2: 24, 4: 32}
"""With four ranks of 8 columns the last one holds only padding."""


def scores_and_gradients(shard: VocabShard, padded: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every kernel's value (replicated) and gradient (of the shard's columns); every rank draws the same data."""
    generator = torch.Generator().manual_seed(3)
    whole, reference = (3 * torch.randn(2, ROWS, padded, generator=generator)).to(dtype)
    whole[:, VOCAB:] = reference[:, VOCAB:] = 40.0
    columns = slice(shard.start, shard.end)
    reference = reference[:, columns].contiguous()
    targets = torch.tensor([0, 20, 11, 12, 5, 7])
    temperatures = torch.tensor([1.0, 0.5, 0.7, 1.3, 2.0, 1.0])
    listed = [[0, 9, 20], [], [11], list(range(VOCAB)), [], [7, 8]]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in listed])]).astype(np.int64)
    kept = KeptRows.from_csr(
        KeptSets(offsets, np.array([token for ids in listed for token in ids], np.int32)), np.diff(offsets) > 0, "cpu"
    )
    out: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor, logits: Tensor) -> None:
        weighted = value * torch.linspace(-1.0, 2.0, len(value))
        out[name] = value.detach()
        (out[f"{name}_grad"],) = torch.autograd.grad(weighted.sum(), logits, retain_graph=True)

    logits = whole[:, columns].clone().requires_grad_()
    scores = score_support(logits, targets, kept, temperatures, shard)
    with torch.no_grad():
        reference_scores = score_support(reference, targets, kept, temperatures, shard)
    full = score_full(logits, targets, temperatures, shard, 4)
    keep("support", scores.logprobs_T, logits)
    keep("kept", scores.kept_logprobs, logits)
    keep("full", full.logprobs_T, logits)
    keep("kl_kept", kl_kept(scores.kept_logprobs, reference_scores.kept_logprobs, kept), logits)
    keep("kl_full", kl_full(logits, reference, temperatures, shard, None, 4), logits)
    return {**out, "support_entropy": scores.entropy_T, "full_entropy": full.entropy_T}


def on_a_rank(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    padded = PADDED_BY_WORLD_SIZE[world_size]
    shard = VocabShard.from_group(VOCAB, padded // world_size, dist.group.WORLD)
    assert shard.start == rank * padded // world_size
    return scores_and_gradients(shard, padded, dtype)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)])
def test_vocabulary_shards_equal_one_process(world_size: int, dtype: torch.dtype) -> None:
    padded = PADDED_BY_WORLD_SIZE[world_size]
    expected = scores_and_gradients(VocabShard.from_group(VOCAB, padded, None), padded, dtype)
    ranks = run_ranks(world_size, on_a_rank, dtype)
    for name, value in expected.items():
        if name.endswith("_grad"):
            rtol = 1e-6 if dtype == torch.float32 else 2**-8
            # The KL's gradient is p (x - y - mean): rounding grows with the distance of the two models.
            atol = 1e-5 if name == "kl_full_grad" else 1e-6
            together = torch.cat([rank[name] for rank in ranks], dim=1)
            torch.testing.assert_close(together, value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            continue
        for rank in ranks:
            torch.testing.assert_close(
                rank[name],
                value,
                rtol=1e-6,
                atol=1e-5 if name == "kl_full" else 2e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
            assert torch.equal(rank[name], ranks[0][name]), f"{name} differs between ranks"


def refuse_on_the_second_rank(rank: int, world_size: int) -> None:
    if rank == 1:
        VocabShard(4, 4, 8)
    dist.barrier()


def test_an_error_in_one_rank_ends_all_and_is_raised_by_the_caller() -> None:
    with pytest.raises(ContractError, match="vocab_shard_bounds") as caught:
        run_ranks(2, refuse_on_the_second_rank)
    assert "in rank 1" in caught.value.__notes__[0]


def wait_for_a_message_that_never_comes(rank: int, world_size: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)


def test_ranks_that_hang_end_with_their_stacks() -> None:
    with pytest.raises(TimeoutError, match="wait_for_a_message_that_never_comes"):
        run_ranks(2, wait_for_a_message_that_never_comes, timeout_seconds=2.0)
