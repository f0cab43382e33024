"""The head's gradient, added to the optimizer's sum of gradients.

`test_sparse_triton.py` runs this file again with Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    ALWAYS,
    BFLOAT16,
    INTERPRETED,
    NEVER,
    PADDED,
    VOCAB,
    WHOLE,
    WIDTH,
    Case,
    assert_close,
    exact,
    gradients,
    make_case,
    masked,
    row_weights,
    set_advantage,
)
from torch import Tensor

from moerl.errors import ContractError
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.plan import plan_full, plan_rows
from moerl.kernels.scores import score_kept

SETS, MIXED = [5, 1, 12, 37, 2], [4, 0, 1, 0, 30, 0, 37]


def drawn_sum() -> Tensor:
    """A sum that earlier microbatches left."""
    return torch.randn(PADDED, WIDTH, generator=torch.Generator().manual_seed(7))


def entered(case: Case, main_grad_VpH: Tensor) -> HeadInputs:
    return Head(case.weight, WHOLE, main_grad_VpH=main_grad_VpH).enter(case.hidden)


def logprobs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves in float64, and the exact log-probs of the targets."""
    hidden, weight, logits = exact(case)
    return hidden, weight, masked(case, logits).gather(1, case.targets[:, None])[:, 0]


@pytest.mark.parametrize("advantage", [NEVER, 4, ALWAYS])
@pytest.mark.parametrize("sizes", [SETS, MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_earlier_microbatches_gets_the_gradient_in_float32(
    sizes: list[int], advantage: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_advantage(monkeypatch, advantage)
    case, main_grad = make_case(sizes, dtype=dtype), drawn_sum()
    scores = score_kept(entered(case, main_grad), plan_rows(case.rows(), case.inputs()))
    (scores.logprobs_T * row_weights(len(sizes))).sum().backward()
    hidden, weight, expected = logprobs(case)
    of_hidden, of_weight = gradients(expected, row_weights(len(sizes)), hidden, weight)
    assert case.weight.grad is None
    # On a GPU gradients of logits are rounded to the head's dtype, as factors of products: of open rows and common ids.
    rounds = dtype == torch.bfloat16 and INTERPRETED and (sizes is MIXED or advantage != NEVER)
    assert_close(main_grad - drawn_sum(), of_weight, BFLOAT16 if rounds else 3e-6)
    assert torch.equal(main_grad[VOCAB:], drawn_sum()[VOCAB:])
    assert case.hidden.grad is not None
    assert_close(case.hidden.grad, of_hidden, BFLOAT16 if dtype == torch.bfloat16 else 3e-6)


def test_a_kl_and_a_score_of_one_microbatch_are_both_added() -> None:
    case, reference, main_grad = make_case([0] * 6), make_case([0] * 6, seed=1), drawn_sum()
    reference.temperatures = case.temperatures
    inputs, every = entered(case, main_grad), np.ones(6, np.bool_)
    scores = score_kept(inputs, plan_rows(case.rows(), inputs))
    kl = kl_full(inputs, reference.inputs(), plan_full(case.rows(), every, inputs))
    ((scores.logprobs_T + kl) * row_weights(6)).sum().backward()
    hidden, weight, expected = logprobs(case)
    p = masked(case, hidden @ weight.t()[:, :VOCAB] / case.temperatures.double()[:, None])
    q = masked(reference, exact(reference)[2]).detach()
    total = expected + (p.exp() * (p - q)).sum(-1)
    assert case.weight.grad is None
    assert reference.weight.grad is None
    assert_close(main_grad - drawn_sum(), gradients(total, row_weights(6), weight)[0], 3e-6)


def test_a_head_without_gradient_leaves_the_sum_as_it_was() -> None:
    case, reference, main_grad = make_case(MIXED), make_case([0] * len(MIXED), seed=1), drawn_sum()
    reference.temperatures = case.temperatures
    inputs = Head(case.weight.detach(), WHOLE, main_grad_VpH=main_grad).enter(case.hidden)
    score_kept(inputs, plan_rows(case.rows(), inputs)).logprobs_T.sum().backward()
    every = np.ones(len(MIXED), np.bool_)
    kl_full(inputs, reference.inputs(), plan_full(case.rows(), every, inputs)).sum().backward()
    assert case.hidden.grad is not None
    assert torch.equal(main_grad, drawn_sum())


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(PADDED, WIDTH - 1), torch.zeros(WIDTH, PADDED).t(), torch.zeros(PADDED, WIDTH, dtype=torch.bfloat16)],
)
def test_what_is_no_sum_of_gradients_of_the_head_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ContractError, match=r"wrong_shape(.|\n)*main_grad"):
        entered(make_case(SETS), wrong)


def test_a_pass_without_gradient_leaves_the_sum_as_it_was() -> None:
    case, main_grad = make_case(MIXED), drawn_sum()
    with torch.no_grad():
        score_kept(entered(case, main_grad), plan_rows(case.rows(), case.inputs()))
    listed_nothing = torch.zeros(len(MIXED), dtype=torch.bool)
    none = score_kept(entered(case, main_grad), plan_rows(case.rows(listed_nothing), case.inputs()))
    none.logprobs_T.sum().backward()
    assert torch.equal(main_grad, drawn_sum())
