"""Scores from hidden states under tensor parallelism, against a dense masked log-softmax in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import BFLOAT16, INTERPRETED
from ranks import Ranks
from torch import Tensor

from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import KeptSets
from moerl.kernels import device_pairs, products
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.kept import kl_kept
from moerl.kernels.plan import Rows, plan_full, plan_rows
from moerl.kernels.scores import listed_logprobs, score_full, score_kept
from moerl.trainer import groups

VOCAB, PADDED, WIDTH, ROWS = 21, 32, 24, 8
"""Padding as under four ranks of 8 columns: the last one holds nothing else."""
LISTED = [[0, 9, 20], [], [11], list(range(VOCAB)), [], [7, 8], [2], [5, 6, 7, 8, 9]]
TARGETS = [0, 20, 11, 12, 5, 7, 2, 9]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2 * BFLOAT16 if INTERPRETED else BFLOAT16}
"""Relative error of a gradient that is rounded once; on a GPU so are factors of its products."""


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of a model and of its reference [ROWS, WIDTH], head [PADDED, WIDTH] and temperatures [ROWS]."""
    generator = torch.Generator().manual_seed(3)
    hidden, other = torch.randn(2, ROWS, WIDTH, generator=generator).to(dtype)
    weight = (0.6 * torch.randn(PADDED, WIDTH, generator=generator)).to(dtype)
    weight[VOCAB:] *= 100
    return hidden, other, weight, 0.5 + torch.rand(ROWS, generator=generator)


def scored_rows(temperatures: Tensor, full: Tensor | None = None) -> Rows:
    sizes = np.array([len(ids) for ids in LISTED])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    sets = KeptSets(offsets, np.concatenate(LISTED).astype(np.int32))
    full_T = None if full is None else full.numpy()
    return Rows(np.array(TARGETS), temperatures.numpy(), sets, sizes > 0, full_T=full_T)


def row_weights() -> Tensor:
    return torch.linspace(-1.0, 2.0, ROWS)


def values(inputs: HeadInputs, reference: HeadInputs, temperatures: Tensor) -> dict[str, Tensor]:
    """Every score, [ROWS]."""
    some = torch.arange(ROWS) % 3 == 0
    rows = scored_rows(temperatures, some)
    plan = plan_rows(rows, inputs)
    both = score_kept(inputs, plan)
    whole = plan_rows(Rows.open(rows.target_ids_T, rows.temperatures_T), inputs)
    assert both.full is not None
    return {
        "kept": both.logprobs_T,
        "kept_entropy": both.entropy_T,
        "full": score_full(inputs, whole).logprobs_T,
        "sampled_full": both.full.logprobs_T * some,
        "kl_kept": kl_kept(both.kept_logprobs_N, listed_logprobs(reference, plan), plan.kept),
        "kl_full": kl_full(inputs, reference, plan_full(rows, ~rows.truncated_T, inputs)),
    }


