"""A rollout from the values that a format has of it: lengths are matched, layers selected, kept sets put in order.
numpy only.

Shape legend: S = tokens, N = the last tokens that the format has values of (its response, tools included), R = rows of
routing, L = layers, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import KeptSets
from moerl.diagnostics.dumps.rollout import DumpedRollout, turns_of
from moerl.diagnostics.dumps.values import MAX_IDS, RowError, flags, floats, integer, ints, number, text

EMPTY = "response: empty, or without sampled tokens"
"""Reason of rollouts that have no log-prob to compare; the report has a note on them."""


@dataclass(slots=True)
class Parts:
    """Values that a format has of a rollout, unchecked but for routes. Values by token have S elements, or N, of the
    last N tokens. None: the format has no such value."""

    name: str
    """Name for people; need not be unique."""
    token_ids: object
    """Integers [S]."""
    rollout_logprobs: object
    """Numbers by token, nats."""
    num_response: object = None
    """N; None: N = S."""
    sampled: object = None
    """Flags by token; None: all of the last N."""
    temperatures: object = None
    """Numbers by token, or one number."""
    top_ps: object = None
    """Numbers by token, or one number."""
    policy_versions: object = None
    """Integers by token, or one integer; -1: not said."""
    turns: object = None
    """Integers by token; None: a turn ends when `sampled` changes."""
    expert_ids: NDArray[np.int32] | None = None
    """int32 [R, L, K] as recorded; a row of negative ids alone was not captured."""
    first_row: int = 0
    """Row of the first of `expert_ids`; those before it were not recorded."""
    routed: object = None
    """Flags by row, from row 0; False: not captured."""
    kept: tuple[object, object] | None = None
    """Offsets (S + 1 or N + 1) and ids."""
    prefix_versions: object = None
    """Integers by token, or one integer; -1: not cached or not said."""
    trainer_logprobs: Mapping[str, object] = field(default_factory=dict)
    """Numbers by token, nats, by scorer."""
    trainer_expert_ids: NDArray[np.int32] | None = None
    """int32 [S - 1, L, K]."""
    labels: Mapping[str, object] = field(default_factory=dict)
    """Texts: group, engine, prompt, response."""
    finish_reason: object = None
    """Text; anything else counts as none."""
    step: int = -1
    """Training step; -1: not said."""
    rewards: Mapping[str, object] = field(default_factory=dict)
    """By name; values that are no finite numbers are dropped."""
    kept_logmass: object = None
    """Numbers by token, nats."""


def build(parts: Parts, moe_layers: Sequence[int] | None) -> DumpedRollout:
    """Returns the rollout. Raises `RowError` for the first value that cannot be read."""
    token_ids = ints(parts.token_ids, "token ids")
    window = _Window.of(len(token_ids), parts.num_response)
    sampled = window.sampled(parts.sampled)
    versions, turns = parts.policy_versions, parts.turns
    expert_ids, routed = _recorded(parts, moe_layers)
    trainer_ids = parts.trainer_expert_ids
    if trainer_ids is not None and len(trainer_ids) != len(token_ids) - 1:
        raise RowError("the trainer's expert ids: not a row for each token but the last", trainer_ids)
    labels: dict[str, Any] = {name: text(value, name) for name, value in parts.labels.items()}
    return DumpedRollout(
        name=parts.name,
        token_ids=token_ids,
        sampled=sampled,
        rollout_logprobs=window.logprobs(parts.rollout_logprobs, "log-probs of the rollout", sampled),
        temperatures=window.setting(parts.temperatures, "temperatures", sampled),
        top_ps=window.setting(parts.top_ps, "top-p", sampled),
        policy_versions=np.where(sampled, window.versions(versions, "policy versions"), -1).astype(np.int32),
        turns=turns_of(sampled) if turns is None else window.spread(ints(turns, "turns"), "turns").astype(np.int16),
        expert_ids=expert_ids,
        routed=routed,
        kept=None if parts.kept is None else window.kept(*parts.kept),
        prefix_versions=None
        if parts.prefix_versions is None
        else window.versions(parts.prefix_versions, "versions of the prefix"),
        trainer_logprobs={
            scorer: window.logprobs(values, "log-probs of the trainer", sampled)
            for scorer, values in parts.trainer_logprobs.items()
        },
        trainer_expert_ids=None if trainer_ids is None else select_layers(_no_negatives(trainer_ids), moe_layers),
        step=parts.step,
        says_temperature=parts.temperatures is not None,
        says_top_p=parts.top_ps is not None,
        finish_reason=parts.finish_reason if isinstance(parts.finish_reason, str) else "",
        rewards=_rewards(parts.rewards),
        kept_logmass=None
        if parts.kept_logmass is None
        else window.logprobs(parts.kept_logmass, "log-masses of kept sets", sampled),
        **labels,
    )


def select_layers(expert_ids: NDArray[np.int32], moe_layers: Sequence[int] | None) -> NDArray[np.int32]:
    """Returns the routes of the MoE layers if there are routes of all layers; otherwise those that there are.

    moe_layers: the model's, counted among all its layers; None if there is no model.
    """
    if moe_layers is None or expert_ids.shape[1] <= max(moe_layers):
        return expert_ids
    return np.ascontiguousarray(expert_ids[:, list(moe_layers)])


def _recorded(
    parts: Parts, moe_layers: Sequence[int] | None
) -> tuple[NDArray[np.int32] | None, NDArray[np.bool_] | None]:
    """Returns the routes from row 0 on, and which rows were recorded. A row of negative ids alone was not."""
    if parts.expert_ids is None:
        return None, None
    found = select_layers(parts.expert_ids, moe_layers)
    routed = np.asarray((found >= 0).any(axis=(1, 2))) if found.size else np.ones(len(found), np.bool_)
    found = _no_negatives(np.where(routed[:, None, None], found, 0))
    if parts.first_row:
        if (parts.first_row + len(found)) * found.shape[1] * found.shape[2] > MAX_IDS:
            raise RowError("expert ids: the first row is too far", parts.first_row)
        found = np.concatenate([np.zeros((parts.first_row, *found.shape[1:]), np.int32), found])
        routed = np.concatenate([np.zeros(parts.first_row, np.bool_), routed])
    if parts.routed is not None:
        said = flags(parts.routed, "routed", most=MAX_IDS)
        if len(said) != len(found):
            raise RowError("routed: not one for each row of expert ids", f"{len(said)} for {len(found)} rows")
        routed = np.asarray(said & routed)
    return found, routed


def _no_negatives(expert_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    if expert_ids.size and expert_ids.min() < 0:
        raise RowError("expert ids: some of a row are negative", int(expert_ids.min()))
    return expert_ids


@dataclass(frozen=True, slots=True)
class _Window:
    """The last `num_response` of `num_tokens` tokens; the two are equal if the format has no response length."""

    num_tokens: int
    num_response: int

    @classmethod
    def of(cls, num_tokens: int, num_response: object) -> _Window:
        if num_tokens < 2:
            raise RowError("token ids: fewer than two", f"{num_tokens} tokens")
        if num_response is None:
            return cls(num_tokens, num_tokens)
        length = integer(num_response, "response length")
        if length >= num_tokens:
            raise RowError("response length: no token is left for the prompt", f"{length} of {num_tokens} tokens")
        return cls(num_tokens, length)

    def spread[T: np.generic](self, values: NDArray[T], name: str, fill: float = 0) -> NDArray[T]:
        """Returns [S] of a value with S or N elements."""
        if len(values) == self.num_tokens:
            return values
        if len(values) != self.num_response:
            wanted = {self.num_tokens, self.num_response}
            raise RowError(f"{name}: wrong length", f"{len(values)}, not {' or '.join(map(str, sorted(wanted)))}")
        out = np.full(self.num_tokens, fill, values.dtype)
        out[self.num_tokens - self.num_response :] = values
        return out

    def sampled(self, value: object) -> NDArray[np.bool_]:
        if value is None and self.num_response == self.num_tokens:
            raise RowError("sampled: missing", None)
        sampled = flags([1] * self.num_response if value is None else value, "sampled")
        sampled = self.spread(sampled, "sampled")
        if not sampled.any():
            raise RowError(EMPTY, f"{self.num_tokens} tokens, none of them sampled")
        if sampled[0]:
            raise RowError("sampled: the first token is", "a token that nothing stands before")
        return sampled

    def logprobs(self, value: object, name: str, sampled: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Returns float32 [S]; 0 where not sampled, finite elsewhere."""
        values = self.spread(floats(value, name), name)
        values = np.where(sampled, values, np.float32(0))
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise RowError(f"{name}: one is not finite", f"{values[at]} at token {at}")
        return values

    def setting(self, value: object, name: str, sampled: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Returns float32 [S] of a sampling parameter; 1 where not sampled or not said."""
        if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
            values = self.spread(floats(value, name), name, fill=1)
        else:
            values = np.full(self.num_tokens, 1.0 if value is None else number(value, name), np.float32)
        values = np.where(sampled, values, np.float32(1))
        wrong = ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            raise RowError(f"{name}: one is negative or not finite", float(values[wrong][0]))
        return values

    def versions(self, value: object, name: str) -> NDArray[np.int32]:
        """Returns int32 [S]; -1 if not said."""
        if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
            return self.spread(ints(value, name, least=-1), name, fill=-1)
        return np.full(self.num_tokens, -1 if value is None else integer(value, name, least=-1), np.int32)

    def kept(self, offsets: object, ids: object) -> KeptSets:
        """Returns the kept sets by token; ids of a set come in ascending order."""
        starts = ints(offsets, "offsets of kept sets", most=MAX_IDS).astype(np.int64)
        found = ints(ids, "ids of kept sets", most=MAX_IDS)
        sound = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(found) and (np.diff(starts) >= 0).all()
        if not sound:
            raise RowError("offsets of kept sets: do not lead from zero to the number of ids", starts)
        sizes = self.spread(np.diff(starts), "offsets of kept sets")
        rows = np.repeat(np.arange(self.num_tokens), sizes)
        order = np.lexsort((found, rows))
        return KeptSets(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), found[order])


def spread_turns(values: Sequence[int], sampled: NDArray[np.bool_]) -> NDArray[np.int32] | None:
    """Returns int32 [S]: one value for each sampled span, -1 elsewhere; None if there are not as many spans as
    values."""
    starts = np.flatnonzero(sampled & ~np.concatenate([[False], sampled[:-1]]))
    if len(starts) != len(values):
        return None
    out = np.full(len(sampled), -1, np.int32)
    spans: Any = np.cumsum(np.isin(np.arange(len(sampled)), starts)) - 1
    out[sampled] = np.array(values, np.int32)[spans[sampled]]
    return out


def _rewards(named: Mapping[str, object]) -> dict[str, float]:
    """Returns the rewards that are finite numbers: training reports others as missing, diagnoses read no rewards."""
    found: dict[str, float] = {}
    for name, value in named.items():
        with suppress(RowError):
            found[name] = number(value, f"reward {name!r}")
    return found
