"""Metrics of one RL step: from per-row tables of all ranks and the trajectories, to named numbers.

Runs in the controller. Names, units and meanings: docs/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from moerl.algorithms.arrays import agreement, mismatch, ratio_quantiles
from moerl.contract.ports import SamplingCosts
from moerl.contract.spans import is_of_episode
from moerl.contract.trainer import DeviceUse, RowTable, UpdateReport
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Trajectory, TurnKind
from moerl.telemetry.devices import peak_flops
from moerl.telemetry.metrics import agent_reward_metric, is_reward_name, named_reward_metric, score_metrics

MAX_RATIO_SAMPLES = 1_000_000
ENVIRONMENT_SECONDS = "environment_seconds"
"""Key of `Trajectory.timings` that the first session of every played episode has."""
MAX_AGENTS = 8
"""Agents whose reward is reported: those with most sessions."""


def disagreement(table: RowTable, *, full: bool = False) -> dict[str, float]:
    """Measures how far the trainer's log-probs are from the engine's, and how often its routers would have chosen other
    experts.

    Args:
        full: True compares the full-vocabulary log-probs, as a trainer without sampling masks would.
    """
    sums = mismatch(table.full if full else table.trainer, table.rollout)
    return {
        "mismatch/logprob_abs_mean": sums["mismatch_abs_mean"],
        "mismatch/logprob_abs_max": sums["mismatch_abs_max"],
        "mismatch/k3": sums["mismatch_k3"],
        "mismatch/ratio_mean": sums["mismatch_ratio_mean"],
        "mismatch/share_outside_tenth": sums["mismatch_outside_share"],
        "mismatch/share_above_ln2": sums["mismatch_far_share"],
        "mismatch/tokens_with_different_experts": float((table.layers_differing > 0).mean()),
        "mismatch/layers_differing_per_token": float(table.layers_differing.mean()),
    }


def policy_metrics(table: RowTable) -> dict[str, float]:
    """Returns entropy, clipping, corrections, KL, and the quantiles of the ratio trainer over rollout."""
    quantiles = ratio_quantiles(table.trainer, table.rollout, MAX_RATIO_SAMPLES)
    return {
        "policy/entropy": float(table.entropy.mean()),
        "policy/clip_fraction": float(table.clipped.mean()),
        "policy/weight_mean": float(table.weight.mean()),
        "policy/dropped_fraction": float((table.weight == 0.0).mean()),
        "policy/kl_reference": float(table.kl.mean()),
        "policy/ratio_p01": quantiles["mismatch_ratio_p01"],
        "policy/ratio_p50": quantiles["mismatch_ratio_p50"],
        "policy/ratio_p99": quantiles["mismatch_ratio_p99"],
        "policy/effective_sample_share": _effective_sample_share(table),
    }


def _effective_sample_share(table: RowTable) -> float:
    """Returns Kish's effective sample size over the number of tokens: (sum w)^2 / (n sum w^2), w = trainer / rollout
    probability. It is 1 if all ratios are equal."""
    logs = table.trainer.astype(np.float64) - table.rollout
    # The scale of the ratios cancels; without the largest one no exponential overflows.
    ratios = np.exp(logs - logs.max())
    return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns rewards by name, groups that teach nothing, length, kept sets and episodes of a batch of rollouts."""
    lengths = np.array([t.num_sampled for t in trajectories])
    sizes = np.concatenate([t.kept.sizes[t.truncated] for t in trajectories])
    metrics = {
        **_reward_metrics(trajectories),
        **_score_metrics(trajectories),
        **episode_metrics(trajectories),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([t.finish_reason is FinishReason.LENGTH for t in trajectories])),
    }
    if len(sizes):
        logmasses = np.concatenate([t.kept_logmass[t.truncated] for t in trajectories])
        metrics |= {
            "kept/size_mean": float(sizes.mean()),
            "kept/size_p99": float(np.quantile(sizes, 0.99)),
            "kept/mass_mean": float(np.exp(logmasses.astype(np.float64)).mean()),
        }
    return metrics


def _score_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the means over sampled tokens of the side scores that all trajectories have."""
    names = set.intersection(*({*trajectory.scores} for trajectory in trajectories))
    metrics = dict[str, float]()
    for name in sorted(filter(is_reward_name, names - {TURN_REWARDS})):
        scores = np.concatenate([t.scores[name][t.sampled] for t in trajectories]).astype(np.float64)
        logprobs = np.concatenate([t.rollout_logprobs[t.sampled] for t in trajectories])
        mean, gap = score_metrics(name)
        metrics |= {mean: float(scores.mean()), gap: float((logprobs - scores).mean())}
    return metrics


def _reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    named: dict[str, list[float]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.lineage.group_id, []).append(trajectory.rewards["reward"])
        for name, reward in trajectory.rewards.items():
            named.setdefault(name, []).append(reward)
    equal = sum(np.ptp(np.array(rewards, np.float32)) == 0.0 for rewards in groups.values())
    return {
        **{named_reward_metric(name): float(np.mean(rewards)) for name, rewards in named.items()},
        "reward/std": float(np.std(named["reward"])),
        "groups/zero_variance": float(equal),
        "groups/zero_variance_share": float(equal / len(groups)),
    }


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of the episodes of a batch; empty if it has none: no trajectory was played, and none has
    several turns."""
    if not any(is_of_episode(each) or ENVIRONMENT_SECONDS in each.timings for each in trajectories):
        return {}
    turns, sessions = Counter[str](), Counter[str]()
    seconds = dict[str, tuple[float, float]]()
    for each in trajectories:
        name = each.lineage.episode
        turns[name] += len(each.sampled_turns)
        sessions[name] += 1
        environment, sampling = seconds.get(name, (0.0, 0.0))
        seconds[name] = (
            environment + each.timings.get(ENVIRONMENT_SECONDS, 0.0),
            sampling + each.timings.get("sampling_seconds", 0.0),
        )
    spans = (turn for each in trajectories for turn in each.turns)
    observed = sum(turn.end - turn.start for turn in spans if turn.kind is TurnKind.OBSERVATION)
    sampled = sum(each.num_sampled for each in trajectories)
    in_environment, in_sampling = np.array([*seconds.values()]).mean(0).tolist()
    return {
        "episode/turns_mean": float(np.mean([*turns.values()])),
        "episode/turns_max": float(max(turns.values())),
        "episode/sessions_mean": float(np.mean([*sessions.values()])),
        "episode/turn_tokens_mean": sampled / turns.total(),
        "episode/observed_share": observed / (observed + sampled),
        "episode/environment_seconds": in_environment,
        "episode/sampling_seconds": in_sampling,
        **_rewards_by_agent(trajectories),
    }


