"""The registry of metrics: every name a run may report, with its unit and its meaning.

Sinks refuse a name that is not here. ``python -m moerl.telemetry.metrics`` prints the table of docs/metrics.md. Any
process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moerl.telemetry.metrics_texts import MISMATCH, TURNS

STAGES = ("sft", "rl", "evaluation")
"""Stages of a run, as in the `stage` of a row. Evaluations carry the number of RL steps done before them."""

SCORERS = {
    "neither": "own routing, full vocabulary",
    "kept_sets": "own routing, inside the kept sets",
    "experts": "recorded routing, full vocabulary",
    "both": "recorded routing, inside the kept sets",
}
"""Scorers of a full mismatch table: the guarantees that the trainer enforces while it scores."""

SPANS = {
    "rollout": "time of sampling, rewards, packing unless it was done ahead, and the hand-over to all ranks",
    "mismatch": "time of scoring for a mismatch table",
    "train": "time of forward, backward, proof and update; in a cold start of packing, too",
    "weights": "time of sending weights to the engine, and of waiting until it holds those before",
    "sleep": "time in which colocated servers give their memory to the trainer",
    "step": "time of the whole step, without evaluations and checkpoints; the first may have the start, too",
    "evaluation": "time of an evaluation, in its own row",
    "checkpoint": "time to start the checkpoint before this step: copying, and waiting for an earlier one",
}
"""Parts of a run whose seconds are reported, by name."""

AGES = {
    "age_0": (0, 0),
    "age_1": (1, 1),
    "age_2": (2, 2),
    "age_3": (3, 3),
    "age_4_to_7": (4, 7),
    "age_8_up": (8, math.inf),
}
"""Bins of the histogram of ages by name: first and last age, in versions."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the registry."""

    name: str
    """Key in rows of `metrics.jsonl`."""
    unit: str
    """Unit of the value; ``1`` for shares and ratios."""
    meaning: str
    """One line for docs/metrics.md."""
    deterministic: bool = True
    """True if two runs of one configuration on one machine report the same value."""


def _timed(name: str, unit: str, meaning: str) -> Metric:
    """Returns a metric whose values depend on time."""
    return Metric(name, unit, meaning, deterministic=False)


