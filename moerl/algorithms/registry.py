"""The seam between the trainer and the algorithms: what one must offer, and how it is made from a
configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Protocol

from torch import Tensor

from moerl.algorithms.grpo import GRPO, TokenLosses
from moerl.algorithms.losses import PolicyLossInputs
from moerl.errors import ConfigError


class Algorithm(Protocol):
    """Turns rewards into advantages and log-probs into token losses."""

    @property
    def needs_reference(self) -> bool: ...

    def advantages(self, rewards_B: Tensor, group_index_B: Tensor) -> Tensor: ...

    def token_losses(self, inputs: PolicyLossInputs) -> TokenLosses: ...


ALGORITHMS = {"grpo": GRPO}


def make_algorithm(name: str, **hyperparameters: float | bool) -> Algorithm:
    """The named algorithm. Raises `ConfigError` for an unknown name or hyperparameter, or a value out of
    range."""
    if name not in ALGORITHMS:
        raise ConfigError(
            "algorithm.name is unknown", seen=name, expected=sorted(ALGORITHMS), remedy="choose one of these"
        )
    known = {field.name for field in fields(ALGORITHMS[name])}
    unknown = sorted(set(hyperparameters) - known)
    if unknown:
        raise ConfigError(
            f"algorithm.{unknown[0]} is not a hyperparameter of {name}",
            seen=unknown,
            expected=sorted(known),
            remedy="remove it or correct its spelling",
        )
    return ALGORITHMS[name](**hyperparameters)  # type: ignore[arg-type]
