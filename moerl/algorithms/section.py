"""Base of the ``algorithm`` section of a configuration, which is the algorithm itself: settings and two formulas.

Loads no torch: a section is read in the command line. Methods that compute import `moerl.algorithms.toolbox`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from moerl.sections import Section

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyLoss, PolicyRows, RewardedBatch, SampledTokens, Tensor


class Algorithm(Section):
    """Algorithm that turns rewards into advantages, and log-probs into a loss. A subclass gives `name` a literal
    type and adds its keys."""

    name: Any
    """Value of `algorithm.name` that chooses the subclass."""

    @property
    def reference_kl(self) -> Literal["kept", "full"] | None:
        """Ids that the KL to the reference sums over; None if no KL is wanted, and so no reference model is built."""
        return None

    @property
    def kl_in_reward(self) -> bool:
        """True if `compute_advantages` needs `RewardedBatch.kl_B`, which costs a pass over the batch beforehand."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the side scores of tokens that advantages or loss are computed from."""
        return ()

    @property
    def interpolates_proximal(self) -> bool:
        """True if the log-probs that a batch met are interpolated after its first update, not computed before it."""
        return False

    def describe(self) -> str:
        """Describes the computation, with the numbers in force; printed as a run starts."""
        return str(self.name)

    def check(self, *, group_size: int, minibatches: int) -> None:
        """Checks the keys together, with those of the loop, and the functions that they name, as far as that needs no
        torch.

        Raises:
            ConfigError: they do not go together.
        """

    def load(self) -> None:
        """Imports the functions that keys name, so that errors come before a model is built. Raises `ConfigError`."""

    @abstractmethod
    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        """Returns one advantage per rollout, for all its sampled tokens: float32 [B]. Unless `kl_in_reward`, it may be
        one per sampled token instead, rollout by rollout: float32 [N]."""

    def batch_facts(self, tokens: SampledTokens) -> dict[str, float]:
        """Returns finite numbers by name about all tokens of an optimizer step; `compute_loss` gets them in
        `totals.facts`."""
        return {}

    @abstractmethod
    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        """Returns the loss of one microbatch, divided by its denominator. Calls `PolicyRows.sequence_sum` equally often
        and in the same order on all ranks."""
