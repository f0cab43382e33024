"""Parquet dumps: trajectories for people, reports and debug replay; one row per trajectory.

The only module of the contract that needs pyarrow. Columns are flat and typed, so that pandas and DuckDB read them
without moerl; reading them back with moerl is exact and checks every invariant again. Trusted with nothing: a dump is
data, never code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moerl.contract.files import atomic_file
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.errors import ContractError

DISK_SCHEMA_VERSION = "1"
_VERSION_KEY = b"moerl.schema_version"
_REWARD, _SCORE, _TIMING = "reward_", "score_", "timing_"
_MAX_GROUP_VALUES = 1 << 28
"""Expert ids of a row group; Arrow lists count their values in 31 bits."""

_TURN = pa.struct(
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
_LINEAGE = ("rollout_id", "prompt_id", "group_id", "episode_id", "agent_id", "parent_rollout_id", "fork_at")
_SPEC = ("num_moe_layers", "experts_per_token", "num_experts", "vocab_size", "fingerprint")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_SCALARS: dict[str, tuple[pa.DataType, Callable[[Trajectory], Any]]] = {
    **{name: (pa.string(), lambda t, name=name: getattr(t.lineage, name)) for name in _LINEAGE[:-1]},
    "fork_at": (pa.int32(), lambda t: t.lineage.fork_at),
    "engine_id": (pa.string(), lambda t: t.engine_id),
    "attempt": (pa.int32(), lambda t: t.attempt),
    "finish_reason": (pa.string(), lambda t: str(t.finish_reason)),
    "num_tokens": (pa.int32(), len),
    "num_sampled": (pa.int32(), lambda t: t.num_sampled),
    "min_policy_version": (pa.int32(), lambda t: int(t.policy_versions[t.sampled].min())),
    "max_policy_version": (pa.int32(), lambda t: int(t.policy_versions.max())),
    **{name: (pa.int32(), lambda t, name=name: getattr(t.spec, name)) for name in _SPEC[:-1]},
    "fingerprint": (pa.string(), lambda t: t.spec.fingerprint),
}
_ARRAYS: dict[str, Callable[[Trajectory], np.ndarray]] = {
    "token_ids": lambda t: t.token_ids,
    "sampled": lambda t: t.sampled,
    "rollout_logprobs": lambda t: t.rollout_logprobs,
    "kept_logmass": lambda t: t.kept_logmass,
    "policy_versions": lambda t: t.policy_versions,
    "truncated": lambda t: t.truncated,
    "kept_offsets": lambda t: t.kept.offsets,
    "kept_ids": lambda t: t.kept.ids,
    "routed": lambda t: t.routed,
    "expert_ids": lambda t: t.expert_ids.reshape(-1),
}


def write_parquet(path: Path | str, trajectories: Sequence[Trajectory], *, texts: Sequence[str] | None = None) -> None:
    """Writes a dump; the file appears whole or not at all.

    Args:
        path: Target; replaced where it exists.
        trajectories: At least one.
        texts: Decoded text per trajectory for a column `text`, for people.

    Raises:
        ContractError: No trajectories, not as many texts, or models with different expert dtypes in one file.
    """
    if not trajectories or (texts is not None and len(texts) != len(trajectories)):
        raise ContractError(
            Reason.WRONG_SHAPE,
            field="trajectories",
            seen=f"{len(trajectories)} trajectories, {'no' if texts is None else len(texts)} texts",
            expected="at least one trajectory, and a text for each or no texts",
            remedy="skip the dump where there is nothing to write",
        )
    schema = _schema(trajectories, with_text=texts is not None)
    with (
        atomic_file(Path(path)) as temporary,
        pq.ParquetWriter(
            temporary, schema, compression="zstd", compression_level=1, write_page_checksum=True
        ) as writer,
    ):
        for start, stop in _row_groups(trajectories):
            group_texts = None if texts is None else texts[start:stop]
            writer.write_table(_table(trajectories[start:stop], group_texts, schema))


def read_parquet(path: Path | str) -> list[Trajectory]:
    """The trajectories of a dump, exact and checked again.

    Raises:
        ContractError: `file_corrupt`, `schema_version_unknown`, `missing_field`, or a broken invariant.
    """
    trajectories: list[Trajectory] = []
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(file.schema_arrow)
            for group in range(file.num_row_groups):
                trajectories.extend(_trajectories(file.read_row_group(group)))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ContractError(
            Reason.FILE_CORRUPT, field=str(path), seen=error, expected="a whole Parquet file written by moerl"
        ) from error
    return trajectories


def _row_groups(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, int]]:
    start, values = 0, 0
    for index, trajectory in enumerate(trajectories):
        size = max(trajectory.expert_ids.size, len(trajectory.kept.ids), len(trajectory))
        if index > start and values + size > _MAX_GROUP_VALUES:
            yield start, index
            start, values = index, 0
        values += size
    yield start, len(trajectories)


def _names(trajectories: Sequence[Trajectory], field: str) -> list[str]:
    return sorted({name for trajectory in trajectories for name in getattr(trajectory, field)})


def _schema(trajectories: Sequence[Trajectory], *, with_text: bool) -> pa.Schema:
    expert_dtypes = {trajectory.expert_ids.dtype for trajectory in trajectories}
    if len(expert_dtypes) != 1:
        raise ContractError(
            Reason.SPEC_MISMATCH,
            field="expert_ids",
            seen=sorted(map(str, expert_dtypes)),
            expected="one dtype in a file",
            remedy="write one file per model",
        )
    columns = [pa.field(name, dtype, nullable=False) for name, (dtype, _) in _SCALARS.items()]
    columns += [pa.field(_REWARD + name, pa.float64()) for name in _names(trajectories, "rewards")]
    columns += [pa.field(_TIMING + name, pa.float64()) for name in _names(trajectories, "timings")]
    columns += [pa.field("text", pa.string(), nullable=False)] if with_text else []
    columns += [pa.field("turns", pa.list_(_TURN), nullable=False)]
    first = trajectories[0]
    columns += [
        pa.field(name, pa.list_(pa.from_numpy_dtype(get(first).dtype)), nullable=False) for name, get in _ARRAYS.items()
    ]
    columns += [pa.field(_SCORE + name, pa.list_(pa.float32())) for name in _names(trajectories, "scores")]
    return pa.schema(columns, metadata={_VERSION_KEY: DISK_SCHEMA_VERSION})


def _table(trajectories: Sequence[Trajectory], texts: Sequence[str] | None, schema: pa.Schema) -> pa.Table:
    columns: dict[str, pa.Array] = {
        name: pa.array([get(trajectory) for trajectory in trajectories], dtype)
        for name, (dtype, get) in _SCALARS.items()
    }
    columns |= {name: _list_column([get(t) for t in trajectories]) for name, get in _ARRAYS.items()}
    columns["turns"] = pa.array([[_turn_row(turn) for turn in t.turns] for t in trajectories], pa.list_(_TURN))
    if texts is not None:
        columns["text"] = pa.array(texts, pa.string())
    for column in schema.names:
        if column.startswith(_REWARD):
            name = column.removeprefix(_REWARD)
            columns[column] = pa.array([t.rewards.get(name) for t in trajectories], pa.float64())
        elif column.startswith(_TIMING):
            name = column.removeprefix(_TIMING)
            columns[column] = pa.array([t.timings.get(name) for t in trajectories], pa.float64())
        elif column.startswith(_SCORE):
            name = column.removeprefix(_SCORE)
            scores = [t.scores.get(name) for t in trajectories]
            columns[column] = _list_column(scores, np.float32)
    return pa.table(columns, schema=schema)


def _list_column(arrays: Sequence[np.ndarray | None], dtype: type | None = None) -> pa.ListArray:
    """A list column from flat arrays; None becomes null."""
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.zeros(0, dtype)
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


def _turn_row(turn: Turn) -> dict[str, Any]:
    row: dict[str, Any] = {"start": int(turn.start), "end": int(turn.end), "kind": str(turn.kind)}
    for name in _SAMPLING:
        row[name] = None if turn.sampling is None else getattr(turn.sampling, name)
    return row


def _turn(row: dict[str, Any]) -> Turn:
    sampling = None
    if row["temperature"] is not None:
        sampling = SamplingParams(**{name: row[name] for name in _SAMPLING})
    return Turn(row["start"], row["end"], TurnKind(row["kind"]), sampling)


def _check_columns(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode(errors="replace")
    if version != DISK_SCHEMA_VERSION:
        raise ContractError(
            Reason.SCHEMA_VERSION_UNKNOWN,
            field=_VERSION_KEY.decode(),
            seen=version,
            expected=DISK_SCHEMA_VERSION,
            remedy="read the dump with the moerl version that wrote it",
        )
    wanted = {name: dtype for name, (dtype, _) in _SCALARS.items()} | {"turns": pa.list_(_TURN)}
    for name in (*wanted, *_ARRAYS):
        if name not in schema.names:
            raise ContractError(
                Reason.MISSING_FIELD, field=name, seen=json.dumps(schema.names), expected="a column of this name"
            )
        dtype = schema.field(name).type
        is_right = pa.types.is_list(dtype) if name in _ARRAYS else dtype == wanted[name]
        if not is_right:
            raise ContractError(
                Reason.WRONG_TYPE, field=name, seen=dtype, expected=wanted.get(name, "a list of numbers")
            )


def _trajectories(table: pa.Table) -> Iterator[Trajectory]:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names if name != "text"}
    for row in range(table.num_rows):
        yield _trajectory({name: column[row] for name, column in columns.items()})


def _trajectory(row: dict[str, Any]) -> Trajectory:
    """One row of Arrow scalars as a checked trajectory."""
    try:
        arrays = {name: _array(row[name]) for name in _ARRAYS}
        spec = ModelSpec(**{name: row[name].as_py() for name in _SPEC})
        shape = (len(arrays["token_ids"]) - 1, spec.num_moe_layers, spec.experts_per_token)
        expert_ids = arrays.pop("expert_ids").reshape(shape)
        turns = tuple(_turn(turn) for turn in row["turns"].as_py())
        finish_reason = FinishReason(row["finish_reason"].as_py())
    except (ValueError, TypeError) as error:
        raise ContractError(
            Reason.FILE_CORRUPT, field="row", seen=error, expected="a row written by write_parquet"
        ) from error
    kept = KeptSets(arrays.pop("kept_offsets"), arrays.pop("kept_ids"))
    return Trajectory(
        spec=spec,
        lineage=Lineage(**{name: row[name].as_py() for name in _LINEAGE}),
        turns=turns,
        kept=kept,
        expert_ids=expert_ids,
        finish_reason=finish_reason,
        rewards=_numbers(row, _REWARD),
        scores={
            name.removeprefix(_SCORE): _array(value)
            for name, value in row.items()
            if name.startswith(_SCORE) and value.is_valid
        },
        engine_id=row["engine_id"].as_py(),
        attempt=row["attempt"].as_py(),
        timings=_numbers(row, _TIMING),
        **arrays,
    )


def _array(scalar: Any) -> np.ndarray:
    """A fresh array of one list value; null elements would become floats and are refused by their dtype."""
    return np.array(scalar.values.to_numpy(zero_copy_only=False))


def _numbers(row: dict[str, Any], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): value.as_py()
        for name, value in row.items()
        if name.startswith(prefix) and value.is_valid
    }
