"""The Triton kernels on the device against torch, in float32 and bfloat16. A check of `gpu_check.py`.

First dot products of listed pairs and both gradients by themselves, against float64. Then log-probs, entropies and
their gradients of `score_kept` against a dense masked log-softmax in float64, once with every listed id computed by the
kernels (*rare*) and once with every one as a column of a matrix product (*common*); the head's gradient also as it is
added to a float32 sum of gradients. All twice: the bits are the same.
On a CPU Triton interprets the kernels.

Errors are relative to the largest value, those of log-probs and entropies to the largest logit if that is more.
Shape legend: `moerl/kernels/__init__.py`; P = listed pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from _gpu_checks import Findings
from _kept import KeptCase
from _report import Result
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.trajectory import KeptSets
from moerl.kernels import device_pairs, products, sparse_triton
from moerl.kernels.device_scores import write_pair_gradients
from moerl.kernels.full import HeadGradients
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.plan import DeviceListed, Rows, ScorePlan, plan_rows
from moerl.kernels.scores import score_kept

PATHS = {"rare": 1e-6, "common": 1e6}
"""Values of DENSE_ADVANTAGE that make every listed id rare, or common."""
SCORE_LIMIT = 1e-5
"""Largest error of sums in float32, whatever the dtype of the inputs."""
COMMON_BFLOAT16_LIMIT = 1e-4
"""Largest error of scores from a matrix product of bfloat16 numbers: the library may add in any order."""


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
    """Inputs on the device, and rows on the host. keep_TV: bool; True if an id counts."""

    hidden_TH: Tensor
    weight_VH: Tensor
    rows: Rows
    keep_TV: Tensor

    def plan(self, path: str) -> ScorePlan:
        with mock.patch.object(device_pairs, "DENSE_ADVANTAGE", PATHS[path]):
            return plan_rows(self.rows, self.inputs)

    def on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.hidden_TH.device)

    @property
    def inputs(self) -> HeadInputs:
        return self.enter()

    def enter(self, main_grad_VH: Tensor | None = None) -> HeadInputs:
        shard = VocabShard.from_group(len(self.weight_VH), len(self.weight_VH), None)
        return Head(self.weight_VH, shard, main_grad_VpH=main_grad_VH).enter(self.hidden_TH)

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden_TH, self.weight_VH


def check(device: str) -> Findings:
    with ExitStack() as patches:
        if device == "cpu":
            # Otherwise CPUs take torch's own operations; several blocks in a row, and split sums.
            patches.enter_context(mock.patch.object(products, "on_device", return_value=True))
            patches.enter_context(mock.patch.object(device_pairs, "LONGEST", 3))
            for name, size in {"DOT_WIDTH": 16, "SUM_WIDTH": 16, "SET_BLOCK": 8}.items():
                patches.enter_context(mock.patch.object(sparse_triton, name, size))
        # The interpreter truncates to bfloat16, a GPU rounds to nearest.
        rounding = 2**-7 if device == "cpu" else 2**-8
        results = []
        for setting in SETTINGS[device]:
            for dtype in (torch.float32, torch.bfloat16):
                for sizes in ("realistic", "flat"):
                    case = draw(setting, sizes, dtype, device)
                    name = f"{setting.name}, {str(dtype).removeprefix('torch.')}, {sizes} sets"
                    if not isinstance(case.plan("rare").listed, DeviceListed):
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
    keep_TV = np.repeat(is_open_T[:, None], setting.num_vocab, axis=1)
    keep_TV[np.repeat(np.arange(setting.num_rows), kept.sizes), kept.ids] = True
    generator = torch.Generator().manual_seed(1)
    hidden_TH = torch.randn(setting.num_rows, setting.width, generator=generator)
    weight_VH = torch.randn(setting.num_vocab, setting.width, generator=generator) * (3 / setting.width**0.5)
    return Case(
        hidden_TH.to(device, dtype).requires_grad_(),
        weight_VH.to(device, dtype).requires_grad_(),
        Rows(drawn.target_ids_T, (0.5 + torch.rand(setting.num_rows, generator=generator)).numpy(), kept, ~is_open_T),
        torch.from_numpy(keep_TV).to(device),
    )


# --- the kernels by themselves ---------------------------------------------------------------------------------------


def kernel_results(name: str, case: Case, limit: float) -> Iterator[Result]:
    """limit: of the head's gradient, which has the dtype of the head."""
    inputs, plan = case.inputs.detach(), case.plan("rare")
    assert isinstance(plan.listed, DeviceListed)
    pairs = plan.listed.pairs
    generator = torch.Generator().manual_seed(2)
    grad_N = torch.randn(len(plan.kept.ids), generator=generator).to(inputs.hidden_TH.device)

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        z_N = torch.empty_like(grad_N)
        grad_TH = torch.empty_like(inputs.hidden_TH, dtype=inputs.dtype)
        grad_VH = torch.empty_like(inputs.weight_VpH)
        sparse_triton.dots(inputs, pairs, z_N)
        write_pair_gradients(inputs, pairs, grad_N, HeadGradients(grad_TH, grad_VH, is_new=True))
        return z_N, grad_TH, grad_VH

    found, again = compute(), compute()
    rows_N, ids_N = plan.kept.rows, plan.kept.ids
    hidden_NH, weight_NH = inputs.hidden_TH.double()[rows_N], inputs.weight_VpH.double()[ids_N]
    factors_N1 = grad_N.double()[:, None]
    expected = (
        (hidden_NH * weight_NH).sum(1),
        torch.zeros_like(inputs.hidden_TH, dtype=torch.float64).index_add(0, rows_N, factors_N1 * weight_NH),
        torch.zeros_like(inputs.weight_VpH, dtype=torch.float64).index_add(0, ids_N, factors_N1 * hidden_NH),
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
    gradients_of = ("hidden states", "the head", "the head, added to a sum")
    for part, mine, other in zip(gradients_of, found[2:], (*wanted[2:], wanted[3]), strict=True):
        floor = wanted.largest_factor
        yield at_most(f"{name}: gradient of {part}", difference(mine, other, floor=floor), 2 * limit)
    yield same_bits(name, found, again)


def scores(case: Case, path: str) -> tuple[Tensor, ...]:
    """Returns log-probs, entropies, gradients of hidden states and head, and the latter in a sum of gradients."""
    plan, main_grad_VH = case.plan(path), torch.zeros_like(case.weight_VH, dtype=torch.float32)
    found, added = score_kept(case.inputs, plan), score_kept(case.enter(main_grad_VH), plan)
    own = gradients(found.logprobs_T, found.entropy_T, case.leaves)
    gradients(added.logprobs_T, added.entropy_T, (case.hidden_TH,))
    return found.logprobs_T.detach(), found.entropy_T.detach(), *own, main_grad_VH


class Exact(tuple[Tensor, ...]):
    """Log-probs, entropies and gradients in float64. largest_logit: of all. largest_factor: that a gradient's sums are
    made of."""

    largest_logit: float
    largest_factor: float


def exact(case: Case) -> Exact:
    hidden_TH, weight_VH = (leaf.detach().double().requires_grad_() for leaf in case.leaves)
    temperatures_T, targets_T = (case.on_device(each) for each in (case.rows.temperatures_T, case.rows.target_ids_T))
    logits_TV = hidden_TH @ weight_VH.t() / temperatures_T.double()[:, None]
    logprobs_TV = logits_TV.masked_fill(~case.keep_TV, -torch.inf).log_softmax(-1)
    logprobs_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV.masked_fill(~case.keep_TV, 0.0)).sum(-1)
    both = gradients(logprobs_T, entropy_T, (hidden_TH, weight_VH))
    found = Exact((logprobs_T.detach(), entropy_T.detach(), *both))
    found.largest_logit = max(1.0, float(logits_TV.detach().abs().max()))
    largest = max(float(leaf.detach().abs().max()) for leaf in (hidden_TH, weight_VH))
    found.largest_factor = largest / float(temperatures_T.min())
    return found


def gradients(logprobs_T: Tensor, entropy_T: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the gradients of a loss that weighs rows differently."""
    weights_T = torch.linspace(-1.0, 2.0, len(logprobs_T), device=logprobs_T.device, dtype=logprobs_T.dtype)
    return torch.autograd.grad(((logprobs_T - 0.1 * entropy_T) * weights_T).sum(), leaves)


# --- results ---------------------------------------------------------------------------------------------------------


def difference(actual: Tensor, expected: Tensor, floor: float = 1e-3) -> float:
    """The largest, relative to the largest value or to `floor` if that is more; infinite if one is not a
    number."""
    largest = float((actual.double() - expected).abs().max() / max(floor, float(expected.abs().max())))
    return largest if largest == largest else float("inf")


def at_most(name: str, value: float, limit: float) -> Result:
    return Result(name, value, f"<= {limit:.3g}", value <= limit, "relative")


def same_bits(name: str, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Result:
    changed = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    return Result(f"{name}: numbers that differ in a second run", changed, "== 0", changed == 0)
