"""Algorithms by name."""

from __future__ import annotations

import pytest

from moerl.algorithms.grpo import GRPO
from moerl.algorithms.registry import make_algorithm
from moerl.errors import ConfigError


def test_an_algorithm_is_made_from_its_name_and_hyperparameters() -> None:
    assert make_algorithm("grpo", clip_high=0.3, normalize_std=False) == GRPO(clip_high=0.3, normalize_std=False)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name is unknown.*grpo"):
        make_algorithm("gpro")


def test_an_unknown_hyperparameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clip is not a hyperparameter of grpo"):
        make_algorithm("grpo", clip=0.2)
