"""The Triton kernels on the device against torch, in float32 and bfloat16. A check of `gpu_check.py`.

First what the kernels compute by themselves, dot products of listed pairs and both gradients, against float64. Then
log-probs, entropies and their gradients of `score_kept` against a dense masked log-softmax in float64, once with every
listed id computed by the kernels (*rare*) and once with every one as a column of a matrix product (*common*). All
twice: the bits are the same. On a CPU Triton interprets the kernels.

Errors are relative to the largest value, those of log-probs and entropies to the largest logit where that is more.
Shape legend: `moerl/kernels/__init__.py`; P = listed pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from _gpu_checks import Findings
from _kept import KeptCase
from _report import Result
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.kernels import pairs, sparse_triton
from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.kept import KeptRows
from moerl.kernels.scores import score_kept
from moerl.kernels.vocab_parallel import VocabShard

PATHS = {"rare": 1e-6, "common": 1e6}
"""Values of DENSE_ADVANTAGE that make every listed id rare, or common."""
SCORE_LIMIT = 1e-5
"""Of sums in float32, whatever the inputs."""
COMMON_BFLOAT16_LIMIT = 1e-4
"""Of scores from a matrix product of bfloat16 numbers, in whatever order the library adds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A microbatch. name: says what is particular about it."""

    name: str
    num_rows: int
    num_vocab: int
    width: int


SETTINGS = {
    "cuda": (Setting("wide", 256, 32_768, 2048), Setting("uneven width", 64, 1000, 520)),
    "cpu": (Setting("uneven width", 4, 21, 20),),
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Inputs on the device. keep_TV: bool; True where an id counts."""

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    temperatures_T: Tensor
    kept: KeptRows
    keep_TV: Tensor

    @property
    def inputs(self) -> HeadInputs:
        num_vocab = len(self.weight_VH)
        return Head(self.weight_VH, VocabShard.from_group(num_vocab, num_vocab, None)).enter(self.hidden_TH)

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden_TH, self.weight_VH


def check(device: str) -> Findings:
    with ExitStack() as patches:
        if device == "cpu":
            # Otherwise CPUs take torch's own sparse products; several blocks in a row.
            patches.enter_context(mock.patch.object(pairs, "sparse_products", return_value=sparse_triton))
            patches.enter_context(mock.patch.object(sparse_triton, "BLOCK_WIDTH", 16))
        # The interpreter truncates to bfloat16, a GPU rounds to nearest.
        rounding = 2**-7 if device == "cpu" else 2**-8
        results = []
        for setting in SETTINGS[device]:
            for dtype in (torch.float32, torch.bfloat16):
                for sizes in ("realistic", "flat"):
                    case = draw(setting, sizes, dtype, device)
                    name = f"{setting.name}, {str(dtype).removeprefix('torch.')}, {sizes} sets"
                    if pairs.sparse_products(case.inputs) is not sparse_triton:
                        raise RuntimeError(f"the scores of {device} tensors do not use the Triton kernels")
                    limit = SCORE_LIMIT if dtype == torch.float32 else rounding
                    if sizes == "realistic":
                        results += list(kernel_results(name, case, limit))
                    for path in PATHS:
                        results += list(score_results(f"{name}, {path}", case, path, limit))
    return Findings(results)


def draw(setting: Setting, sizes: str, dtype: torch.dtype, device: str) -> Case:
    """A quarter of the rows lists nothing: the full vocabulary is open there."""
    drawn = KeptCase.draw(sizes, setting.num_rows, num_vocab=setting.num_vocab)
    is_open_T = np.arange(setting.num_rows) % 4 == 3
    sets = [
        np.zeros(0, np.int32) if is_open else drawn.kept.ids[start:end]
        for is_open, start, end in zip(is_open_T, drawn.kept.offsets[:-1], drawn.kept.offsets[1:], strict=True)
    ]
    kept = KeptSets(np.cumsum([0, *map(len, sets)]).astype(np.int64), np.concatenate(sets))
    rows = KeptRows.from_csr(kept, ~is_open_T, device)
    keep_TV = ~rows.truncated[:, None].expand(-1, setting.num_vocab)
    keep_TV = keep_TV.clone()
    keep_TV[rows.rows, rows.ids] = True
    generator = torch.Generator().manual_seed(1)
    hidden_TH = torch.randn(setting.num_rows, setting.width, generator=generator)
    weight_VH = torch.randn(setting.num_vocab, setting.width, generator=generator) * (3 / setting.width**0.5)
    return Case(
        hidden_TH.to(device, dtype).requires_grad_(),
        weight_VH.to(device, dtype).requires_grad_(),
        torch.from_numpy(drawn.target_ids_T).to(device),
        (0.5 + torch.rand(setting.num_rows, generator=generator)).to(device),
        rows,
        keep_TV,
    )


# --- the kernels by themselves ---------------------------------------------------------------------------------------