_ALL = (
    Metric(
        "reward/mean", "reward", "mean reward: of sampled responses in rl, of greedy ones to dev problems in evaluation"
    ),
    Metric("reward/std", "reward", "standard deviation of the rewards of the batch's responses"),
    Metric("accuracy/mean", "1", "share of right answers: sampled in rl, greedy on dev problems in evaluation"),
    Metric("response/length_mean", "token", "mean length of a response"),
    Metric("response/length_max", "token", "length of the longest response"),
    Metric("response/truncated", "1", "share of responses cut off at their longest length"),
    Metric(
        "episode/turns_mean", "turn", "mean turns of the policy in an episode, over all its sessions; of episodes alone"
    ),
    Metric("episode/turns_max", "turn", "turns of the episode with most"),
    Metric("episode/sessions_mean", "session", "mean sessions of an episode in which something was sampled"),
    Metric("episode/turn_tokens_mean", "token", "mean sampled tokens of a turn"),
    Metric("episode/observed_share", "1", "observed tokens over those behind the prompts, sampled and observed"),
    _timed(
        "episode/environment_seconds",
        "s",
        "mean time of an episode in which none of its sessions waited for the engine",
    ),
    _timed(
        "episode/sampling_seconds",
        "s",
        "mean time in which the engine sampled turns of an episode, without waiting for a slot; sessions side by side"
        " are summed up",
    ),
    Metric("groups/zero_variance", "group", "groups whose rewards are all equal: they teach nothing"),
    Metric("groups/zero_variance_share", "1", "the same, over all groups of the batch"),
    Metric("heldout/accuracy", "1", "share of right greedy answers on held-out problems"),
    Metric("heldout/accuracy_worked", "1", "the same, for the cold start with the first step of its working given"),
    Metric("heldout/length_mean", "token", "mean length of a greedy response to a held-out problem"),
    Metric("heldout/pass_at_k", "1", "chance that one of evaluation.samples responses to a held-out problem is right"),
    Metric("heldout/majority_at_k", "1", "chance that the answer most of these responses give is right"),
    Metric("policy/entropy", "nat", "mean entropy of the trainer's distribution that a sampled token is scored under"),
    Metric("policy/ratio_p01", "1", "1st percentile of trainer probability / rollout probability"),
    Metric("policy/ratio_p50", "1", "median of trainer probability / rollout probability"),
    Metric("policy/ratio_p99", "1", "99th percentile of trainer probability / rollout probability"),
    Metric(
        "policy/effective_sample_share",
        "1",
        "effective sample size over the number of tokens, (sum w)^2 / (n sum w^2), w = trainer probability / rollout"
        " probability",
    ),
    Metric("policy/loss", "1", "mean loss of a trained token, before `algorithm.reduction`; over the step's updates"),
    Metric("policy/clip_fraction", "1", "share of tokens whose ratio was clipped"),
    Metric("policy/weight_mean", "1", "mean correction of a token, w in docs/algorithms.md"),
    Metric("policy/dropped_fraction", "1", "share of tokens that corrections leave out of the loss"),
    Metric(
        "policy/kl_reference", "nat", "mean exact KL to the reference model, as algorithm.kl_coef weighs it; 0 without"
    ),
    *(Metric(f"mismatch/{name}", unit, f"{meaning}; as the step trains") for name, unit, meaning in MISMATCH),
    *(
        Metric(f"mismatch/{scorer}/{name}", unit, f"{meaning}; scored with {how}")
        for scorer, how in SCORERS.items()
        for name, unit, meaning in MISMATCH
    ),
    Metric("kept/size_mean", "id", "mean size of a kept set, over tokens drawn from one"),
    Metric("kept/size_p99", "id", "99th percentile of the size of a kept set"),
    Metric("kept/mass_mean", "1", "mean probability of a kept set before the others were cut off"),
    Metric(
        "routing/disagreement",
        "1",
        "share of rows and layers for which the trainer's router would have chosen another set of experts",
    ),
    Metric(
        "routing/jaccard",
        "1",
        "mean Jaccard index of the two sets of experts: the router's own choice and the recorded one",
    ),
    Metric(
        "routing/margin_at_flips",
        "score",
        "mean score gap between the last chosen and the next expert, if the choice differs",
    ),
    Metric("routing/margin_elsewhere", "score", "the same if the choice is equal"),
    Metric("routing/live_rows", "row", "rows, times layers, without captured routing; the trainer's router chose"),
    Metric("replay/rows_verified", "row", "routing rows, times layers and phases, proved before the update"),
    Metric(
        "replay/updates_unproved",
        "update",
        "updates of the step without a comparison of checksums (`keep_routing.verify`)",
    ),
    Metric("data/routing_bytes", "byte", "uncompressed routing data of the rank that received most"),
    Metric(
        "data/routing_bytes_over_share",
        "1",
        "routing data received, divided by what the rank's own rows and layers need; worst rank",
    ),
    Metric("packing/fill", "1", "rows of samples, divided by the room in the microbatches of all ranks"),
    Metric("packing/shared_rows", "1", "rows that another sample's stand for, divided by rows of samples computed"),
    Metric("packing/real_rows", "1", "rows of samples, divided by rows computed (padding included)"),
    Metric(
        "packing/cost_max_over_mean", "1", "estimated operations of the busiest data-parallel rank, divided by the mean"
    ),
    Metric("packing/lockstep_over_mean", "1", "the same, if every microbatch waits for the slowest rank"),
    Metric("packing/microbatches", "microbatch", "forward passes of a rank in the step"),
    Metric("experts/load_max_over_mean", "1", "load of the most used expert, divided by the mean; worst layer"),
    Metric("experts/load_min_over_mean", "1", "load of the least used expert, divided by the mean; worst layer"),
    Metric("optimizer/grad_norm", "1", "global gradient norm before clipping, mean over the step's updates"),
    Metric("optimizer/skipped", "update", "updates skipped because the gradient was not finite"),
    Metric("optimizer/lr", "1", "learning rate of the step's last update"),
    Metric("sft/loss", "nat", "mean negative log-likelihood of demonstration tokens"),
    Metric("tokens/trained", "token", "tokens trained on since the run began"),
    Metric("quarantine/count", "trajectory", "trajectories in quarantine since the run began"),
    Metric("episode/limited", "episode", "episodes that a limit kept from another turn, since the last step"),
    Metric("episode/failed", "episode", "episodes whose environment failed, since the last step"),
    Metric("alerts/active", "alert", "alerts that are active at the step: coverage, quarantine, gap, far tokens"),
    Metric("groups/filtered", "rollout", "filtered since the run began: by `rl.filters`, `rl.keep`, limits, or stale"),
    Metric("curriculum/passed", "prompt", "prompts passed over by `rl.skip_above` and its like since the run began"),
    Metric("curriculum/rate_mean", "1", "mean share of right responses in the latest group of each prompt seen so far"),
    Metric("lengths/offered_mean", "token", "mean length of the latest 4096 responses that were admitted"),
    Metric("lengths/trained_mean", "token", "mean length of the latest 4096 responses that were trained"),
    Metric("lengths/distance", "1", "largest difference of their distribution functions (Kolmogorov-Smirnov)"),
    _timed("groups/waiting", "group", "finished groups left in the queue when a batch was taken"),
    _timed("staleness/age_max", "version", "versions between the oldest token and the trained weights, largest"),
    _timed("staleness/age_mean", "version", "the same, mean over trajectories of their oldest token"),
    _timed("staleness/versions_max", "version", "versions that sampled one trajectory, largest"),
    _timed("staleness/versions_mean", "version", "the same, mean over trajectories"),
    *(
        _timed(f"staleness/{name}", "1", "share of trajectories whose oldest token has this age, in versions")
        for name in AGES
    ),
    _timed("tokens/left_out", "token", "left out since the batch before: groups that are not trained, `rl.keep`"),
    _timed("waiting/engine_for_slots", "1", "share of the time since the batch before in which no group was sampled"),
    _timed("waiting/trainer_for_rollouts", "1", "`seconds/rollout` over `seconds/step`"),
    _timed("waiting/trainer_for_weights", "1", "`seconds/weights` over `seconds/step`"),
    Metric("weights/version", "version", "policy version that the engine holds after the step"),
    Metric("weights/bytes", "byte", "size of the weights that all ranks together sent to the engine"),
    Metric("weights/received_bytes", "byte", "what rank 0 received from other ranks, to send it to the engine"),
    _timed("weights/gather_seconds", "s", "time that rank 0 spent gathering buckets"),
    _timed("weights/send_seconds", "s", "time that rank 0 spent sending buckets to the engine"),
    _timed("weights/end_seconds", "s", "time that the engine needed to switch to the new version"),
    _timed(
        "weights/check_seconds",
        "s",
        "time of comparing checksums of all tensors; this and the two above: of asking for it, if an engine takes"
        " weights during the next step",
    ),
    _timed(
        "weights/interrupted",
        "rollout",
        "responses in progress when the update began; 0 if a step waits for all its responses",
    ),
    _timed(
        "weights/recomputed_tokens", "token", "tokens whose keys and values were computed again because of the update"
    ),
    _timed("weights/stalled_seconds", "s", "time without sampling because of the update"),
    _timed(
        "rollout/prefix_hit_rate",
        "1",
        "tokens that servers had in their prefix caches, over tokens that they were sent to go on behind; evaluations"
        " since the row before count",
    ),
    _timed("throughput/tokens_per_second", "token/s", "tokens trained over `seconds/step`"),
    _timed(
        "throughput/model_flops_per_second",
        "FLOP/s",
        "operations that the model needs for the step's tokens, forward and backward (`moerl.batching.cost`), over"
        " `seconds/train` and the trainer's ranks; passes without an update and recomputation take time and count as"
        " nothing",
    ),
    _timed(
        "throughput/mfu",
        "1",
        "the same over the GPU's peak in bfloat16, dense; if `moerl.telemetry.devices` knows the GPU and the trainer"
        " computes in bfloat16",
    ),
    *(_timed(f"seconds/{span}", "s", meaning) for span, meaning in SPANS.items()),
    _timed("memory/peak_rss_bytes", "byte", "peak resident memory of the largest process among controller and ranks"),
    _timed(
        "memory/gpu_allocated_bytes",
        "byte",
        "most of a GPU's memory that tensors of the trainer had at once since the row before; largest rank, on GPUs",
    ),
    _timed(
        "memory/gpu_reserved_bytes",
        "byte",
        "the same of what torch's allocator had; an engine in the process of a rank counts, servers do not",
    ),
)

