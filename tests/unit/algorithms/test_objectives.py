"""Objectives, corrections and reductions: against loops and finite differences.

Other implementations: `tests/unit/algorithms/test_golden.py`.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from policy_rows import LONGEST, PRESETS, policy_rows, preset, rewarded_batch, sequence_of_rows
from torch import Tensor

from moerl.algorithms.group_policy import GroupPolicy
from moerl.algorithms.policy import PolicyRows, SampledTokens
from moerl.errors import ConfigError

LENGTHS = (5, 1, 7, 3)


def random_rows(seed: int = 0, *, far: float = 0.3) -> PolicyRows:
    """Sequences with untrained rows in them, float64, advantages of both signs, one value per response."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    total = sum(LENGTHS)
    proximal_T = -normal(total).abs()
    advantages_T = normal(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask_T = torch.rand(total, generator=generator) > 0.25
    mask_T[[0, 5, 6, 13]] = True
    return policy_rows(
        (proximal_T + far * normal(total)).requires_grad_(),
        lengths=LENGTHS,
        proximal_T=proximal_T,
        rollout_T=proximal_T + far * normal(total),
        advantages_T=advantages_T,
        mask_T=mask_T,
    )


def loss_and_gradient(algorithm: GroupPolicy, rows: PolicyRows) -> tuple[Tensor, Tensor]:
    loss = algorithm.compute_loss(rows).loss
    return loss.detach(), torch.autograd.grad(loss, rows.trainer_logprobs_T)[0]


PLAIN = {"importance": "off"}


# --- loops -----------------------------------------------------------------------------------------------------------


def responses(rows: PolicyRows) -> list[list[int]]:
    """Trained rows of each response."""
    ids = sequence_of_rows(rows.sequences).tolist()
    return [[t for t, i in enumerate(ids) if i == n and rows.loss_mask_T[t]] for n in range(len(LENGTHS))]


def looped_weights(rows: PolicyRows, algorithm: GroupPolicy) -> list[float]:
    """Importance weights of every row, written out one by one."""
    out = [0.0] * len(rows.loss_mask_T)
    for trained in responses(rows):
        logs = [float(rows.proximal_logprobs_T[t] - rows.rollout_logprobs_T[t]) for t in trained]
        for t, log in zip(trained, logs, strict=True):
            mean = sum(logs) / len(logs)
            value = {"token": log, "sequence": sum(logs), "geometric": mean, "off": 0.0}[algorithm.importance]
            weight, low, high = math.exp(value), algorithm.importance_floor, algorithm.importance_cap
            inside = low <= weight <= high
            if not inside:
                weight = 0.0 if algorithm.importance_outside == "drop" else min(max(weight, low), high)
            if algorithm.sequence_band is not None:
                edge = 1.0 + algorithm.sequence_band
                weight *= 1.0 / edge <= math.exp(mean) <= edge
            if algorithm.opsm_delta is not None and rows.advantages_T[t] < 0.0:
                far = [float((rows.rollout_logprobs_T - rows.trainer_logprobs_T.detach())[s]) for s in trained]
                weight *= sum(far) / len(far) <= algorithm.opsm_delta
            out[t] = weight
    return out


CORRECTIONS: list[dict[str, Any]] = [
    {"importance": "token"},
    {"importance": "sequence"},
    {"importance": "geometric", "importance_floor": 0.9},
    {"importance": "off"},
    {"importance": "token", "importance_floor": 0.8, "importance_cap": 1.3, "importance_outside": "drop"},
    {"importance": "sequence", "importance_floor": 0.5, "importance_cap": 1.5, "importance_outside": "drop"},
    {"importance": "off", "sequence_band": 0.1},
    {"importance": "token", "opsm_delta": 0.05},
]


@pytest.mark.parametrize("changes", CORRECTIONS, ids=str)
def test_corrections_equal_a_loop_over_responses(changes: dict[str, Any]) -> None:
    algorithm, seen = preset("grpo", **changes), set()
    for seed in range(4):
        rows = random_rows(seed)
        weights_T = algorithm.weights(rows)
        expected = looped_weights(rows, algorithm)
        for t in torch.nonzero(rows.loss_mask_T)[:, 0].tolist():
            assert float(weights_T[t]) == pytest.approx(expected[t], rel=1e-9)
            seen.add(round(expected[t], 6))
        assert not weights_T.requires_grad
    # A correction that never did anything would pass any comparison.
    assert len(seen) > 1 or changes == {"importance": "off"}


@pytest.mark.parametrize("changes", CORRECTIONS, ids=str)
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "gmpo", "sapo", "dppo", "clip_cov", "kl_cov"])
def test_corrections_go_with_every_objective_and_leave_denominators_alone(name: str, changes: dict[str, Any]) -> None:
    """The loss with weights is that of its tokens, each times its weight, over the same numbers."""
    rows = random_rows()
    plain = preset(name, **CORRECTIONS[3]).compute_loss(rows).losses_T
    algorithm = preset(name, reduction="token_mean", reduction_length=None, **changes)
    assert plain is not None
    expected = (plain * algorithm.weights(rows)).sum() / rows.loss_mask_T.sum()
    torch.testing.assert_close(algorithm.compute_loss(rows).loss, expected)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    algorithm, rows = preset("gmpo", clip_low=0.2, clip_high=0.2, **PLAIN), random_rows()
    parts = []
    for trained in responses(rows):
        advantage, product = float(rows.advantages_T[trained[0]]), 1.0
        for t in trained:
            ratio = math.exp(float((rows.trainer_logprobs_T.detach() - rows.proximal_logprobs_T)[t]))
            cut = min(max(ratio, math.exp(-0.2)), math.exp(0.2))
            # The less favourable of the two, as in PPO.
            product *= min(ratio, cut) if advantage > 0 else max(ratio, cut)
        parts.append(-(product ** (1.0 / len(trained))) * advantage)
    loss, _ = loss_and_gradient(algorithm, rows)
    assert float(loss) == pytest.approx(sum(parts) / len(parts), rel=1e-9)