def kernel_results(name: str, case: Case, limit: float) -> Iterator[Result]:
    """limit: of the head's gradient, which has the dtype of the head."""
    inputs = case.inputs.detach()
    with mock.patch.object(pairs, "DENSE_ADVANTAGE", PATHS["rare"]):
        segments = pairs.plan_pairs(case.kept.rows, case.kept.ids, inputs.num_rows, inputs.shard).rare
    generator = torch.Generator().manual_seed(2)
    grad_P = torch.randn(len(segments), generator=generator).to(inputs.hidden_TH.device)

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        grad_TH = torch.zeros_like(inputs.hidden_TH, dtype=inputs.dtype)
        grad_VH = torch.zeros_like(inputs.weight_VpH)
        sparse_triton.add_gradients(inputs, segments, grad_P, grad_TH, grad_VH)
        return sparse_triton.dots(inputs, segments), grad_TH, grad_VH

    found, again = compute(), compute()
    rows_P, columns_P = segments.rows_P, segments.columns_U[segments.slots()]
    hidden_PH, weight_PH = inputs.hidden_TH.double()[rows_P], inputs.weight_VpH.double()[columns_P]
    factors_P1 = grad_P.double()[:, None]
    expected = (
        (hidden_PH * weight_PH).sum(1),
        torch.zeros_like(inputs.hidden_TH, dtype=torch.float64).index_add(0, rows_P, factors_P1 * weight_PH),
        torch.zeros_like(inputs.weight_VpH, dtype=torch.float64).index_add(0, columns_P, factors_P1 * hidden_PH),
    )
    names = ("dot products", "gradient of hidden states", "gradient of the head")
    for part, mine, wanted, most in zip(names, found, expected, (SCORE_LIMIT, SCORE_LIMIT, limit), strict=True):
        yield at_most(f"{name}, kernels alone: {part}", difference(mine, wanted), most)
    yield same_bits(f"{name}, kernels alone", found, again)


# --- scores ----------------------------------------------------------------------------------------------------------


def score_results(name: str, case: Case, path: str, limit: float) -> Iterator[Result]:
    """limit: of gradients."""
    found, again = scores(case, path), scores(case, path)
    wanted = exact(case)
    is_half = case.hidden_TH.dtype == torch.bfloat16
    score_limit = COMMON_BFLOAT16_LIMIT if is_half and path == "common" else SCORE_LIMIT
    # Listed and open rows of the head's gradient are rounded one after the other, and so are the factors of a product.
    for part, mine, other in zip(("log-probs", "entropies"), found, wanted, strict=False):
        yield at_most(f"{name}: {part}", difference(mine, other, floor=wanted.largest_logit), score_limit)
    for part, mine, other in zip(("hidden states", "the head"), found[2:], wanted[2:], strict=True):
        floor = wanted.largest_factor
        yield at_most(f"{name}: gradient of {part}", difference(mine, other, floor=floor), 2 * limit)
    yield same_bits(name, found, again)


def scores(case: Case, path: str) -> tuple[Tensor, ...]:
    with mock.patch.object(pairs, "DENSE_ADVANTAGE", PATHS[path]):
        found = score_kept(case.inputs, case.targets_T, case.kept, case.temperatures_T)
        return (
            found.logprobs_T.detach(),
            found.entropy_T.detach(),
            *gradients(found.logprobs_T, found.entropy_T, case.leaves),
        )


class Exact(tuple[Tensor, ...]):
    """Log-probs, entropies and gradients in float64. largest_logit: of all. largest_factor: that a gradient's sums are
    made of."""

    largest_logit: float
    largest_factor: float


def exact(case: Case) -> Exact:
    hidden_TH, weight_VH = (leaf.detach().double().requires_grad_() for leaf in case.leaves)
    logits_TV = hidden_TH @ weight_VH.t() / case.temperatures_T.double()[:, None]
    logprobs_TV = logits_TV.masked_fill(~case.keep_TV, -torch.inf).log_softmax(-1)
    logprobs_T = logprobs_TV.gather(1, case.targets_T[:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV.masked_fill(~case.keep_TV, 0.0)).sum(-1)
    both = gradients(logprobs_T, entropy_T, (hidden_TH, weight_VH))
    found = Exact((logprobs_T.detach(), entropy_T.detach(), *both))
    found.largest_logit = max(1.0, float(logits_TV.detach().abs().max()))
    largest = max(float(leaf.detach().abs().max()) for leaf in (hidden_TH, weight_VH))
    found.largest_factor = largest / float(case.temperatures_T.min())
    return found


def gradients(logprobs_T: Tensor, entropy_T: Tensor, leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Of a loss that weighs rows differently."""
    weights_T = torch.linspace(-1.0, 2.0, len(logprobs_T), device=logprobs_T.device, dtype=logprobs_T.dtype)
    return torch.autograd.grad(((logprobs_T - 0.1 * entropy_T) * weights_T).sum(), leaves)


# --- results ---------------------------------------------------------------------------------------------------------


def difference(actual: Tensor, expected: Tensor, floor: float = 1e-3) -> float:
    """The largest, relative to the largest value or to `floor` where that is more; infinite where one is not a
    number."""
    largest = float((actual.double() - expected).abs().max() / max(floor, float(expected.abs().max())))
    return largest if largest == largest else float("inf")


def at_most(name: str, value: float, limit: float) -> Result:
    return Result(name, value, f"<= {limit:.3g}", value <= limit, "relative")


def same_bits(name: str, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Result:
    changed = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    return Result(f"{name}: numbers that differ in a second run", changed, "== 0", changed == 0)
