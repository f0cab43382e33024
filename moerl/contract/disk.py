"""Parquet dumps: trajectories for people, reports and debug replay; one row per trajectory.

With `dump_columns` and `parquet` the only modules of the contract that need pyarrow. Columns are flat and typed, so
that pandas and DuckDB read them without moerl; reading them back with moerl is exact: the whole file is under a digest
(`moerl.contract.seals`), pages have checksums of their own, and every invariant is checked again. A dump is
data, never code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moerl.contract import seals
from moerl.contract.dump_columns import (
    ARRAYS,
    DERIVED,
    DISK_SCHEMA_VERSION,
    LINEAGE,
    REWARD,
    SAMPLING,
    SCALARS,
    SCORE,
    SPAN,
    SPANS,
    SPEC,
    TEXTS,
    TIMING,
    TURN,
    VERSION_KEY,
    check_columns,
    types_of,
)
from moerl.contract.files import atomic_file
from moerl.contract.footers import Footer, measured_footer, read_footer
from moerl.contract.parquet import most_bytes, opened, read_group
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require
from moerl.contract.spans import ReadableSpan
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
from moerl.reading import open_regular

MAX_DUMP_BYTES = 64 << 30
"""Largest dump that is read, as a file and decoded."""

_MAX_GROUP_VALUES = 1 << 28
"""Values of the longest column of a row group; Arrow lists count theirs in 31 bits."""

# A number takes what its type takes, however often a dictionary repeats it; a text takes any multiple of its pages.
# Encodings and types as `parquet.thrift` numbers them.
_ENCODINGS = {"PLAIN": 0, "RLE": 3}
_NUMBER_ENCODINGS = {**_ENCODINGS, "PLAIN_DICTIONARY": 2, "RLE_DICTIONARY": 8}
_TEXT_TYPE = 6
_WITH_DICTIONARY = [f"{name}.list.element" for name, (types, _) in ARRAYS.items() if pa.types.is_integer(types[0])]
_VALUE_BYTES = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8, _TEXT_TYPE: 4}


def write_parquet(
    path: Path | str,
    trajectories: Sequence[Trajectory],
    *,
    texts: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    spans: Sequence[Sequence[ReadableSpan]] | None = None,
) -> None:
    """Writes a dump; the file appears whole or not at all.

    Args:
        path: Target; replaced if it exists.
        trajectories: At least one.
        texts: Decoded response per trajectory for a column `text`, for people.
        prompts: Decoded prompt per trajectory for a column `prompt`, for people.
        spans: Spans per trajectory for a column `spans`, for people.

    Raises:
        ContractError: No trajectories, not as many texts or prompts, texts that are none, or models with different
            expert dtypes in one file.
    """
    given = zip((*TEXTS, SPANS), (prompts, texts, spans), strict=True)
    for_people: dict[str, Sequence[Any]] = {name: column for name, column in given if column is not None}
    if not trajectories or any(len(column) != len(trajectories) for column in for_people.values()):
        lengths = [f"{len(column)} of column {name}" for name, column in for_people.items()]
        raise ContractError(
            Reason.WRONG_SHAPE,
            field="trajectories",
            seen=", ".join([f"{len(trajectories)} trajectories", *lengths]),
            expected="at least one trajectory, and a text for each or no texts",
            remedy="skip the dump if there is nothing to write",
        )
    for text in (*(texts or ()), *(prompts or ()), *(span.text for row in spans or () for span in row)):
        _check_encodes(text)
    schema = _schema(trajectories, tuple(for_people))
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "use_dictionary": _WITH_DICTIONARY}
    with atomic_file(Path(path)) as temporary:
        with pq.ParquetWriter(temporary, schema, write_page_checksum=True, **options) as writer:
            for start, stop in _row_groups(trajectories):
                group = {name: column[start:stop] for name, column in for_people.items()}
                writer.write_table(_table(trajectories[start:stop], group, schema))
            writer.add_key_value_metadata({seals.KEY: seals.BLANK})
        seals.seal(temporary)


def read_parquet(path: Path | str, *, max_bytes: int = MAX_DUMP_BYTES) -> list[Trajectory]:
    """Returns the trajectories of a dump, exact and checked again.

    Args:
        max_bytes: The most to accept, as a file and decoded; reading takes at most four times as much. A small file
            may not decode to as much (`moerl.contract.parquet`).

    Raises:
        ContractError: `file_corrupt`, `file_too_large`, `schema_version_unknown`, columns that are not those of a
            dump, or a broken invariant.
        FileNotFoundError: There is no such file.
    """
    try:
        data = _read_bytes(Path(path), max_bytes)
        _check_version(read_footer(data))
        if not seals.is_sealed(data):
            raise _corrupt(path, "a digest that does not fit the file")
        stream = pa.BufferReader(data)
        _check_sizes(measured_footer(stream), min(max_bytes, most_bytes(len(data))))
        file = opened(stream)
        check_columns(file.schema_arrow)
        return [t for group in range(file.num_row_groups) for t in _read_group(file, group)]
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise _corrupt(path, error) from error


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _require_size(size, max_bytes, f"a file of {size} bytes")
        return file.read()


def _corrupt(where: object, seen: object) -> ContractError:
    return ContractError(
        Reason.FILE_CORRUPT,
        field=str(where),
        seen=seen,
        expected="a whole Parquet file written by moerl",
        remedy="copy the file again from where it was written; a damaged dump is not repaired",
    )


def _require_size(num_bytes: int, max_bytes: int, seen: str) -> None:
    remedy = "dump fewer trajectories into a file"
    require(num_bytes <= max_bytes, Reason.FILE_TOO_LARGE, "dump", seen, f"at most {max_bytes} bytes", remedy=remedy)


def _check_version(footer: Footer) -> None:
    version = footer.metadata.get(VERSION_KEY, b"none").decode(errors="replace")
    is_known, field = version == DISK_SCHEMA_VERSION, VERSION_KEY.decode()
    remedy = "read the dump with the moerl version that wrote it, or look at its columns with pandas"
    require(is_known, Reason.SCHEMA_VERSION_UNKNOWN, field, version, DISK_SCHEMA_VERSION, remedy=remedy)


def _check_sizes(footer: Footer, max_bytes: int) -> None:
    """Refuses, before anything is decoded, columns whose size the footer does not state, and more than `max_bytes`."""
    decoded = 0
    for group in footer.row_groups:
        for column in group.columns:
            known = _ENCODINGS if column.physical_type == _TEXT_TYPE else _NUMBER_ENCODINGS
            is_ours = column.physical_type in _VALUE_BYTES and column.encodings.issubset(known.values())
            if not is_ours or (column.is_text and column.coded_values):
                raise _corrupt(column.path, "types or encodings of another writer")
            if column.num_values < group.num_rows:
                raise _corrupt(column.path, f"{column.num_values} values in {group.num_rows} rows")
            decoded += max(column.uncompressed_bytes, _VALUE_BYTES[column.physical_type] * column.num_values)
    _require_size(decoded, max_bytes, f"{decoded} bytes decoded")
    if not footer.num_rows:  # `measured_footer` looked if row groups add up to it
        raise _corrupt("rows", "0 rows, 0 in row groups")


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


def _check_encodes(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ContractError(
            Reason.TEXT_NOT_UTF8, field="text", seen=ascii(text), expected="text that UTF-8 can encode"
        ) from error


def _schema(trajectories: Sequence[Trajectory], for_people: tuple[str, ...]) -> pa.Schema:
    expert_dtypes = {trajectory.expert_ids.dtype for trajectory in trajectories}
    seen, expected, remedy = sorted(map(str, expert_dtypes)), "one dtype in a file", "write one file per model"
    require(len(expert_dtypes) == 1, Reason.SPEC_MISMATCH, "expert_ids", seen, expected, remedy=remedy)
    columns = [pa.field(name, dtype, nullable=False) for name, (dtype, _) in SCALARS.items()]
    columns += [pa.field(REWARD + name, pa.float64()) for name in _names(trajectories, "rewards")]
    columns += [pa.field(TIMING + name, pa.float64()) for name in _names(trajectories, "timings")]
    columns += [pa.field(name, types_of(name)[0], nullable=False) for name in for_people]
    columns += [pa.field("turns", pa.list_(TURN), nullable=False)]
    first = trajectories[0]
    columns += [
        pa.field(name, pa.list_(pa.from_numpy_dtype(get(first).dtype)), nullable=False)
        for name, (_, get) in ARRAYS.items()
    ]
    columns += [pa.field(SCORE + name, pa.list_(pa.float32())) for name in _names(trajectories, "scores")]
    return pa.schema(columns, metadata={VERSION_KEY: DISK_SCHEMA_VERSION})


def _table(trajectories: Sequence[Trajectory], for_people: dict[str, Sequence[Any]], schema: pa.Schema) -> pa.Table:
    columns: dict[str, pa.Array] = {
        name: pa.array([get(trajectory) for trajectory in trajectories], dtype)
        for name, (dtype, get) in SCALARS.items()
    }
    columns |= {name: _list_column([get(t) for t in trajectories]) for name, (_, get) in ARRAYS.items()}
    columns["turns"] = pa.array([[_turn_row(turn) for turn in t.turns] for t in trajectories], pa.list_(TURN))
    columns |= {name: pa.array(column, pa.string()) for name, column in for_people.items() if name != SPANS}
    if SPANS in for_people:
        columns[SPANS] = pa.array([[asdict(span) for span in row] for row in for_people[SPANS]], pa.list_(SPAN))
    for name in _names(trajectories, "rewards"):
        columns[REWARD + name] = pa.array([t.rewards.get(name) for t in trajectories], pa.float64())
    for name in _names(trajectories, "timings"):
        columns[TIMING + name] = pa.array([t.timings.get(name) for t in trajectories], pa.float64())
    for name in _names(trajectories, "scores"):
        columns[SCORE + name] = _list_column([t.scores.get(name) for t in trajectories], np.float32)
    return pa.table(columns, schema=schema)


def _list_column(arrays: Sequence[np.ndarray | None], dtype: type | None = None) -> pa.ListArray:
    """Returns a list column of flat arrays; None becomes null."""
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.zeros(0, dtype)
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


def _turn_row(turn: Turn) -> dict[str, Any]:
    row: dict[str, Any] = {"start": int(turn.start), "end": int(turn.end), "kind": str(turn.kind)}
    for name in SAMPLING:
        row[name] = None if turn.sampling is None else getattr(turn.sampling, name)
    return row


def _turn(row: dict[str, Any] | None) -> Turn:
    if row is None:
        raise ContractError(Reason.MISSING_FIELD, field="turns", seen="a null", expected="a turn")
    values = {name: row[name] for name in SAMPLING}
    sampled = any(value is not None for value in values.values())
    return Turn(row["start"], row["end"], TurnKind(row["kind"]), SamplingParams(**values) if sampled else None)


def _read_group(file: pq.ParquetFile, group: int) -> Iterator[Trajectory]:
    names = [name for name in file.schema_arrow.names if name not in (*TEXTS, SPANS)]
    table = read_group(file, group, names)
    if table.num_rows != file.metadata.row_group(group).num_rows or table.column_names != names:
        raise _corrupt("rows", f"{table.num_rows} rows of {len(table.column_names)} columns")
    columns = {name: table.column(name).combine_chunks() for name in names}
    for name, column in columns.items():
        if column.null_count and not name.startswith((REWARD, TIMING, SCORE)):
            raise ContractError(Reason.MISSING_FIELD, field=name, seen=f"{column.null_count} nulls", expected="values")
    for row in range(table.num_rows):
        yield _trajectory({name: column[row] for name, column in columns.items()})


def _trajectory(row: dict[str, Any]) -> Trajectory:
    """Returns one row of Arrow scalars as a checked trajectory."""
    arrays = {name: _array(row[name]) for name in ARRAYS}
    spec = ModelSpec(**{name: row[name].as_py() for name in SPEC})
    shape = (len(arrays["token_ids"]) - 1, spec.num_moe_layers, spec.experts_per_token)
    num_ids = len(arrays["expert_ids"])
    fits = num_ids == math.prod(shape) and min(shape) >= 0
    require(fits, Reason.WRONG_SHAPE, "expert_ids", f"{num_ids} ids", shape)
    kept = KeptSets(arrays.pop("kept_offsets"), arrays.pop("kept_ids"))
    trajectory = Trajectory(
        spec=spec,
        lineage=Lineage(**{name: row[name].as_py() for name in LINEAGE}),
        turns=tuple(_turn(turn) for turn in row["turns"].as_py()),
        kept=kept,
        expert_ids=arrays.pop("expert_ids").reshape(shape),
        finish_reason=FinishReason(row["finish_reason"].as_py()),
        rewards={name: value.as_py() for name, value in _by_name(row, REWARD)},
        scores={name: _array(value) for name, value in _by_name(row, SCORE)},
        engine_id=row["engine_id"].as_py(),
        attempt=row["attempt"].as_py(),
        timings={name: value.as_py() for name, value in _by_name(row, TIMING)},
        **arrays,
    )
    for name, (_, get) in DERIVED.items():
        if row[name].as_py() != get(trajectory):
            raise ContractError(Reason.ROWS_DIFFER, field=name, seen=row[name], expected=get(trajectory))
    return trajectory


def _array(scalar: Any) -> np.ndarray:
    """Returns a fresh array of one list value; null elements would become floats, whose dtype is refused later."""
    return np.array(scalar.values.to_numpy(zero_copy_only=False))


def _by_name(row: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields values of columns with a prefix that are not null, each with its name behind the prefix."""
    return ((key.removeprefix(prefix), each) for key, each in row.items() if key.startswith(prefix) and each.is_valid)