def test_dual_clip_bounds_what_a_bad_token_adds() -> None:
    rows = random_rows(far=2.0)
    plain, dual = (preset("grpo", dual_clip=c, **PLAIN).compute_loss(rows) for c in (None, 1.5))
    assert plain.losses_T is not None
    assert dual.losses_T is not None
    assert dual.clipped_T is not None
    bad_T = (rows.advantages_T < 0.0) & rows.loss_mask_T
    limit_T = -1.5 * rows.advantages_T
    expected_T = torch.where(bad_T, torch.minimum(plain.losses_T, limit_T), plain.losses_T)
    torch.testing.assert_close(dual.losses_T, expected_T)
    cut_T = bad_T & (plain.losses_T > limit_T)
    assert bool(cut_T.any())
    assert bool(dual.clipped_T[cut_T].all())


# --- every preset ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    algorithm, rows = preset(name), random_rows()
    _, gradient_T = loss_and_gradient(algorithm, rows)

    def loss_at(trainer_T: Tensor) -> float:
        changed = replace(rows, trainer_logprobs_T=trainer_T)
        if name == "cispo":  # its weights have no gradient, so they stay where they are
            ratio_T = (rows.trainer_logprobs_T - rows.proximal_logprobs_T).detach().exp().clamp(0.0, 1.28)
            losses_T = -algorithm.weights(rows) * ratio_T * rows.advantages_T * trainer_T
            return float(losses_T[rows.loss_mask_T].sum() / rows.loss_mask_T.sum())
        return float(algorithm.compute_loss(changed).loss)

    step, at_T = 1e-6, rows.trainer_logprobs_T.detach()
    for t in range(len(at_T)):
        move_T = torch.zeros_like(at_T)
        move_T[t] = step
        slope = (loss_at(at_T + move_T) - loss_at(at_T - move_T)) / (2 * step)
        assert float(gradient_T[t]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("name", PRESETS)
def test_what_stands_on_untrained_rows_changes_nothing(name: str) -> None:
    algorithm, rows = preset(name, sequence_band=0.2, opsm_delta=0.1), random_rows()
    loss, gradient_T = loss_and_gradient(algorithm, rows)
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    for key in ("trainer_logprobs_T", "proximal_logprobs_T", "rollout_logprobs_T", "advantages_T"):
        spoilt_T = values[key].detach().clone()
        spoilt_T[~rows.loss_mask_T] = float("nan")
        values[key] = spoilt_T.requires_grad_(key == "trainer_logprobs_T")
    again, gradient_again_T = loss_and_gradient(algorithm, PolicyRows(**values))
    assert float(again) == float(loss)
    assert torch.equal(gradient_again_T, gradient_T)
    assert bool((gradient_T[~rows.loss_mask_T] == 0.0).all())


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", PRESETS)
def test_microbatches_add_up_to_the_batch(name: str, reduction: str) -> None:
    length = {"reduction_length": LONGEST if reduction == "constant" else None}
    algorithm, rows = preset(name, reduction=reduction, **length), random_rows()
    loss, gradient_T = loss_and_gradient(algorithm, rows)
    parts, starts = [], [0, LENGTHS[0], sum(LENGTHS)]
    for part, (start, end) in zip((LENGTHS[:1], LENGTHS[1:]), pairwise(starts), strict=True):
        given = {f"{key}_T": getattr(rows, f"{key}_logprobs_T")[start:end].detach() for key in ("proximal", "rollout")}
        given |= {f"{key}_T": getattr(rows, f"{key}_T")[start:end] for key in ("advantages", "draws")}
        given["mask_T"] = rows.loss_mask_T[start:end]
        leaf_T = rows.trainer_logprobs_T[start:end].detach().requires_grad_()
        parts.append(
            loss_and_gradient(algorithm, replace(policy_rows(leaf_T, lengths=part, **given), totals=rows.totals))
        )
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient_T)


