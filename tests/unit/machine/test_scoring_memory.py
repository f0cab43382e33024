"""Memory of the scores of `moerl diagnose`, and where weights rest."""

from __future__ import annotations

from typing import Any

import pytest
from factories import QWEN3_30B

from moerl.errors import ConfigError
from moerl.machine.memory import total_parameters
from moerl.machine.scoring_memory import ScoringMemory, plan_scoring
from moerl.models.description import describe

MODEL = describe(QWEN3_30B, "config.json", None)
WEIGHTS = 2 * total_parameters(MODEL)
DEVICE = 80_000_000_000


def plan(**changes: Any) -> ScoringMemory:
    given = {"element_bytes": 2, "num_models": 1, "longest": 8192, "host_bytes": 10**12, "device_bytes": DEVICE}
    return plan_scoring(MODEL, **{**given, **changes})


def test_30b_and_its_finer_arithmetic_fit_on_one_device_of_80_gb() -> None:
    memory = plan()
    assert (memory.held, memory.is_streamed) == (1, False)
    assert memory.weights_bytes == WEIGHTS
    assert memory.weights_bytes + memory.lent_bytes + memory.pass_bytes < 0.9 * DEVICE
    # A layer has 128 experts of 3 x 2048 x 768; attention and router are less than a thirtieth of it.
    assert 1.0 <= memory.lent_bytes / (128 * 3 * 2048 * 768 * (2 + 4)) < 1.04


def test_of_several_checkpoints_as_many_are_held_as_fit() -> None:
    assert plan(num_models=3).held == 1
    assert plan(num_models=3, device_bytes=2 * DEVICE).held == 2
    assert plan(num_models=3, device_bytes=4 * DEVICE).held == 3


def test_what_does_not_fit_on_the_device_rests_on_the_host() -> None:
    memory = plan(element_bytes=4, num_models=3)
    assert memory.is_streamed
    assert memory.weights_bytes == 2 * WEIGHTS
    assert memory.held == 3
    assert plan(element_bytes=4, num_models=3, host_bytes=int(4.5 * WEIGHTS)).held == 2


def test_without_a_device_the_host_holds_and_computes() -> None:
    memory = plan(device_bytes=None, num_models=2, host_bytes=int(2 * WEIGHTS))
    assert (memory.held, memory.is_streamed) == (1, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"device_bytes": None, "host_bytes": WEIGHTS},
        {"element_bytes": 4, "host_bytes": 2 * WEIGHTS},
        {"longest": 10_000_000},
    ],
    ids=["too small a host", "too small a host behind a device", "a pass that does not fit"],
)
def test_what_fits_nowhere_is_refused_before_it_is_loaded(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)does not fit.*GB of weights.*--dtype bfloat16"):
        plan(**changes)


def test_the_plan_is_said_in_one_line() -> None:
    assert plan(num_models=2).text("bfloat16").startswith("memory: 61.1 GB of weights in bfloat16, 1 of 2 models at a")
    said = plan(element_bytes=4).text("float32")
    assert "122.1 GB of weights in float32 on the host, which go to the device layer by layer" in said
