"""Parquet files that another writer made, or that were damaged before they were sealed. Seeded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_mutations import Rng, chance, changed, choice

from moerl.contract import seals


def sealed_again(data: bytes) -> bytes:
    """Bytes with the digest they should have, where there is still a place for it."""
    at = data.rfind(seals.KEY + b"\x18\x40") + len(seals.KEY) + 2
    if at < len(seals.KEY) + 2 or at + 64 > len(data):
        return data
    blank = data[:at] + seals.BLANK + data[at + 64 :]
    digest = hashlib.blake2b(blank, digest_size=32).hexdigest().encode()
    return data[:at] + digest + data[at + 64 :]


def write_table(rng: Rng, path: Path, table: pa.Table) -> None:
    options: dict[str, Any] = {"use_dictionary": False, "write_page_checksum": chance(rng, 0.9)}
    if chance(rng, 0.2):
        options |= choice(
            rng,
            [
                {"use_dictionary": True},
                {"data_page_version": "2.0"},
                {"version": "1.0"},
                {"compression": choice(rng, ["none", "gzip", "lz4", "snappy"])},
                {"store_schema": False},
                {"use_compliant_nested_type": False},
                {"data_page_size": 16},
                {"write_statistics": False},
            ],
        )
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=choice(rng, [None, 1]))
        if chance(rng, 0.98):
            writer.add_key_value_metadata({seals.KEY: seals.BLANK})
    path.write_bytes(sealed_again(path.read_bytes()))


_TYPES = [
    pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(),
    pa.string(), pa.large_string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.decimal128(9, 2), pa.null(),
    pa.dictionary(pa.int32(), pa.string()), pa.struct([pa.field("start", pa.int32())]),
    pa.map_(pa.string(), pa.int32()),
]  # fmt: skip


def changed_table(rng: Rng, table: pa.Table, bombs: float) -> pa.Table:
    for _ in range(int(rng.integers(1, 3))):
        table = _changed_once(rng, table, bombs)
    return table


def _changed_once(rng: Rng, table: pa.Table, bombs: float) -> pa.Table:
    index = int(rng.integers(table.num_columns))
    name, rows = table.column_names[index], table.num_rows
    how = int(rng.integers(10))
    if how == 0:
        return table.remove_column(index)
    if how == 1:
        return table.slice(0, int(rng.integers(rows + 1)))
    if how == 2:
        new = choice(rng, [f"{name}x", "reward_", "score_", "turns", "reward_\u202e", "x" * 5000, ""])
        return table.rename_columns([new if i == index else old for i, old in enumerate(table.column_names)])
    if how == 3:
        return pa.concat_tables([table] * int(rng.integers(2, 4)))
    if how == 4:
        return table.replace_schema_metadata({b"moerl.schema_version": choice(rng, [b"1", b"3", b"\xff", b"2"])})
    if how == 5:
        return table.append_column(choice(rng, [name, "reward_more", "score_more", "more"]), table.column(index))
    if how == 6:
        return table.set_column(index, name, pa.nulls(rows, choice(rng, _TYPES)))
    if how == 7:
        dtype = choice(rng, _TYPES)
        dtype = pa.list_(dtype) if chance(rng, 0.6) else choice(rng, [dtype, pa.list_(pa.list_(dtype))])
        return table.set_column(index, name, pa.nulls(rows, dtype))
    values = table.column(index).to_pylist()
    dtype = table.schema.field(index).type
    row = int(rng.integers(rows)) if rows else 0
    if not rows:
        return table
    if chance(rng, bombs) and pa.types.is_list(dtype):
        values[row] = (values[row] or [None])[:1] * (1 << 20)
    elif how == 8 and isinstance(values[row], list) and values[row]:
        values[row] = changed(rng, values[row])
    else:
        values[row] = changed(rng, values[row])
    return table.set_column(index, name, pa.array(values, dtype))