def test_clip_cov_leaves_out_the_share_that_it_was_told_to() -> None:
    """Leaves out about 80 of 4,000 tokens, 2 %, all with a covariance between the bounds."""
    generator = torch.Generator().manual_seed(5)
    advantages_T, rollout_T = torch.randn(2, 4000, generator=generator).double()
    algorithm = preset("clip_cov", cov_share=0.02, cov_low=0.5, cov_high=1.5)
    facts = algorithm.batch_facts(SampledTokens(advantages_T, rollout_T))
    rows = policy_rows(
        rollout_T.clone().requires_grad_(), proximal_T=rollout_T, rollout_T=rollout_T, advantages_T=advantages_T
    )
    rows = replace(rows, totals=replace(rows.totals, facts=facts))
    losses_T = algorithm.compute_loss(rows).losses_T
    assert losses_T is not None
    left_out_T = losses_T == 0.0
    cov_T = (advantages_T - advantages_T.mean()) * (rollout_T - rollout_T.mean())
    assert bool(((cov_T > 0.5) & (cov_T < 1.5))[left_out_T].all())
    assert 60 < int(left_out_T.sum()) < 100


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_leaves_out_tokens_that_have_moved_too_far_in_the_direction_of_their_advantage(kind: str) -> None:
    low, high, left_out = 0.03, 0.05, 0
    for seed in range(3):
        rows = random_rows(seed)
        algorithm = preset("dppo", divergence=kind, divergence_low=low, divergence_high=high, importance="token")
        found = algorithm.compute_loss(rows)
        assert found.losses_T is not None
        assert found.clipped_T is not None
        for t in torch.nonzero(rows.loss_mask_T)[:, 0].tolist():
            logs = (rows.trainer_logprobs_T, rows.rollout_logprobs_T)
            p, q = (min(1.0, math.exp(float(each[t].detach()))) for each in logs)
            if kind == "tv":
                distance = abs(p - q)
            elif p == 1.0:
                distance = 0.0 if q == 1.0 else math.inf
            else:
                distance = q * math.log(q / p) + (1 - q) * (math.log((1 - q) / (1 - p)) if q < 1 else 0.0)
            advantage = float(rows.advantages_T[t])
            far = (advantage > 0 and p > q and distance > high) or (advantage < 0 and p < q and distance > low)
            ratio = math.exp(float((rows.trainer_logprobs_T.detach() - rows.proximal_logprobs_T)[t]))
            weight = min(math.exp(float(rows.proximal_logprobs_T[t] - rows.rollout_logprobs_T[t])), 20.0)
            expected = 0.0 if far else -weight * ratio * advantage
            assert float(found.losses_T[t].detach()) == pytest.approx(expected, rel=1e-6)
            assert bool(found.clipped_T[t]) == far
            left_out += far
    assert 3 < left_out < 30