def expected_values(
    hidden: Tensor, other: Tensor, weight: Tensor, temperatures: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same by a dense mask in float64, with the leaves that they hang on."""
    leaf, head = hidden.double().requires_grad_(), weight.double().requires_grad_()
    keep = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    for row, ids in enumerate(LISTED):
        keep[row, ids or slice(None)] = True

    def logprobs(rows: Tensor, mask: Tensor) -> Tensor:
        logits = (rows @ head.t())[:, :VOCAB] / temperatures.double()[:, None]
        return torch.log_softmax(logits.masked_fill(~mask, float("-inf")), -1)

    everything = torch.ones_like(keep)
    targets, truncated = torch.tensor(TARGETS)[:, None], torch.tensor([len(ids) > 0 for ids in LISTED])
    p, full = logprobs(leaf, keep), logprobs(leaf, everything)
    q = logprobs(other.double(), keep).detach()
    kl = (p.exp() * (p - q).masked_fill(~keep, 0.0)).sum(-1)
    out = {
        "kept": p.gather(1, targets)[:, 0],
        "kept_entropy": -(p.exp() * p.masked_fill(~keep, 0.0)).sum(-1),
        "full": full.gather(1, targets)[:, 0],
        "sampled_full": full.gather(1, targets)[:, 0] * (torch.arange(ROWS) % 3 == 0),
        "kl_kept": kl * truncated,
        "kl_full": kl * ~truncated,
    }
    return out, leaf, head


def with_gradients(values: dict[str, Tensor], hidden: Tensor, head: Tensor) -> dict[str, list[Tensor]]:
    """Each value with the gradients of hidden states and head that it gives, if any."""
    out = {}
    for name, value in values.items():
        out[name] = [value.detach()]
        if value.requires_grad:
            total = (value * row_weights().to(value.dtype)).sum()
            out[name] += torch.autograd.grad(total, (hidden, head), retain_graph=True)
    return out


def on_a_rank(layout: RankCoordinates, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, list[Tensor]]:
    with pytest.MonkeyPatch.context() as patches:
        if INTERPRETED:
            patches.setattr(products, "on_device", lambda device: True)
            patches.setattr(device_pairs, "DENSE_ADVANTAGE", 4)
        return scored(layout, dtype, sequence_parallel)


def scored(layout: RankCoordinates, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, list[Tensor]]:
    hidden, other, weight, temperatures = data(dtype)
    shard = VocabShard.from_group(VOCAB, PADDED // layout.dims.tensor, groups.tensor_group())
    mine = slice(None)
    if sequence_parallel:
        mine = slice(
            layout.tensor_rank * ROWS // layout.dims.tensor, (layout.tensor_rank + 1) * ROWS // layout.dims.tensor
        )
    leaf, own = hidden[mine].clone().requires_grad_(), weight[shard.start : shard.end].clone().requires_grad_()
    head = Head(own, shard, sequence_parallel)
    reference = Head(own.detach(), shard, sequence_parallel).enter(other[mine])
    return with_gradients(values(head.enter(leaf), reference, temperatures), leaf, own)


def assert_close(name: str, actual: Tensor, expected: Tensor, relative: float, scale: float = 1.0) -> None:
    """Largest error relative to the largest value, or to `scale` where that is larger."""
    error = float((actual.double() - expected).abs().max())
    assert error <= relative * max(scale, float(expected.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole_rows", "sequence_parallel"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_scores_of_vocabulary_shards_equal_a_dense_masked_log_softmax(
    processes: Callable[[int], Ranks], tensor: int, sequence_parallel: bool, dtype: torch.dtype
) -> None:
    hidden, other, weight, temperatures = data(dtype)
    expected = with_gradients(*expected_values(hidden, other, weight, temperatures))
    ranks = processes(tensor).run(on_a_rank, dtype, sequence_parallel, tensor=tensor)
    # Scores are differences of numbers as large as the logits, and those are rounded in float32.
    scale = float((hidden.double() @ weight[:VOCAB].double().t() / temperatures[:, None]).abs().max())
    for name, (value, *grads) in expected.items():
        for rank in ranks:
            assert_close(name, rank[name][0], value, 1e-6, scale)
            assert torch.equal(rank[name][0], ranks[0][name][0]), f"{name} differs between ranks"
        if grads:
            of_hidden = [rank[name][1] for rank in ranks]
            together = torch.cat(of_hidden) if sequence_parallel else of_hidden[-1]
            # In bfloat16 each rank rounds its part, and the sum over ranks is rounded again.
            rounded = tensor if dtype == torch.bfloat16 else 1
            assert_close(f"{name}, hidden", together, grads[0], TOLERANCES[dtype] * rounded)
            of_head = torch.cat([rank[name][2] for rank in ranks])
            assert_close(f"{name}, head", of_head, grads[1], TOLERANCES[dtype])


@pytest.mark.slow
def test_the_interpreted_kernels_of_vocabulary_shards_pass_the_same_test(tmp_path: Path) -> None:
    chosen = ("2-sequence_parallel-bf16", "2-whole_rows-fp32", "4-sequence_parallel-bf16")
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["-m", "pytest", "-p", "no:xdist", __file__, "-k", " or ".join(chosen)]
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(chosen)} passed" in done.stdout


def shared_weight_gradient(layout: RankCoordinates) -> tuple[Tensor, Tensor]:
    """The gradient of a matrix that is embedding and head at once, and the sum of what each use gives alone."""
    _, _, weight, temperatures = data(torch.float32)
    shard = VocabShard.from_group(VOCAB, PADDED // layout.dims.tensor, groups.tensor_group())
    own = weight[shard.start : shard.end].clone()
    tokens = torch.tensor(TARGETS) % shard.num_columns

    def gradients(embedding: Tensor, head: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.nn.functional.embedding(tokens, embedding)
        inputs = Head(head, shard).enter(hidden)
        scores = score_kept(inputs, plan_rows(scored_rows(temperatures), inputs))
        return torch.autograd.grad((scores.logprobs_T * row_weights()).sum(), leaves)

    tied, embedding, head = (own.clone().requires_grad_() for _ in range(3))
    (together,) = gradients(tied, tied, tied)
    return together, sum(gradients(embedding, head, embedding, head), torch.zeros_like(own))


def test_a_head_tied_to_the_embedding_gets_both_gradients(two_processes: Ranks) -> None:
    for together, apart in two_processes.run(shared_weight_gradient, tensor=2):
        assert torch.allclose(together, apart, rtol=1e-6, atol=1e-7)
