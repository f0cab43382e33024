"""The invariants of a trajectory: the one place that decides whether a record may be trained on.

Runs in whatever process constructs a `Trajectory`. Everything is vectorised; nothing is repaired. The reason codes
are `moerl.contract.reasons.Reason`. Per-record facts and turns are here, kept sets and
expert ids in `moerl.contract.array_checks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moerl.contract.array_checks import check_expert_ids, check_kept_sets
from moerl.contract.fields import (
    MAX_KEPT_IDS,
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    TrajectoryFields,
    Turn,
    TurnKind,
)
from moerl.contract.reasons import Reason
from moerl.contract.requirements import (
    INT32_MAX,
    INT64_MAX,
    MAX_NAMES,
    is_finite,
    is_int,
    is_number,
    refuse_where,
    require,
    require_range,
    require_text,
    require_type,
    shown,
)
from moerl.errors import ContractError

_KINDS: tuple[tuple[str, type], ...] = (
    ("spec", ModelSpec),
    ("lineage", Lineage),
    ("kept", KeptSets),
    ("finish_reason", FinishReason),
    ("turns", tuple),
    ("rewards", dict),
    ("scores", dict),
    ("timings", dict),
    ("engine_id", str),
    ("attempt", int),
)

_BOOL, _INT32, _INT64, _FLOAT32 = (np.dtype(kind) for kind in (np.bool_, np.int32, np.int64, np.float32))

_PER_TOKEN = (
    ("sampled", _BOOL),
    ("rollout_logprobs", _FLOAT32),
    ("kept_logmass", _FLOAT32),
    ("policy_versions", _INT32),
    ("truncated", _BOOL),
)


def check_trajectory(trajectory: TrajectoryFields) -> None:
    """Refuses a trajectory that breaks any invariant which can be judged from the record alone.

    Raises:
        ContractError: Names the first broken invariant by its reason code, with field, value and expectation.
    """
    _check_types(trajectory)
    _check_spec(trajectory.spec)
    _check_lineage(trajectory)
    _require_numbers(trajectory.rewards, "rewards")
    _require_numbers(trajectory.timings, "timings")
    _check_layout(trajectory)
    check_scores(trajectory.scores, len(trajectory))
    _check_tokens(trajectory)
    _check_turns(trajectory)
    _check_logprobs(trajectory)
    _check_version_values(trajectory)
    check_kept_sets(trajectory)
    check_expert_ids(trajectory)


def check_rewards(rewards: dict[str, float]) -> None:
    """Refuses rewards that break an invariant. Called when a checked trajectory gets new rewards.

    Raises:
        ContractError: `wrong_type`, `too_many_names`, `text_not_utf8`, `text_too_long` or `value_not_finite`.
    """
    require_type(rewards, dict, "rewards")
    _require_numbers(rewards, "rewards")


def check_scores(scores: dict[str, Any], num_tokens: int) -> None:
    """Refuses side scores that break an invariant; called alone when a checked trajectory gets new ones.

    Raises:
        ContractError: `wrong_type`, `too_many_names`, `text_not_utf8`, `text_too_long`, `wrong_dtype`, `wrong_shape` or
            `value_not_finite`.
    """
    require_type(scores, dict, "scores")
    _require_few_names(scores, "scores")
    for name, score in scores.items():
        require_text(name, "scores name")
        field = f"scores[{name!r}]"
        _require_array(score, _FLOAT32, (num_tokens,), field)
        refuse_where(field, score, (~np.isfinite(score), Reason.VALUE_NOT_FINITE, "finite"))


def check_versions(trajectory: TrajectoryFields, trainer_version: int) -> None:
    """Refuses a trajectory that claims weights the trainer has not made yet.

    Raises:
        ContractError: `version_from_the_future`.
    """
    versions = trajectory.policy_versions
    expected = f"at most the trainer's version {trainer_version}"
    refuse_where("policy_versions", versions, (versions > trainer_version, Reason.VERSION_FROM_THE_FUTURE, expected))


def _check_types(trajectory: TrajectoryFields) -> None:
    for name, kind in _KINDS:
        require_type(getattr(trajectory, name), kind, name)
    for index, turn in enumerate(trajectory.turns):
        require_type(turn, Turn, f"turns[{index}]")
        require_type(turn.kind, TurnKind, f"turns[{index}].kind")
        if turn.sampling is not None:
            require_type(turn.sampling, SamplingParams, f"turns[{index}].sampling")
    require_range(trajectory.attempt, 0, INT32_MAX, "attempt")
    require_text(trajectory.engine_id, "engine_id")


def _check_spec(spec: ModelSpec) -> None:
    reason = Reason.SPEC_INVALID
    require_range(spec.num_moe_layers, 1, INT32_MAX, "spec.num_moe_layers", reason)
    require_range(spec.num_experts, 1, 65536, "spec.num_experts", reason)
    require_range(spec.experts_per_token, 1, spec.num_experts, "spec.experts_per_token", reason)
    require_range(spec.vocab_size, 1, INT32_MAX, "spec.vocab_size", reason)
    require_text(spec.fingerprint, "spec.fingerprint")


def _check_lineage(trajectory: TrajectoryFields) -> None:
    lineage = trajectory.lineage
    for name in ("rollout_id", "prompt_id", "group_id"):
        value = getattr(lineage, name)
        require_text(value, f"lineage.{name}")
        require(value, Reason.LINEAGE_INCOMPLETE, f"lineage.{name}", "''", "a non-empty id")
    for name in ("episode_id", "agent_id", "parent_rollout_id"):
        require_text(getattr(lineage, name), f"lineage.{name}")
    require_range(lineage.fork_at, -1, INT32_MAX, "lineage.fork_at")
    agree = (lineage.fork_at >= 0) == bool(lineage.parent_rollout_id)
    seen = f"fork_at={lineage.fork_at}, parent_rollout_id={lineage.parent_rollout_id!r}"
    require(agree, Reason.LINEAGE_INCOMPLETE, "lineage.fork_at", seen, "both for a fork, neither otherwise")


def _require_few_names(values: dict[str, Any], group: str) -> None:
    require(len(values) <= MAX_NAMES, Reason.TOO_MANY_NAMES, group, f"{len(values)} names", f"at most {MAX_NAMES}")


def _require_numbers(values: dict[str, Any], group: str) -> None:
    """Refuses too many values, and those that are no finite numbers under names that travel."""
    _require_few_names(values, group)
    for name, value in values.items():
        require_text(name, f"{group} name")
        field = f"{group}[{name!r}]"
        require(is_number(value), Reason.WRONG_TYPE, field, type(value).__name__, "a number")
        require(is_finite(value), Reason.VALUE_NOT_FINITE, field, shown(value), "a finite number")


def _check_layout(trajectory: TrajectoryFields) -> None:
    """Refuses arrays whose dtype or shape is not what the spec and the number of tokens say, before any content is
    read."""
    spec = trajectory.spec
    _require_array(trajectory.token_ids, _INT32, (None,), "token_ids")
    num_tokens = len(trajectory.token_ids)
    require(num_tokens >= 2, Reason.TOO_SHORT, "token_ids", num_tokens, "a prompt token and a sampled token")
    for name, dtype in _PER_TOKEN:
        _require_array(getattr(trajectory, name), dtype, (num_tokens,), name)
    rows = num_tokens - 1
    routing_shape = (rows, spec.num_moe_layers, spec.experts_per_token)
    _require_array(trajectory.expert_ids, spec.expert_dtype, routing_shape, "expert_ids")
    _require_array(trajectory.routed, _BOOL, (rows,), "routed")
    _require_array(trajectory.kept.offsets, _INT64, (num_tokens + 1,), "kept.offsets")
    _require_array(trajectory.kept.ids, _INT32, (None,), "kept.ids")


def _require_array(value: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...], name: str) -> None:
    """Refuses a value that is no array of this dtype and shape; `shape` may be (None,): one axis of any length."""
    require_type(value, np.ndarray, name)
    require(value.dtype == dtype, Reason.WRONG_DTYPE, name, value.dtype, dtype)
    agrees = value.shape == shape or (shape == (None,) and value.ndim == 1)
    require(agrees, Reason.WRONG_SHAPE, name, value.shape, shape)


def _check_tokens(trajectory: TrajectoryFields) -> None:
    token_ids, sampled = trajectory.token_ids, trajectory.sampled
    vocab_size = trajectory.spec.vocab_size
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    refuse_where("token_ids", token_ids, (outside, Reason.TOKEN_ID_OUT_OF_RANGE, f"in [0, {vocab_size})"))
    require(not sampled[0], Reason.FIRST_TOKEN_SAMPLED, "sampled", "sampled[0] is True", False)
    require(sampled.any(), Reason.NOTHING_SAMPLED, "sampled", 0, "at least one sampled token")
    if not sampled[-1]:
        seen = f"the last sampled token is {int(np.flatnonzero(sampled)[-1])} of {len(sampled)}"
        expected = "nothing after the last sampled token"
        raise ContractError(Reason.NOT_TRIMMED, field="sampled", seen=seen, expected=expected)


def _check_turns(trajectory: TrajectoryFields) -> None:
    position = 0
    for index, turn in enumerate(trajectory.turns):
        name = f"turns[{index}]"
        contiguous = is_int(turn.start) and is_int(turn.end) and turn.start == position < turn.end
        if not contiguous:
            seen = f"[{shown(turn.start)}, {shown(turn.end)})"
            expected = f"a non-empty span that starts at {shown(position)}"
            raise ContractError(Reason.TURNS_DO_NOT_COVER, field=name, seen=seen, expected=expected)
        position = turn.end
        if (turn.sampling is not None) != (turn.kind is TurnKind.SAMPLED):
            seen = f"{turn.sampling} on a turn of kind {turn.kind}"
            expected = "sampling parameters on sampled turns and only there"
            raise ContractError(Reason.SAMPLING_MISPLACED, field=f"{name}.sampling", seen=seen, expected=expected)
        if turn.sampling is not None:
            _check_sampling(turn.sampling, f"{name}.sampling")
    seen, expected = f"end at {shown(position)}", f"end at {len(trajectory)}"
    require(position == len(trajectory), Reason.TURNS_DO_NOT_COVER, "turns", seen, expected)
    lengths = [turn.end - turn.start for turn in trajectory.turns]
    says_sampled = np.repeat([turn.kind is TurnKind.SAMPLED for turn in trajectory.turns], lengths)
    disagrees, expected = says_sampled != trajectory.sampled, "sampled turns for exactly the tokens with `sampled` True"
    refuse_where("turns", says_sampled, (disagrees, Reason.TURN_KIND_DISAGREES, expected))


def _check_sampling(sampling: SamplingParams, name: str) -> None:
    reason = Reason.SAMPLING_INVALID
    bounds = {"temperature": lambda x: x >= 0.0, "top_p": lambda x: 0.0 < x <= 1.0, "min_p": lambda x: 0.0 <= x < 1.0}
    expected = "temperature in [0, inf), top_p in (0, 1], min_p in [0, 1)"
    for key, holds in bounds.items():
        value = getattr(sampling, key)
        inside = is_number(value) and is_finite(value) and holds(value)
        require(inside, reason, f"{name}.{key}", shown(value), expected)
    if sampling.top_k is not None:
        require_range(sampling.top_k, 1, MAX_KEPT_IDS, f"{name}.top_k", reason)
    require_range(sampling.seed, -INT64_MAX - 1, INT64_MAX, f"{name}.seed", reason)


def _check_logprobs(trajectory: TrajectoryFields) -> None:
    logprobs, logmass, sampled = trajectory.rollout_logprobs, trajectory.kept_logmass, trajectory.sampled
    refuse_where(
        "rollout_logprobs",
        logprobs,
        (~np.isfinite(logprobs), Reason.LOGPROB_NOT_FINITE, "finite"),
        (logprobs > 0, Reason.LOGPROB_POSITIVE, "at most 0"),
        (~sampled & (logprobs != 0), Reason.LOGPROB_NOT_ZERO, "0 on a token that was not sampled"),
    )
    uncut = ~trajectory.truncated & (logmass != 0)
    refuse_where(
        "kept_logmass",
        logmass,
        (~np.isfinite(logmass), Reason.KEPT_MASS_NOT_FINITE, "finite"),
        (logmass > 0, Reason.KEPT_MASS_POSITIVE, "at most 0"),
        (uncut, Reason.KEPT_MASS_NOT_ZERO, "0 on a token for which nothing was cut"),
    )


def _check_version_values(trajectory: TrajectoryFields) -> None:
    versions, sampled = trajectory.policy_versions, trajectory.sampled
    refuse_where(
        "policy_versions",
        versions,
        (sampled & (versions < 0), Reason.VERSION_NEGATIVE, "at least 0 on a sampled token"),
        (~sampled & (versions != -1), Reason.VERSION_NOT_SAMPLED, "-1 on a token that was not sampled"),
    )
