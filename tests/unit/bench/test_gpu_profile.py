"""Calls of a step, counted without a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
NUMBERS = torch.arange(6.0)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("_gpu_profile")


@pytest.mark.parametrize(
    "read",
    [
        lambda: NUMBERS.sum().item(),
        lambda: NUMBERS.nonzero(),
        lambda: NUMBERS.unique(),
        lambda: NUMBERS[NUMBERS > 2],
        lambda: NUMBERS.masked_select(NUMBERS > 2),
        lambda: bool(NUMBERS.any()),
    ],
)
def test_whatever_needs_a_value_on_the_host_is_a_synchronisation(counting: Any, read: Callable[[], object]) -> None:
    assert counting.count_calls(read, "cpu").synchronisations == 1


def test_operations_are_launches_and_views_are_none(counting: Any) -> None:
    calls = counting.count_calls(lambda: (NUMBERS.view(2, 3).t() + 1).mul(2), "cpu")
    assert (calls.launches, calls.synchronisations, calls.copies) == (2, 0, 0)
    assert "aten::mul" in calls.table
    assert [result.name for result in calls.results("a step")] == ["a step: launches", "a step: synchronisations"]
