"""Random microbatches to score, and their dense scores in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.kernels import device_pairs, pairs
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.kept import KeptRows, kept_arrays
from moerl.kernels.plan import Rows, plan_rows
from moerl.kernels.scores import FullScores, KeptScores, score_full, score_kept
from moerl.kernels.transfer import transfer

VOCAB, PADDED, WIDTH = 37, 40, 24
WHOLE = VocabShard.from_group(VOCAB, PADDED, None)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AT_LENGTH = (pytest.mark.slow,) if INTERPRETED else ()
"""Marks of what `make test` leaves out with Triton's interpreter, and `make test-slow` runs."""
NEVER, ALWAYS = 0.001, 1000
"""Values of DENSE_ADVANTAGE that make all ids rare, or all common."""
BFLOAT16 = 2**-7 if INTERPRETED else 2**-8
"""Relative error of one rounding to bfloat16: Triton's interpreter truncates, a GPU rounds to nearest."""


def at_length[Test: Callable[..., None]](test: Test) -> Test:
    """Marks a test as what `AT_LENGTH` says."""
    return pytest.mark.slow(test) if INTERPRETED else test


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperatures: Tensor
    keep: Tensor
    sets: KeptSets

    @property
    def kept(self) -> KeptRows:
        return kept_rows(self.sets, self.sets.sizes > 0)

    def inputs(self) -> HeadInputs:
        return Head(self.weight, WHOLE).enter(self.hidden)

    def rows(self, select: Tensor | None = None, full: Tensor | None = None) -> Rows:
        return Rows(
            self.targets.numpy(),
            self.temperatures.numpy(),
            self.sets,
            self.sets.sizes > 0,
            None if select is None else select.numpy(),
            None if full is None else full.numpy(),
        )

    def score(self, select: Tensor | None = None, full: Tensor | None = None) -> KeptScores:
        return score_kept(self.inputs(), plan_rows(self.rows(select, full), self.inputs()))

    def score_full(self) -> FullScores:
        rows = Rows.open(self.targets.numpy(), self.temperatures.numpy())
        return score_full(self.inputs(), plan_rows(rows, self.inputs()))


def kept_rows(sets: KeptSets, truncated: NDArray[np.bool_]) -> KeptRows:
    """Returns kept sets as a plan has them on a CPU."""
    return KeptRows(**transfer(kept_arrays(sets, truncated), torch.device("cpu")))


def make_case(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """Random rows; row t lists `sizes[t]` ids, its target among them; 0 leaves the vocabulary open."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(sizes)
    hidden = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
    weight = (0.6 * torch.randn(PADDED, WIDTH, generator=generator)).to(dtype)
    weight[VOCAB:] *= 100
    keep = torch.zeros(num_rows, VOCAB, dtype=torch.bool)
    listed, targets = [], torch.zeros(num_rows, dtype=torch.int64)
    for row, size in enumerate(sizes):
        ids = torch.randperm(VOCAB, generator=generator)[: size or VOCAB].sort().values
        targets[row] = ids[int(torch.randint(len(ids), (1,), generator=generator))]
        keep[row, ids] = True
        listed.append(ids.numpy().astype(np.int32) if size else np.zeros(0, np.int32))
    temperatures = 0.5 + torch.rand(num_rows, generator=generator)
    return Case(hidden.requires_grad_(), weight.requires_grad_(), targets, temperatures, keep, kept_sets(listed))


def kept_sets(listed: list[np.ndarray]) -> KeptSets:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in listed])]).astype(np.int64)
    return KeptSets(offsets, np.concatenate([np.zeros(0, np.int32), *listed]).astype(np.int32))


def set_advantage(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Decides which ids are common, on CPU and GPU."""
    for module in (pairs, device_pairs):
        monkeypatch.setattr(module, "DENSE_ADVANTAGE", value)


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """float64 leaves of hidden states and head, and the dense log-softmax without a mask, [T, V]."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    logits = (hidden @ weight.t())[:, :VOCAB] / case.temperatures.double()[:, None]
    return hidden, weight, logits


def masked(case: Case, logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.masked_fill(~case.keep, float("-inf")), -1)


def row_weights(num_rows: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, num_rows)


def gradients(values: Tensor, weights: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((values * weights.to(values.dtype)).sum(), leaves, retain_graph=True)


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-6, floor: float = 1e-3) -> None:
    """Largest error relative to the largest value, or to `floor` where that is larger."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.numel():
        assert float((actual - expected).abs().max()) <= relative * max(floor, float(expected.abs().max()))