_NAMED = (
    Metric("reward/<name>/mean", "reward", "mean of a named reward of the task's own, over the responses that have it"),
    Metric(
        "reward/agent/<id>/mean",
        "reward",
        "mean reward of the sessions of an agent, by its agent id; of the eight with most sessions, if agents have ids",
    ),
    Metric(
        "reward/<name>/failed",
        "1",
        "responses since the last step that a named reward failed on; none = it failed on none",
    ),
    Metric("score/<name>/mean", "1", "mean of the numbers of a scorer over the batch's sampled tokens"),
    Metric(
        "score/<name>/policy_gap",
        "nat",
        "mean of the engine's log-prob less the number of a scorer; of a teacher in the same sets and at the same"
        " temperature an estimate of the KL of the policy to it",
    ),
)
"""Metrics with the name of a reward, an agent or a scorer in theirs."""

NUM_TURNS = 8
"""Turns of a session that have metrics of their own: the first ones."""


def turn_metric(turn: int | str, figure: str) -> str:
    """Returns the name of a metric of the n-th turns. turn: from 1."""
    return f"turn/{turn}/{figure}"


def _of_turn(turn: int | str) -> list[Metric]:
    return [Metric(turn_metric(turn, name), unit, meaning) for name, unit, meaning in TURNS]


METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*_ALL, *(each for turn in range(NUM_TURNS) for each in _of_turn(turn + 1)))
}

LAYER_METRICS = ("disagreement", "jaccard", "margin_at_flips", "margin_elsewhere", "live_rows")
"""Metrics in a row of ``layers.jsonl``, one number per MoE layer each; meanings as of ``routing/...``."""


def check_layer_metrics(metrics: Mapping[str, Sequence[float]]) -> None:
    """Refuses names that are not `LAYER_METRICS` and values that are not finite.

    Raises:
        ValueError: with the name.
    """
    for name, values in metrics.items():
        if name not in LAYER_METRICS or not all(math.isfinite(value) for value in values):
            raise ValueError(f"metrics per layer: '{name}' is unknown or not finite")


def is_reward_name(name: str) -> bool:
    """Returns whether a task may give a reward this name: up to 64 letters, digits and the characters ``_ . -``."""
    return re.fullmatch(r"[\w.\-]{1,64}", name) is not None


def named_reward_metric(name: str) -> str:
    """Returns the name of the metric of the mean of a named reward."""
    return {"reward": "reward/mean", "accuracy": "accuracy/mean"}.get(name, f"reward/{name}/mean")


def failed_reward_metric(name: str) -> str:
    """Returns the name of the metric of how often a named reward failed; a reward without a name is `function`."""
    return f"reward/{name or 'function'}/failed"


def agent_reward_metric(agent_id: str) -> str:
    """Returns the name of the metric of the mean reward of an agent. agent_id: a name as `is_reward_name` takes it."""
    return f"reward/agent/{agent_id}/mean"


def score_metrics(name: str) -> tuple[str, str]:
    """Returns the names of the metrics of a scorer: of its mean, and of its gap to the policy."""
    return f"score/{name}/mean", f"score/{name}/policy_gap"


def is_registered(name: str) -> bool:
    """Returns whether a metric is registered, by its name or as a metric of a named reward, an agent or a scorer."""
    if name in METRICS:
        return True
    if name.startswith("score/"):
        scorer = name.removeprefix("score/").rpartition("/")[0]
        return name in score_metrics(scorer) and is_reward_name(scorer)
    agent = name.removeprefix("reward/agent/").removesuffix("/mean")
    if name == agent_reward_metric(agent) and is_reward_name(agent):
        return True
    stem = name.removeprefix("reward/").rpartition("/")[0]
    return name in (named_reward_metric(stem), failed_reward_metric(stem)) and is_reward_name(stem)


def check_metrics(metrics: Mapping[str, object]) -> None:
    """Raises `ValueError` for a name that is not registered and a value that is not a finite number."""
    for name, value in metrics.items():
        if not is_registered(name):
            raise ValueError(f"metric {name!r} is not registered; add it to moerl/telemetry/metrics.py")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value!r}; expected a finite number, or no entry for no value")


def table_metrics(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Turns a mismatch table, by scorer and then metric, into metrics of one row: ``mismatch/<scorer>/<figure>``."""
    return {
        f"mismatch/{scorer}/{name.removeprefix('mismatch/')}": value
        for scorer, figures in table.items()
        for name, value in figures.items()
    }


def reference_table() -> str:
    """Returns the table of docs/metrics.md; the figures of a mismatch table are listed once, for every scorer."""
    tables = [Metric(f"mismatch/<scorer>/{name}", unit, f"{meaning}; in a table") for name, unit, meaning in MISMATCH]
    singles = [metric for metric in _ALL if metric.name.split("/")[1] not in SCORERS]
    rows = ["| name | unit | meaning | same again |", "|---|---|---|---|"]
    for metric in [*singles, *_NAMED, *_of_turn("<n>"), *tables]:
        meaning = metric.meaning.replace("|", "\\|")
        rows.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {'yes' if metric.deterministic else 'no'} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(reference_table())
