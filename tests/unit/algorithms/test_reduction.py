"""The mean over trained tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.algorithms.losses import token_mean
from moerl.errors import ContractError


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_microbatches_add_up_to_the_mean_over_the_batch(tokens: list[tuple[float, bool]], cuts: list[int]) -> None:
    loss = torch.tensor([value for value, _ in tokens], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([trained for _, trained in tokens])
    num_trained = max(int(mask.sum()), 1)
    whole = token_mean(loss, mask, num_trained)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    parts = [token_mean(loss[start:end], mask[start:end], num_trained) for start, end in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    (gradient,) = torch.autograd.grad(torch.stack(parts).sum(), loss)
    torch.testing.assert_close(gradient, mask.double() / num_trained)


def test_untrained_tokens_do_not_count_even_where_they_are_not_finite() -> None:
    loss = torch.tensor([2.0, float("inf"), 4.0])
    assert float(token_mean(loss, torch.tensor([True, False, True]), 2)) == 3.0


@pytest.mark.parametrize("denominator", [0, -1, float("nan")])
def test_a_batch_with_nothing_to_train_on_is_refused(denominator: float) -> None:
    with pytest.raises(ContractError, match="no_trained_token"):
        token_mean(torch.zeros(1), torch.zeros(1, dtype=torch.bool), denominator)