def test_an_entropy_bonus_is_taken_from_the_loss_with_its_gradient() -> None:
    rows = random_rows()
    entropy_T = torch.rand(len(rows.loss_mask_T), dtype=torch.float64).requires_grad_()
    rows = replace(rows, entropy_T=entropy_T)
    plain, bonus = (preset("grpo", entropy_coef=coef).compute_loss(rows).loss for coef in (0.0, 0.3))
    mask_T = rows.loss_mask_T.double()
    torch.testing.assert_close(bonus, plain - 0.3 * (entropy_T * mask_T).sum() / mask_T.sum())
    (gradient_T,) = torch.autograd.grad(bonus, entropy_T)
    torch.testing.assert_close(gradient_T, -0.3 * mask_T / mask_T.sum())


def test_a_kl_in_the_reward_changes_advantages_and_not_the_loss() -> None:
    batch = replace(
        rewarded_batch([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [5, 4, 3, 2]), kl_B=torch.tensor([2.0, 0.5, 0.0, 1.0])
    )
    algorithm = preset("rloo", kl_coef=0.1, kl_in="reward")
    assert algorithm.compute_advantages(batch).tolist() == pytest.approx([0.85, -0.85, 1.1, -1.1])
    plain, penalised = (
        preset("rloo", **changes).compute_loss(random_rows()).loss
        for changes in ({}, {"kl_coef": 0.1, "kl_in": "reward"})
    )
    assert plain.item() == penalised.item()


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_says_what_it_consists_of(name: str) -> None:
    text = preset(name).describe()
    assert text.startswith("A = ")
    assert "; loss = -" in text
    assert text != preset(name, importance_cap=7.0, importance="geometric").describe()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"reduction": "constant"}, "algorithm.reduction"),
        ({"reduction_length": 8}, "algorithm.reduction"),
        ({"importance": "off", "importance_floor": 0.5}, "algorithm.importance"),
        ({"importance_outside": "drop", "importance_cap": 1.0}, "algorithm.importance_outside"),
        ({"whiten": True}, "algorithm.whiten"),
        ({"credit": "turn", "kl_in": "reward", "kl_coef": 0.1}, "algorithm.credit"),
        ({"credit": "agent", "pass_k": 2, "normalize_std": False}, "algorithm.pass_k"),
        ({"baseline": "none"}, "algorithm.baseline"),
        ({"pass_k": 4}, "algorithm.pass_k"),
        ({"pass_k": 9, "normalize_std": False}, "algorithm.pass_k"),
        ({"kl_in": "reward"}, "algorithm.kl_in"),
        ({"overlong_buffer": 4}, "algorithm.overlong_buffer"),
        ({"overlong_buffer": 9, "overlong_limit": 8}, "algorithm.overlong_buffer"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preset("grpo", **changes)
    assert str(caught.value).startswith(f"{key}: does not go with ")
