"""Parquet of strangers: rows as pyarrow reads them, and nothing that unpacks to far more than the file holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moerl.contract import parquet
from moerl.contract.disk import write_parquet
from moerl.contract.parquet import LEAST_BYTES, MOST_TIMES, most_bytes, read_batches
from moerl.errors import ConfigError
from tests.factories import make_trajectory

ROOT = Path(__file__).parents[3]


def rows_of(file: Path, rows: int = 1000, **options: Any) -> list[dict[str, Any]]:
    return [row for batch in read_batches(file, rows=rows, **options) for row in batch.to_pylist()]


def chat(text: str | None) -> list[dict[str, str | None]]:
    return [{"role": "user", "content": text}]


EVERY_TYPE = pa.table(
    {
        "text": ["a", "b", None, "a"] * 50,
        "number": [1, None, 3, 4] * 50,
        "flag": [True, None] * 100,
        "nothing": pa.array([None] * 200),
        "texts": pa.array([["a", "b"], None, [], ["c", None]] * 50),
        "chat": [chat("hi"), [], None, chat(None) + chat("c")] * 50,
        "map": pa.array([[("k", "v")], None, [], [("k2", None)]] * 50, pa.map_(pa.string(), pa.string())),
        "large": pa.array(["x", "y", None, "z"] * 50, pa.large_string()),
        "coded": pa.array(["x", "y", None, "z"] * 50).dictionary_encode(),
        "bytes": pa.array([b"abcd", None] * 100, pa.binary(4)),
        "decimal": pa.array([Decimal("1.5"), None] * 100),
        "pairs": pa.array([["a", "b"], ["c", "d"]] * 100, pa.list_(pa.string(), 2)),
    }
)


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_are_those_that_pyarrow_reads(
    tmp_path: Path, is_counted: bool, version: Any, monkeypatch: pytest.MonkeyPatch
):
    # Dictionaries are full after a few texts, and the rest of the pages holds texts themselves.
    pq.write_table(
        EVERY_TYPE, tmp_path / "f", row_group_size=70, data_page_version=version, dictionary_pagesize_limit=8
    )
    if is_counted:
        needed = parquet.unpacked_bytes(parquet.footer_of(tmp_path / "f"))
        monkeypatch.setattr(parquet, "most_bytes", lambda _: needed + 4000)
    assert rows_of(tmp_path / "f", 33) == EVERY_TYPE.to_pylist()
    assert rows_of(tmp_path / "f", columns={"text", "chat", "lost"}) == EVERY_TYPE.select(["text", "chat"]).to_pylist()


def test_texts_that_stand_in_a_dictionary_are_counted_as_often_as_they_stand_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = pa.table(
        {"a": ["x" * 100] * 50 + ["y"] * 50, "b": [chat("z" * 10)] * 100, "c": pa.array([["w"] * 7] * 100)}
    )
    pq.write_table(table, tmp_path / "f", row_group_size=40)
    repeated = 50 * 100 + 50 + 100 * len("userz" + "z" * 9) + 700
    needed = parquet.unpacked_bytes(parquet.footer_of(tmp_path / "f")) + repeated
    monkeypatch.setattr(parquet, "most_bytes", lambda _: needed)
    assert rows_of(tmp_path / "f") == table.to_pylist()
    monkeypatch.setattr(parquet, "most_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=f"seen: {needed:,} bytes or more in 100 rows"):
        rows_of(tmp_path / "f")


def test_larger_files_may_unpack_to_more():
    assert most_bytes(0) == most_bytes(LEAST_BYTES // MOST_TIMES) == LEAST_BYTES
    assert most_bytes(LEAST_BYTES) == MOST_TIMES * LEAST_BYTES


# --- bombs -----------------------------------------------------------------------------------------------------------


def repeated(count: int, text: str = "x" * 1_000_000) -> pa.Array:
    return pa.DictionaryArray.from_arrays(zeros(count), pa.array([text]))


def zeros(count: int) -> pa.Array:
    return pa.nulls(count, pa.int32()).fill_null(0)


def listed(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


BOMBS: dict[str, Callable[[], dict[str, pa.Array]]] = {
    "a text in many rows": lambda: {"prompt": repeated(3000)},
    "a text in many messages": lambda: {"chat": listed(pa.StructArray.from_arrays([repeated(3000)], ["content"]))},
    "many rows of nothing": lambda: {"prompt": pa.nulls(3_000_000, pa.string())},
    "many messages of nothing": lambda: {"chat": listed(pa.nulls(10_000_000, pa.string()))},
    "a number in a long list": lambda: {"ids": listed(zeros(10_000_000))},
    "wide bytes": lambda: {"b": pa.array([b"x" * 100_000], pa.binary(100_000)).take(zeros(700))},
    "a page that is packed well": lambda: {"prompt": pa.array(["x" * 80_000_000])},
}

READ = """
import resource, sys
from pathlib import Path
from moerl.contract.parquet import read_batches
from moerl.errors import ConfigError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for batch in read_batches(Path(sys.argv[1]), rows=1000):
        batch.to_pylist()
    print("rows", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
except ConfigError as error:
    print(error, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_unpacks_to_much_is_refused_before_it_takes_the_memory(name: str, tmp_path: Path):
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table(BOMBS[name]()), file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 150_000
    said = subprocess.run(
        [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    message, _, taken = said.rpartition(" ")
    assert f"{file} unpacks to far more than it holds; seen: " in message
    assert f"expected: at most {LEAST_BYTES:,}" in message
    assert int(taken) << 10 < 2 * LEAST_BYTES


THREADS = """
import os, sys
from pathlib import Path
from moerl.contract import disk, parquet
from moerl.errors import ConfigError
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
disk.read_parquet(sys.argv[1])
for file in sys.argv[2:]:
    try:
        for batch in parquet.read_batches(Path(file), rows=10):
            batch.to_pylist()
    except ConfigError:
        print("refused", end=" ")
print(threads() - before)
"""


def test_reading_starts_no_thread_that_could_abort_the_process_at_its_end(tmp_path: Path):
    rng = np.random.default_rng(0)
    write_parquet(tmp_path / "d", [make_trajectory(rng) for _ in range(20)])
    pq.write_table(EVERY_TYPE, tmp_path / "f", row_group_size=70)
    pq.write_table(pa.table(BOMBS["a text in many messages"]()), tmp_path / "b", store_schema=False)
    run = [sys.executable, "-c", THREADS, *(str(tmp_path / name) for name in "dfb")]
    assert subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "refused 0\n"


def test_a_footer_that_tells_less_than_the_pages_is_not_believed(tmp_path: Path):
    pq.write_table(pa.table(BOMBS["a page that is packed well"]()), tmp_path / "f", compression="zstd")
    told = pq.read_metadata(tmp_path / "f").row_group(0).column(0).total_uncompressed_size
    content = (tmp_path / "f").read_bytes()
    one = bytes([0x82, *[0x80] * (len(varint(told)) - 2), 0])
    (tmp_path / "f").write_bytes(content.replace(varint(told), one))
    assert pq.read_metadata(tmp_path / "f").row_group(0).column(0).total_uncompressed_size == 1
    with pytest.raises(ConfigError, match="unpacks to far more than it holds"):
        rows_of(tmp_path / "f")


def varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    number, out = number << 1, []
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
