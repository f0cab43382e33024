"""Base of the ``algorithm`` section of a configuration, which is the algorithm itself: settings and two formulas.

Loads no torch: a section is read in the command line. Methods that compute import `moerl.algorithms.toolbox`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from moerl.sections import Section

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyLoss, PolicyRows, RewardedBatch, Tensor


class AlgorithmSection(Section):
    """Base of every algorithm; offers `moerl.algorithms.policy.Algorithm`. A subclass gives `name` a literal type and
    adds its keys."""

    name: Any

    @property
    def reference_kl(self) -> Literal["kept", "full"] | None:
        """Ids that the KL to the reference sums over; None where no reference model is needed."""
        return None

    def check_files(self) -> None:
        """Checks what the keys name, as far as that needs no torch. Raises `ConfigError`."""

    def load(self) -> None:
        """Imports what the keys name, so that errors come before a model is built. Raises `ConfigError`."""

    @abstractmethod
    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        """float32 [B]: one advantage per rollout, of all its sampled tokens."""

    @abstractmethod
    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        """The loss of one microbatch, with its denominator."""
