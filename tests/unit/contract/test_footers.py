"""The footer of a Parquet file: as pyarrow reads it, and refused where it is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moerl.contract import footers
from moerl.contract.footers import read_footer


def write(path: Path, **options: Any) -> bytes:
    table = pa.table({"n": [1, 2, None], "t": ["a", "b", "c"], "l": [[1.0], [], [2.0, 3.0]], "s": [{"x": True}] * 3})
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=2)
        writer.add_key_value_metadata({"key": "value"})
    return path.read_bytes()


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "version": "1.0"}, {"write_statistics": False}])
def test_a_footer_is_read_as_pyarrow_reads_it(tmp_path: Path, options: dict[str, Any]):
    footer = read_footer(write(tmp_path / "f.parquet", **options))
    expected = pq.read_metadata(tmp_path / "f.parquet")
    assert footer.num_rows == expected.num_rows == 3
    assert footer.metadata[b"key"] == b"value"
    assert len(footer.row_groups) == expected.num_row_groups == 2
    types = {"BOOLEAN": 0, "INT64": 2, "DOUBLE": 5, "BYTE_ARRAY": 6}
    encodings = {"PLAIN": 0, "RLE": 3, "RLE_DICTIONARY": 8, "PLAIN_DICTIONARY": 2}
    for index, group in enumerate(footer.row_groups):
        assert group.num_rows == expected.row_group(index).num_rows
        for number, column in enumerate(group.columns):
            theirs = expected.row_group(index).column(number)
            assert column.path == theirs.path_in_schema
            assert column.physical_type == types[theirs.physical_type]
            assert column.encodings == {encodings[each] for each in theirs.encodings}
            assert column.num_values == theirs.num_values
            assert column.uncompressed_bytes == theirs.total_uncompressed_size


def wrapped(footer: bytes) -> bytes:
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"PAR1", id="too short"),
        pytest.param(b"PAR1" + bytes(8), id="another end"),
        pytest.param(b"PAR1" + (100).to_bytes(4, "little") + b"PAR1", id="a footer longer than the file"),
        pytest.param(wrapped(b""), id="an empty footer"),
        pytest.param(wrapped(b"\0"), id="no fields"),
        pytest.param(wrapped(b"\x36\x02\0"), id="a number of rows alone"),
        pytest.param(wrapped(b"\x36\x01\x19\x0c\0"), id="fewer than no rows"),
        pytest.param(wrapped(b"\x38\x01a\x19\x0c\0"), id="a text for a number"),
        pytest.param(wrapped(b"\x36\x02\x16\x02\0"), id="a number for a list"),
        pytest.param(wrapped(b"\x36\x02\x19\x16\x02\0"), id="numbers for structs"),
        pytest.param(wrapped(b"\x36\x02\x06\x06\x02\0"), id="a field twice"),
        pytest.param(wrapped(b"\x36" + b"\x80" * 12), id="a number without an end"),
        pytest.param(wrapped(b"\x38\xff\xff\xff\xff\x0f"), id="a text longer than the footer"),
        pytest.param(wrapped(b"\x3d"), id="a kind there is not"),
        pytest.param(wrapped(b"\x39\xf6\xff\xff\xff\xff\x0f" + bytes(100)), id="a list longer than the footer"),
        pytest.param(wrapped(b"\x1c" * 5000), id="deep nesting"),
        pytest.param(wrapped(b"\x19" * 5000), id="deep lists"),
    ],
)
def test_what_is_no_footer_is_refused(data: bytes):
    with pytest.raises(ValueError, match=r"footer|Parquet"):
        read_footer(data)


def test_a_footer_of_very_many_values_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(footers, "MAX_VALUES", 1000)
    assert read_footer(wrapped(b"\x36\x02\x19\x0c\x29\xf6\xe0\x07" + b"\2" * 992 + b"\0")).num_rows == 1
    with pytest.raises(ValueError, match="more than 1000 values"):
        read_footer(wrapped(b"\x36\x02\x19\x0c\x29\xf6\xe8\x07" + b"\2" * 1000 + b"\0"))


def test_random_bytes_raise_nothing_else(tmp_path: Path):
    whole = write(tmp_path / "f.parquet")
    size = int.from_bytes(whole[-8:-4], "little")
    footer = whole[-8 - size : -8]
    rng = np.random.default_rng(0)
    for _ in range(500):
        broken = bytearray(footer)
        for at in rng.integers(0, size, 3):
            broken[at] = rng.integers(256)
        try:
            read_footer(wrapped(bytes(broken)))
        except ValueError:
            continue
