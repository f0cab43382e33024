"""Common base of the built-in algorithms: advantages, corrections, KL and reduction. Each algorithm adds its objective.

    loss_t = w_t objective_t + kl_coef KL_t - entropy_coef entropy_t
    loss   = reduction of loss_t over the trained tokens of the batch

Log-ratios are of two kinds. The ratio r of an objective compares the weights being trained with those that the batch
met (`trainer - proximal`) and has a gradient. The weight w compares the weights that the batch met with the engine that
sampled (`proximal - rollout`) and has no gradient. All are inside the support that each token was drawn from.
Denominators count every trained token or sequence, also those to which a correction gives the weight 0: what is dropped
makes the step smaller, and moves no other token's share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.section import Algorithm
from moerl.errors import ConfigError
from moerl.sections import Count, NonNegative, Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyLoss, PolicyRows, RewardedBatch, Tensor, TokenLosses


class GroupPolicy(Algorithm):
    """Settings that all built-in algorithms have. A subclass gives `name` its literal type and computes
    `token_losses`."""

    credit: Literal["episode", "agent", "turn"] = Field(
        default="episode",
        description="What an advantage belongs to: every trajectory of an episode, compared with its group; each agent,"
        " compared with the same agent in the group; or each turn, by the reward that was not earned before it,"
        " compared with the same turn of the same agent.",
    )
    overlong_buffer: Count | None = Field(
        description="Tokens before overlong_limit over which a reward falls by overlong_factor (DAPO); null = none."
    )
    overlong_limit: Count | None = Field(description="Longest response, usually rollout.max_new_tokens.")
    overlong_factor: NonNegative = Field(description="What a response loses at overlong_limit tokens or more.")
    baseline: Literal["mean", "leave_one_out", "none"] = Field(
        description="What a reward is compared with: the mean of its group, the mean of the others in it (RLOO), or"
        " nothing."
    )
    pass_k: Annotated[int, Field(ge=2)] | None = Field(
        description="Advantages are what a response adds to the best of pass_k of its group (pass@k), in place of"
        " baseline; null = rewards count one by one."
    )
    normalize_std: bool = Field(description="Divide advantages by the standard deviation of their group.")
    whiten: bool = Field(
        description="Shift and scale advantages to mean 0 and deviation 1 over all trained tokens of the batch"
        " (REINFORCE++)."
    )
    proximal: Literal["pass", "interpolated"] = Field(
        description="Log-probs of the weights that a batch met, once it has been updated on: pass = computed before the"
        " first update; interpolated = between the sampler's and the trainer's, by updates since, without a pass."
    )
    importance: Literal["token", "sequence", "geometric", "off"] = Field(
        description="Weight between sampler and trainer: of each token, the product over its response, the geometric"
        " mean over it, or none."
    )
    importance_cap: Annotated[float, Field(ge=1.0)] = Field(description="Largest importance weight, at least 1.")
    importance_floor: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        description="Smallest importance weight, at most 1; 0 = none."
    )
    importance_outside: Literal["clip", "drop"] = Field(
        description="What happens to weights beyond cap and floor: they are cut to these (truncated importance"
        " sampling), or become 0 (IcePop, masked importance sampling)."
    )
    sequence_band: Positive | None = Field(
        description="Responses are dropped whose geometric mean importance weight is not within 1 / (1 + sequence_band)"
        " and 1 + sequence_band; null = none."
    )
    opsm_delta: NonNegative | None = Field(
        description="Responses with a negative advantage are dropped if the mean log-prob of the sampler less that of"
        " the trainer is above opsm_delta nats (off-policy sequence masking); null = none."
    )
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        description="Mean over all trained tokens; mean over responses of the mean over their tokens; or sum over"
        " tokens divided by responses x reduction_length."
    )
    reduction_length: Count | None = Field(description="Tokens that reduction=constant divides each response by.")
    entropy_coef: NonNegative = Field(
        description="Weight of the entropy of the distribution that each token was drawn from, which is rewarded."
    )
    kl_coef: NonNegative = Field(
        description="Weight of the exact KL to the starting model, in nats; 0 = no reference model."
    )
    kl_in: Literal["loss", "reward"] = Field(
        description="loss = the KL of each token is added to its loss, with its gradient; reward = the sum over a"
        " response is taken from its reward before advantages are computed, which costs a pass over the batch."
    )
    kl_support: Literal["kept", "full"] = Field(
        description="Ids that the KL sums over: kept = each token's kept set, both models renormalised inside it (the"
        " full vocabulary if nothing was cut); full = always the full vocabulary."
    )

    def check(self, *, group_size: int, minibatches: int) -> None:
        """Refuses combinations of keys that say nothing, or that contradict each other."""
        for keys, expected in self._contradictions(group_size, minibatches):
            others = " and ".join(f"algorithm.{key}" for key in keys[1:]) or "the other settings"
            raise ConfigError(
                f"algorithm.{keys[0]}: does not go with {others}",
                seen=", ".join(f"{key}={getattr(self, key)}" for key in keys),
                expected=expected,
                remedy="change one of them; docs/algorithms.md lists combinations that have a name",
            )

    def _contradictions(self, group_size: int, minibatches: int) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields keys that contradict each other, and what to set instead."""
        if self.whiten and self.normalize_std:
            yield ("whiten", "normalize_std"), "one of them: deviations of the batch or of each group"
        if self.pass_k is not None:
            if self.baseline != "mean" or self.normalize_std:
                expected = (
                    "baseline=mean and normalize_std=false, which stand for nothing there: pass@k has its own baseline"
                )
                yield ("pass_k", "baseline", "normalize_std"), expected
            if self.pass_k > group_size:
                yield ("pass_k",), f"at most {group_size}, the responses of a group that are trained"
            if self.credit != "episode":
                yield ("pass_k", "credit"), "credit=episode: pass@k is of whole episodes"
        if self.credit == "turn" and self.kl_in == "reward":
            yield ("credit", "kl_in"), "kl_in=loss: the KL of a response is not divided into turns"
        if self.baseline == "none" and self.normalize_std:
            expected = "normalize_std=false without a baseline: equal rewards have a deviation of 0"
            yield ("baseline", "normalize_std"), expected
        if (self.overlong_buffer is None) != (self.overlong_limit is None):
            yield ("overlong_buffer", "overlong_limit"), "both or neither"
        if (self.overlong_buffer or 0) > (self.overlong_limit or 0):
            yield ("overlong_buffer", "overlong_limit"), "a buffer of at most overlong_limit"
        if (self.reduction == "constant") != (self.reduction_length is not None):
            yield ("reduction", "reduction_length"), "a reduction_length with reduction=constant, and only with it"
        if self.importance == "off" and (self.importance_outside == "drop" or self.importance_floor > 0.0):
            expected = "importance_outside=clip and importance_floor=0 if there is no weight"
            yield ("importance", "importance_outside", "importance_floor"), expected
        if self.importance_outside == "drop" and self.importance_cap == 1.0:
            expected = "a cap above 1 if weights beyond it are dropped: with 1, that is about half of all"
            yield ("importance_outside", "importance_cap"), expected
        if self.proximal == "interpolated" and minibatches == 1:
            expected = "rl.minibatches above 1: with one update per batch the proximal log-probs are the trainer's own"
            yield ("proximal",), expected
        if self.kl_in == "reward" and type(self).batch_facts is not Algorithm.batch_facts:
            yield ("kl_in", "name"), "kl_in=loss: covariances are taken from advantages before any pass"
        if self.kl_in == "reward" and self.kl_coef == 0.0:
            yield ("kl_in", "kl_coef"), "a kl_coef above 0, or kl_in=loss"

    @property
    def reference_kl(self) -> Literal["kept", "full"] | None:
        return self.kl_support if self.kl_coef > 0.0 else None

    @property
    def interpolates_proximal(self) -> bool:
        return self.proximal == "interpolated"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0.0 and self.kl_in == "reward"

    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        from moerl.algorithms import toolbox

        rewards_B = batch.rewards_B
        if self.overlong_buffer is not None and self.overlong_limit is not None:
            soft = (self.overlong_limit, self.overlong_buffer, self.overlong_factor)
            rewards_B = toolbox.less_when_overlong(rewards_B, batch.num_tokens_B, *soft)
        if self.kl_in == "reward":
            assert batch.kl_B is not None, "a KL in the reward, and the batch has none"
            rewards_B = rewards_B - self.kl_coef * batch.kl_B
        units = toolbox.credit_units(batch, rewards_B, self.credit)
        if self.pass_k is not None:
            compared = (units.rewards_U, units.group_index_U)
            advantages_U = toolbox.pass_at_k_advantages(*compared, self.pass_k, units.episode_index_U)
        else:
            advantages_U = toolbox.group_advantages(
                units.rewards_U,
                units.group_index_U,
                normalize_std=self.normalize_std,
                baseline=self.baseline,
                episode_index_B=units.episode_index_U,
            )
        if self.whiten:
            advantages_U = toolbox.whitened(advantages_U, units.num_tokens_U)
        return advantages_U.repeat_interleave(units.num_tokens_U) if self.credit == "turn" else advantages_U

    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        from moerl.algorithms import toolbox

        weights_T = self.weights(rows)
        found = self.token_losses(rows, weights_T)
        losses_T = found.loss_T
        if self.kl_coef > 0.0 and self.kl_in == "loss":
            losses_T = toolbox.kl_penalty(losses_T, rows, self.kl_coef)
        if self.entropy_coef > 0.0:
            losses_T = losses_T - self.entropy_coef * rows.entropy_T.masked_fill(~rows.loss_mask_T, 0.0)
        loss = toolbox.reduced(losses_T, rows, self.reduction, self.reduction_length)
        return toolbox.PolicyLoss(loss, losses_T, found.clipped_T, weights_T)

    def describe(self) -> str:
        return "; ".join([self._advantage(), f"loss = {self.objective()}{self._terms()}", self._weight(), self._mean()])

    def _advantage(self) -> str:
        reward = "r" if not self.kl_in_reward else f"r - {self.kl_coef:g} KL({self.kl_support})"
        if self.overlong_buffer is not None:
            reward = f"{reward} (less up to {self.overlong_factor:g} in the last {self.overlong_buffer} tokens)"
        group = {"episode": "group", "agent": "agent in the group", "turn": "turn in the group"}[self.credit]
        reward = f"{reward} - earned before the turn" if self.credit == "turn" else reward
        against = {"mean": f" - mean({group})", "leave_one_out": f" - mean(others of the {group})", "none": ""}
        advantage = f"A = {reward}{against[self.baseline]}"
        if self.pass_k is not None:
            advantage = f"A = what {reward} adds to the best of {self.pass_k}"
        advantage += f", over std({group})" if self.normalize_std else ""
        return advantage + (", whitened over the tokens of the batch" if self.whiten else "")

    def _terms(self) -> str:
        kl = f" + {self.kl_coef:g} KL({self.kl_support})" if self.kl_coef > 0.0 and self.kl_in == "loss" else ""
        return kl + (f" - {self.entropy_coef:g} entropy" if self.entropy_coef > 0.0 else "")

    def _weight(self) -> str:
        ratio = {
            "token": "proximal / rollout",
            "sequence": "product over the response of proximal / rollout",
            "geometric": "geometric mean over the response of proximal / rollout",
            "off": "1",
        }
        weight = f"w = {ratio[self.importance]}"
        if self.importance != "off":
            verb = "cut to" if self.importance_outside == "clip" else "0 outside of"
            weight += f", {verb} [{self.importance_floor:g}, {self.importance_cap:g}]"
        if self.sequence_band is not None:
            weight += f", 0 in responses more than {self.sequence_band:g} off in the geometric mean"
        if self.opsm_delta is not None:
            weight += f", 0 where A < 0 in responses {self.opsm_delta:g} nats off"
        return weight

    def _mean(self) -> str:
        constant = f"sum over tokens / (responses x {self.reduction_length})"
        means = {"token_mean": "mean over tokens", "sequence_mean": "mean over responses of their mean"}
        return means.get(self.reduction, constant)

    @abstractmethod
    def objective(self) -> str:
        """Returns the formula of `token_losses` with the numbers in force; s stands for ratios of responses."""

    @abstractmethod
    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        """Returns the objective times the detached `weights_T`, as a loss: float32 [T], 0 on untrained tokens."""

    def weights(self, rows: PolicyRows) -> Tensor:
        """Returns the correction of every token: float32 [T], detached."""
        from moerl.algorithms import toolbox

        weights_T = toolbox.importance_weights(
            rows, self.importance, self.importance_floor, self.importance_cap, drops=self.importance_outside == "drop"
        )
        if self.sequence_band is not None:
            weights_T = weights_T * toolbox.within_band(rows, self.sequence_band)
        if self.opsm_delta is not None:
            weights_T = weights_T * toolbox.on_policy_enough(rows, self.opsm_delta)
        return weights_T