def _rewards_by_agent(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean reward of each agent that has a name; nothing if none has one."""
    rewards: dict[str, list[float]] = {}
    for each in trajectories:
        if is_reward_name(each.lineage.agent_id) and "reward" in each.rewards:
            rewards.setdefault(each.lineage.agent_id, []).append(each.rewards["reward"])
    largest = sorted(rewards, key=lambda agent: (-len(rewards[agent]), agent))[:MAX_AGENTS]
    return {agent_reward_metric(agent): float(np.mean(rewards[agent])) for agent in sorted(largest)}


def load_metrics(expert_load_LE: NDArray[np.int64]) -> dict[str, float]:
    """Returns the balance of the experts in the worst layer: most and least loaded expert, divided by the mean."""
    mean_L = expert_load_LE.mean(1)
    return {
        "experts/load_max_over_mean": float((expert_load_LE.max(1) / mean_L).max()),
        "experts/load_min_over_mean": float((expert_load_LE.min(1) / mean_L).min()),
    }


def update_metrics(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """Returns gradient norm, learning rate and skipped updates of one step."""
    done = [update.grad_norm for update in updates if not update.skipped]
    return {
        "optimizer/grad_norm": sum(done) / max(1, len(done)),
        "optimizer/lr": updates[-1].learning_rate,
        "optimizer/skipped": float(sum(update.skipped for update in updates)),
    }


def loss_metrics(loss_sum: float | None, num_tokens: int) -> dict[str, float]:
    """Returns the mean loss of a token; empty if the algorithm has no loss of each token.

    Args:
        loss_sum: sum over the tokens of all updates.
        num_tokens: trained tokens of all updates.
    """
    return {} if loss_sum is None else {"policy/loss": loss_sum / num_tokens}


def device_metrics(devices: Sequence[DeviceUse]) -> dict[str, float]:
    """Returns the peak memory of the rank that had most; empty on CPUs."""
    if not devices:
        return {}
    return {
        "memory/gpu_allocated_bytes": float(max(device.allocated_bytes for device in devices)),
        "memory/gpu_reserved_bytes": float(max(device.reserved_bytes for device in devices)),
    }


def speed_metrics(
    model_flops: float, seconds: float, num_ranks: int, devices: Sequence[DeviceUse], dtype: str
) -> dict[str, float]:
    """Returns operations per second of a rank, and their share of the slowest GPU's peak if that is known.

    Args:
        model_flops: operations of the updates of a step, over all ranks.
        seconds: time of training in the step.
        dtype: dtype of the trainer; a peak is known for bfloat16 alone.
    """
    speed = model_flops / seconds / num_ranks
    metrics = {"throughput/model_flops_per_second": speed}
    peaks = [peak_flops(device.name) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    if known and len(known) == len(peaks) and dtype == "bfloat16":
        metrics["throughput/mfu"] = speed / min(known)
    return metrics


def mean_of(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean over the minibatches of a step, of the metrics that all of them have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: sum(part[name] for part in parts) / len(parts) for name in names}


def agreement_metrics(agreement_LS: NDArray[np.float64], live_rows_L: NDArray[np.int64]) -> dict[str, float]:
    """Compares the trainer's own choice of experts with the recorded one, over all layers and ranks.

    Args:
        agreement_LS: sums over all ranks, as in `moerl.kernels.routing`.
        live_rows_L: rows left to the router.
    """
    over_layers = agreement(agreement_LS, over_layers=True)
    metrics = {f"routing/{name}": values[0] for name, values in over_layers.items()}
    return {**metrics, "routing/live_rows": float(live_rows_L.sum())}


def per_layer(agreement_LS: NDArray[np.float64], live_rows_L: NDArray[np.int64]) -> dict[str, list[float]]:
    """Compares as `agreement_metrics` does, per MoE layer."""
    return {**agreement(agreement_LS), "live_rows": live_rows_L.astype(np.float64).tolist()}


def sampling_metrics(before: SamplingCosts, after: SamplingCosts) -> dict[str, float]:
    """Returns the metrics of weight updates and of prefix caches between two states of an engine's costs."""
    costs = {each.name: getattr(after, each.name) - getattr(before, each.name) for each in fields(before)}
    num_asked, num_cached = costs.pop("asked_tokens"), costs.pop("cached_tokens")
    metrics = {f"weights/{name}": value for name, value in costs.items()}
    return metrics | ({"rollout/prefix_hit_rate": num_cached / num_asked} if num_asked else {})
