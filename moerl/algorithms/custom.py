"""An algorithm of the user's own: a loss function, and an advantage function unless GRPO's is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from moerl.algorithms.section import Algorithm
from moerl.contract.requirements import MAX_NAMES
from moerl.errors import ConfigError
from moerl.sections import FunctionName
from moerl.user_function import check_function, load_function

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyLoss, PolicyRows, RewardedBatch, Tensor

Options = dict[str, bool | int | float | str]


class Custom(Algorithm):
    """Algorithm of two functions of the user's: ``loss(rows, **loss_options)`` returns a `PolicyLoss`,
    ``advantages(batch, **advantages_options)`` a float tensor [B], or [N] for all sampled tokens. Both run unconfined
    in processes of moerl itself."""

    name: Literal["custom"] = Field(description="Algorithm.")
    loss: FunctionName = Field(description='Your loss function, as "package.module:function".')
    loss_options: Options = Field(description="Keyword arguments of your loss function.")
    advantages: FunctionName | None = Field(
        description='Your advantage function, as "package.module:function"; null = those of GRPO with normalize_std.'
    )
    advantages_options: Options = Field(description="Keyword arguments of your advantage function.")
    kl_support: Literal["kept", "full"] | None = Field(
        description="Ids that the exact KL to the starting model sums over, which your loss gets as kl_T; null = no KL"
        " and no reference model."
    )

    scores: list[str] = Field(
        description="Names of side scores of tokens that your functions get, as scores_T and scores_N: names in"
        " scorers, or columns of the dumps of rollout=dumps."
    )

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.scores)

    @property
    def reference_kl(self) -> Literal["kept", "full"] | None:
        return self.kl_support

    def describe(self) -> str:
        given = "advantages of GRPO" if self.advantages is None else f"advantages of {self.advantages}"
        return f"loss of {self.loss}, {given}"

    def check(self, *, group_size: int, minibatches: int) -> None:
        check_function("algorithm.loss", self.loss)
        if self.advantages is not None:
            check_function("algorithm.advantages", self.advantages)
        if "" in self.scores or len({*self.scores}) < len(self.scores) or len(self.scores) > MAX_NAMES:
            raise ConfigError(
                "algorithm.scores: names of side scores",
                seen=", ".join(map(repr, self.scores)),
                expected=f"at most {MAX_NAMES} different names",
                remedy="name each score once, as in algorithm.scores=[teacher] for a column score_teacher",
            )

    def load(self) -> None:
        load_function("algorithm.loss", self.loss)
        if self.advantages is not None:
            load_function("algorithm.advantages", self.advantages)

    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        from moerl.algorithms import toolbox

        if self.advantages is None:
            episodes_B = batch.episode_index_B
            return toolbox.group_advantages(
                batch.rewards_B, batch.group_index_B, normalize_std=True, episode_index_B=episodes_B
            )
        advantages = load_function("algorithm.advantages", self.advantages)(batch, **self.advantages_options)
        if isinstance(advantages, toolbox.Tensor) and advantages.is_floating_point():
            advantages = advantages.detach().cpu().float()
        sizes = len(batch.rewards_B), int(batch.num_tokens_B.sum())
        is_tensor = isinstance(advantages, toolbox.Tensor) and advantages.is_floating_point()
        has_size = is_tensor and advantages.dim() == 1 and len(advantages) in sizes
        if not has_size or not bool(advantages.isfinite().all()):
            expected = f"a float tensor of {sizes[0]} finite numbers, one per rollout, or of {sizes[1]}, one per token"
            raise _wrong_result("algorithm.advantages", self.advantages, advantages, expected)
        return advantages

    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        from moerl.algorithms import toolbox

        policy = load_function("algorithm.loss", self.loss)(rows, **self.loss_options)
        if not isinstance(policy, toolbox.PolicyLoss):
            raise _wrong_result("algorithm.loss", self.loss, policy, "a PolicyLoss of moerl.algorithms.toolbox")
        if policy.loss.dim() or not policy.loss.requires_grad:
            expected = "a scalar with a gradient; sum over rows and divide by rows.totals"
            raise _wrong_result("algorithm.loss", self.loss, policy.loss, expected)
        return policy


def _wrong_result(key: str, name: str, seen: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"{key}: {name} returned something else",
        seen=repr(seen)[:200],
        expected=expected,
        remedy="see docs/algorithms.md for what your function gets and returns",
    )
