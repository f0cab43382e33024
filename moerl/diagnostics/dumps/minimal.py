"""The minimal schema: one row per rollout, flat columns, as Parquet or JSON lines (docs/dump_formats.md).

Lists by token have S elements, or N for the last N tokens if `response_length` is N. A column that is missing or null
says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moerl.contract.files import atomic_file
from moerl.diagnostics.dumps import jsonl, parquet
from moerl.diagnostics.dumps.build import Parts
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.values import RowError, flat_routes, integer, text
from moerl.errors import ConfigError
from moerl.reading import open_regular
from moerl.telemetry.metrics import SCORERS

FORMAT = "minimal schema"
REQUIRED = frozenset({"token_ids", "rollout_logprobs"})

_INTS, _FLOATS, _FLAGS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
_TRAINER = "trainer_logprobs"
SCORER_COLUMNS = {"trainer": _TRAINER} | {scorer: f"{_TRAINER}_{scorer}" for scorer in SCORERS}
COLUMNS: dict[str, pa.DataType] = {
    "name": pa.string(),
    "group": pa.string(),
    "engine": pa.string(),
    "step": pa.int32(),
    "reward": pa.float64(),
    "finish_reason": pa.string(),
    "prompt": pa.string(),
    "response": pa.string(),
    "token_ids": _INTS,
    "response_length": pa.int32(),
    "sampled": _FLAGS,
    "rollout_logprobs": _FLOATS,
    "temperatures": _FLOATS,
    "top_ps": _FLOATS,
    "policy_versions": _INTS,
    "turns": _INTS,
    "num_layers": pa.int32(),
    "experts_per_token": pa.int32(),
    "expert_ids": _INTS,
    "routed": _FLAGS,
    "kept_offsets": pa.list_(pa.int64()),
    "kept_ids": _INTS,
    "kept_logmass": _FLOATS,
    "prefix_versions": _INTS,
    **dict.fromkeys(SCORER_COLUMNS.values(), _FLOATS),
    "trainer_expert_ids": _INTS,
    "trainer_num_layers": pa.int32(),
    "trainer_experts_per_token": pa.int32(),
}
"""Every column, as `write_minimal` writes it. Readers take other widths of numbers too, and temperatures, top_ps and
versions as one number."""

_BY_TOKEN = (
    *("token_ids", "sampled", "rollout_logprobs", "temperatures", "top_ps", "policy_versions", "turns"),
    *("routed", "kept_logmass", "prefix_versions"),
)
_LABELS = ("group", "engine", "prompt", "response")
_GROUP_VALUES = 1 << 24


def read(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    with open_regular(file) as stream:
        binary = stream.read(4) == parquet.MAGIC
    found = parquet.rows(file, COLUMNS) if binary else jsonl.rows(file, reading.unusable)
    for where, row in found:
        yield from reading.take(where, _parts, row, where)


def write_minimal(path: Path | str, rollouts: Iterable[DumpedRollout]) -> None:
    """Writes rollouts in the minimal schema, one after the other; the file appears whole or not at all.

    Args:
        path: ends with `.parquet` or `.jsonl`; replaced if it exists.

    Raises:
        ConfigError: another ending, or log-probs of a scorer that has no column.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(
            f"cannot write {path}",
            seen=path.suffix or "no ending",
            expected=".parquet or .jsonl",
            remedy="name the file so",
        )
    with atomic_file(path) as temporary:
        if path.suffix == ".jsonl":
            with temporary.open("w", encoding="utf-8") as stream:
                for rollout in rollouts:
                    row = {name: value for name, value in _row(rollout).items() if value is not None}
                    stream.write(json.dumps(row, default=np.ndarray.tolist) + "\n")
        else:
            _write_parquet(temporary, rollouts)


def _write_parquet(file: Path, rollouts: Iterable[DumpedRollout]) -> None:
    schema = pa.schema(list(COLUMNS.items()))
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        held: list[dict[str, Any]] = []
        values = 0
        for row in chain(map(_row, rollouts), [None]):
            if held and (row is None or values > _GROUP_VALUES):
                columns = {name: pa.array([each[name] for each in held], kind) for name, kind in COLUMNS.items()}
                writer.write_table(pa.table(columns, schema=schema))
                held, values = [], 0
            if row is not None:
                held.append(row)
                values += sum(value.size for value in row.values() if isinstance(value, np.ndarray))


def _row(rollout: DumpedRollout) -> dict[str, Any]:
    """Returns the value of every column; None if the rollout does not have it."""
    unknown = sorted(set(rollout.trainer_logprobs) - set(SCORER_COLUMNS))
    if unknown:
        raise ConfigError(
            "the minimal schema has no column for log-probs of this scorer",
            seen=", ".join(unknown),
            expected=", ".join(SCORER_COLUMNS),
            remedy="name the scorer so",
        )
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {name: getattr(rollout, name) for name in ("name", "step", *_LABELS, *_BY_TOKEN)}
    row |= {"reward": rollout.rewards.get("reward"), "finish_reason": rollout.finish_reason or None}
    row |= {SCORER_COLUMNS[scorer]: values for scorer, values in rollout.trainer_logprobs.items()}
    for prefix, ids in (("", rollout.expert_ids), ("trainer_", rollout.trainer_expert_ids)):
        if ids is not None:
            row[f"{prefix}expert_ids"] = ids.reshape(-1)
            row[f"{prefix}num_layers"], row[f"{prefix}experts_per_token"] = ids.shape[1:]
    if rollout.kept is not None:
        row["kept_offsets"], row["kept_ids"] = rollout.kept.offsets, rollout.kept.ids
    return row


def _parts(row: Mapping[str, Any], where: str) -> Parts:
    step = row.get("step")
    trainer = {scorer: row[column] for scorer, column in SCORER_COLUMNS.items() if row.get(column) is not None}
    offsets, ids = row.get("kept_offsets"), row.get("kept_ids")
    if (offsets is None) != (ids is None):
        raise RowError("kept sets: offsets or ids are missing", "one of kept_offsets and kept_ids")
    by_token: dict[str, Any] = {name: row.get(name) for name in _BY_TOKEN}
    return Parts(
        name=text(row.get("name"), "name") or where,
        num_response=row.get("response_length"),
        expert_ids=_routes(row, "expert_ids", ("num_layers", "experts_per_token")),
        kept=None if offsets is None else (offsets, ids),
        trainer_logprobs=trainer,
        trainer_expert_ids=_routes(
            row,
            "trainer_expert_ids",
            ("trainer_num_layers", "trainer_experts_per_token"),
            ("num_layers", "experts_per_token"),
        ),
        labels={name: row.get(name) for name in _LABELS},
        finish_reason=row.get("finish_reason"),
        step=-1 if step is None else integer(step, "step", least=-1),
        rewards={"reward": row.get("reward")},
        **by_token,
    )


def _routes(row: Mapping[str, Any], column: str, *shapes: tuple[str, str]) -> np.ndarray | None:
    """Returns the routes of a flat column; the first pair of columns that is there says how many layers and experts per
    token."""
    if row.get(column) is None:
        return None
    named = [shape for shape in shapes if row.get(shape[0]) is not None] or [shapes[0]]
    layers, experts = (integer(row.get(name), name, least=1) for name in named[0])
    return flat_routes(row[column], column, layers, experts)
