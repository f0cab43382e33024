"""The columns of a Parquet dump: names, types, and the part of a trajectory in each. For `moerl.contract.disk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from moerl.contract.reasons import Reason
from moerl.contract.requirements import require, shown
from moerl.contract.trajectory import Trajectory

DISK_SCHEMA_VERSION = "2"
VERSION_KEY = b"moerl.schema_version"
REWARD, SCORE, TIMING = "reward_", "score_", "timing_"
TEXTS = ("prompt", "text")
SPANS = "spans"
"""For people; not read back."""

SPAN = pa.struct(
    [
        pa.field("kind", pa.string()),
        pa.field("turn", pa.int32()),
        pa.field("version", pa.int32()),
        pa.field("num_tokens", pa.int32()),
        pa.field("has_end", pa.bool_()),
        pa.field("text", pa.string()),
    ]
)
"""A `moerl.contract.spans.ReadableSpan`."""

TURN = pa.struct(
    [
        pa.field("start", pa.int32()),
        pa.field("end", pa.int32()),
        pa.field("kind", pa.string()),
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("min_p", pa.float64()),
        pa.field("seed", pa.int64()),
    ]
)
LINEAGE = ("rollout_id", "prompt_id", "group_id", "episode_id", "agent_id", "parent_rollout_id", "fork_at")
SPEC = ("num_moe_layers", "experts_per_token", "num_experts", "vocab_size", "fingerprint")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")

DERIVED: dict[str, tuple[pa.DataType, Callable[[Trajectory], Any]]] = {
    "num_tokens": (pa.int32(), len),
    "num_sampled": (pa.int32(), lambda t: t.num_sampled),
    "min_policy_version": (pa.int32(), lambda t: int(t.policy_versions[t.sampled].min())),
    "max_policy_version": (pa.int32(), lambda t: int(t.policy_versions.max())),
}
"""Columns that follow from the arrays, for people who read a dump."""

SCALARS: dict[str, tuple[pa.DataType, Callable[[Trajectory], Any]]] = {
    **{name: (pa.string(), lambda t, name=name: getattr(t.lineage, name)) for name in LINEAGE[:-1]},
    "fork_at": (pa.int32(), lambda t: t.lineage.fork_at),
    "engine_id": (pa.string(), lambda t: t.engine_id),
    "attempt": (pa.int32(), lambda t: t.attempt),
    "finish_reason": (pa.string(), lambda t: str(t.finish_reason)),
    **DERIVED,
    **{name: (pa.int32(), lambda t, name=name: getattr(t.spec, name)) for name in SPEC[:-1]},
    "fingerprint": (pa.string(), lambda t: t.spec.fingerprint),
}
ARRAYS: dict[str, tuple[tuple[pa.DataType, ...], Callable[[Trajectory], np.ndarray]]] = {
    "token_ids": ((pa.int32(),), lambda t: t.token_ids),
    "sampled": ((pa.bool_(),), lambda t: t.sampled),
    "rollout_logprobs": ((pa.float32(),), lambda t: t.rollout_logprobs),
    "kept_logmass": ((pa.float32(),), lambda t: t.kept_logmass),
    "policy_versions": ((pa.int32(),), lambda t: t.policy_versions),
    "truncated": ((pa.bool_(),), lambda t: t.truncated),
    "kept_offsets": ((pa.int64(),), lambda t: t.kept.offsets),
    "kept_ids": ((pa.int32(),), lambda t: t.kept.ids),
    "routed": ((pa.bool_(),), lambda t: t.routed),
    "expert_ids": ((pa.uint8(), pa.uint16()), lambda t: t.expert_ids.reshape(-1)),
}
REQUIRED = (*SCALARS, "turns", *ARRAYS)


_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    **{name: (dtype,) for name, (dtype, _) in SCALARS.items()},
    **{name: tuple(map(pa.list_, dtypes)) for name, (dtypes, _) in ARRAYS.items()},
    **dict.fromkeys(TEXTS, (pa.string(),)),
    "turns": (pa.list_(TURN),),
    SPANS: (pa.list_(SPAN),),
}
_TYPES_BY_PREFIX = {REWARD: pa.float64(), TIMING: pa.float64(), SCORE: pa.list_(pa.float32())}


def types_of(name: str) -> tuple[pa.DataType, ...]:
    """Returns the types that a column of this name may have; none if there is no such column."""
    return _TYPES.get(name) or tuple(dtype for prefix, dtype in _TYPES_BY_PREFIX.items() if name.startswith(prefix))


def check_columns(schema: pa.Schema) -> None:
    """Refuses columns that are missing, doubled, unknown or of another type, before anything is read of them.

    Raises:
        ContractError: `missing_field`, `duplicate_field`, `unknown_field` or `wrong_type`.
    """
    names = schema.names
    listed = ", ".join(map(shown, names))
    for name in REQUIRED:
        require(name in names, Reason.MISSING_FIELD, name, listed, "a column")
    for name in names:
        wanted = types_of(name)
        require(wanted, Reason.UNKNOWN_FIELD, "columns", shown(name), "columns of a dump")
        require(names.count(name) == 1, Reason.DUPLICATE_FIELD, "columns", shown(name), "each column once")
        kind = schema.field(name).type
        require(kind in wanted, Reason.WRONG_TYPE, name, kind, " or ".join(map(str, wanted)))
