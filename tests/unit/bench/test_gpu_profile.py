"""Calls of a step, counted without a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

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


def event(start: float, end: float, device: DeviceType = DeviceType.CUDA, *, is_user_annotation: bool = False) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(time_range=span, device_type=device, is_user_annotation=is_user_annotation)


def test_a_device_is_busy_once_while_kernels_of_several_streams_overlap(counting: Any) -> None:
    events = [
        event(50.0, 60.0),
        event(0.0, 20.0),
        event(5.0, 10.0),
        event(15.0, 30.0),
        event(30.0, 35.0),
        event(0.0, 100.0, DeviceType.CPU),
        event(0.0, 100.0, is_user_annotation=True),
    ]
    assert counting.busy_seconds(events) == pytest.approx(45e-6)
    assert counting.busy_seconds([]) == 0.0
