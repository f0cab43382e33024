"""Parquet dumps: exact, readable without moerl, whole or absent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import SPEC, make_trajectory, same_trajectory, trajectories
from hypothesis import given, settings

from moerl.contract import disk as disk_module
from moerl.contract import files as files_module
from moerl.contract import seals
from moerl.contract.disk import read_parquet, write_parquet
from moerl.contract.dump_columns import REQUIRED, TURN, VERSION_KEY
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import ModelSpec, Trajectory
from moerl.errors import ContractError

RNG = np.random.default_rng(1)


def some(count: int = 3) -> list[Trajectory]:
    return [make_trajectory(RNG, rollout_id=f"r{i}", num_sampled=2 + i) for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(trajectories())
def test_any_trajectory_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, trajectory: Trajectory):
    path = tmp_path_factory.mktemp("dump") / "dump.parquet"
    write_parquet(path, [trajectory])
    (back,) = read_parquet(path)
    assert same_trajectory(back, trajectory)


def test_rewards_and_scores_may_differ_between_rows(tmp_path: Path):
    sent = [
        make_trajectory(RNG, rewards={"reward": 1.0}, scores={}),
        make_trajectory(RNG, rewards={}, scores={"teacher": np.ones(8, np.float32)}, timings={"decode": 2.5}),
    ]
    write_parquet(tmp_path / "d.parquet", sent)
    back = read_parquet(tmp_path / "d.parquet")
    assert all(same_trajectory(a, b) for a, b in zip(sent, back, strict=True))


def test_row_groups_are_bounded_and_joined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_module, "_MAX_GROUP_VALUES", 60)
    sent = some(5)
    write_parquet(tmp_path / "d.parquet", sent)
    assert pq.ParquetFile(tmp_path / "d.parquet").num_row_groups > 2
    back = read_parquet(tmp_path / "d.parquet")
    assert all(same_trajectory(a, b) for a, b in zip(sent, back, strict=True))


def test_pandas_reads_flat_columns(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    sent = some()
    write_parquet(tmp_path / "d.parquet", sent, texts=["a", "b", "c"])
    frame = pandas.read_parquet(tmp_path / "d.parquet")
    assert frame["rollout_id"].tolist() == ["r0", "r1", "r2"]
    assert frame["text"].tolist() == ["a", "b", "c"]
    assert frame["reward_reward"].tolist() == [1.0, 1.0, 1.0]
    assert frame["num_sampled"].tolist() == [2, 3, 4]
    row = frame.iloc[2]
    experts = row["expert_ids"].reshape(-1, row["num_moe_layers"], row["experts_per_token"])
    assert (experts == sent[2].expert_ids).all()
    assert row["turns"][1]["top_p"] == 0.9


def test_columns_are_plain_parquet_types(tmp_path: Path):
    write_parquet(tmp_path / "d.parquet", some(), texts=["a", "b", "c"])
    columns = {name: str(column.type) for name, column in zip(*_columns(tmp_path / "d.parquet"), strict=True)}
    assert columns["rollout_id"] == columns["text"] == "string"
    assert columns["reward_reward"] == "double"
    assert columns["num_sampled"] == "int32"
    assert columns["expert_ids"].startswith("list<")
    assert "uint8" in columns["expert_ids"]
    row = pq.read_table(tmp_path / "d.parquet").to_pylist()[2]
    assert len(row["expert_ids"]) == (row["num_tokens"] - 1) * row["num_moe_layers"] * row["experts_per_token"]
    assert row["turns"][1]["top_p"] == 0.9


def _columns(path: Path) -> tuple[list[str], list[pa.ChunkedArray]]:
    table = pq.read_table(path)
    return table.column_names, table.columns


def test_a_failed_write_leaves_the_previous_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    before = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(disk_module, "_table", fails)
    with pytest.raises(OSError, match="disk full"):
        write_parquet(path, some(2))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_to_write_and_missing_texts_are_errors(tmp_path: Path):
    with pytest.raises(ContractError, match="wrong_shape"):
        write_parquet(tmp_path / "d.parquet", [])
    with pytest.raises(ContractError, match="wrong_shape"):
        write_parquet(tmp_path / "d.parquet", some(2), texts=["a"])


def test_models_with_other_expert_dtypes_do_not_share_a_file(tmp_path: Path):
    wide = make_trajectory(RNG, ModelSpec(1, 1, 300, 100))
    with pytest.raises(ContractError, match="spec_mismatch"):
        write_parquet(tmp_path / "d.parquet", [make_trajectory(RNG), wide])


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Puts another table into a dump and seals it again: what a hostile or careless writer can always make."""
    table = change(pq.read_table(path))
    options = {"use_dictionary": False, "write_page_checksum": True} | options
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({seals.KEY: seals.BLANK})
    seals.seal(path)


def with_column(name: str, column: pa.Array, new_name: str | None = None) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index(name), new_name or name, column)

    return change


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "d.parquet"
    write_parquet(path, [make_trajectory(RNG, rollout_id="r0", scores={"teacher": np.zeros(8, np.float32)})])
    return path


def refusal(path: Path) -> ContractError:
    with pytest.raises(ContractError) as caught:
        read_parquet(path)
    return caught.value


def test_a_dump_that_was_rewritten_as_it_was_is_read(dump: Path):
    (before,) = read_parquet(dump)
    rewrite(dump, lambda table: table)
    assert same_trajectory(read_parquet(dump)[0], before)


def test_a_broken_row_is_refused_on_reading(dump: Path):
    rewrite(dump, with_column("rollout_logprobs", pa.array([[1.0] * 8], pa.list_(pa.float32()))))
    assert refusal(dump).reason == Reason.LOGPROB_POSITIVE


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_or_retyped_column_is_refused(dump: Path, column: str):
    whole = dump.read_bytes()
    rewrite(dump, lambda table: table.drop_columns([column]))
    assert (refusal(dump).reason, refusal(dump).field) == (Reason.MISSING_FIELD, column)
    dump.write_bytes(whole)
    rewrite(dump, with_column(column, pa.array([True])))
    assert (refusal(dump).reason, refusal(dump).field) == (Reason.WRONG_TYPE, column)


def nested(dtype: pa.DataType, depth: int) -> pa.DataType:
    for _ in range(depth):
        dtype = pa.list_(dtype)
    return dtype


def no_text() -> pa.Array:
    return pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))


NUMBERS = pa.list_(pa.int32())
TURNS = pa.list_(TURN)
CRAFTED: dict[str, tuple[Reason, Callable[[pa.Table], pa.Table]]] = {
    "nulls": (Reason.MISSING_FIELD, with_column("rollout_id", pa.nulls(1, pa.string()))),
    "a null list": (Reason.MISSING_FIELD, with_column("token_ids", pa.nulls(1, NUMBERS))),
    "nulls in a list": (Reason.WRONG_DTYPE, with_column("token_ids", pa.array([[None] * 8], NUMBERS))),
    "nulls among flags": (Reason.WRONG_DTYPE, with_column("sampled", pa.array([[None] * 8], nested(pa.bool_(), 1)))),
    "nulls in a score": (
        Reason.VALUE_NOT_FINITE,
        with_column("score_teacher", pa.array([[None] * 8], nested(pa.float32(), 1))),
    ),
    "a null turn": (Reason.MISSING_FIELD, with_column("turns", pa.array([[None]], TURNS))),
    "a turn of nulls": (Reason.FILE_CORRUPT, with_column("turns", pa.array([[{}]], TURNS))),
    "a turn without an end": (
        Reason.TURNS_DO_NOT_COVER,
        with_column("turns", pa.array([[{"start": 0, "kind": "prompt"}]], TURNS)),
    ),
    "half the sampling": (
        Reason.SAMPLING_INVALID,
        with_column("turns", pa.array([[{"start": 0, "end": 8, "kind": "sampled", "top_p": 0.5}]], TURNS)),
    ),
    "no turns": (Reason.TURNS_DO_NOT_COVER, with_column("turns", pa.array([[]], TURNS))),
    "nested lists": (Reason.WRONG_TYPE, with_column("token_ids", pa.array([[[1]]], nested(pa.int32(), 2)))),
    "a fixed list": (Reason.WRONG_TYPE, with_column("token_ids", pa.array([[1] * 8], pa.list_(pa.int32(), 8)))),
    "a large list": (Reason.WRONG_TYPE, with_column("token_ids", pa.array([[1] * 8], pa.large_list(pa.int32())))),
    "a wider list": (Reason.WRONG_TYPE, with_column("token_ids", pa.array([[1] * 8], nested(pa.int64(), 1)))),
    "a text for a reward": (Reason.WRONG_TYPE, with_column("reward_reward", pa.array(["1"]))),
    "a dictionary": (Reason.WRONG_TYPE, with_column("rollout_id", pa.array(["r0"]).dictionary_encode())),
    "a decimal": (Reason.FILE_CORRUPT, with_column("reward_reward", pa.array([1], pa.decimal128(5)))),
    "an extension": (
        Reason.WRONG_TYPE,
        with_column("fork_at", pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8()))),
    ),
    "a map": (Reason.WRONG_TYPE, with_column("turns", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())))),
    "a large text": (Reason.WRONG_TYPE, with_column("rollout_id", pa.array(["r0"], pa.large_string()))),
    "a view": (Reason.WRONG_TYPE, with_column("rollout_id", pa.array(["r0"], pa.binary()))),
    "an unknown column": (Reason.UNKNOWN_FIELD, with_column("reward_reward", pa.array([1.0]), "seward_reward")),
    "a column twice": (Reason.DUPLICATE_FIELD, lambda table: table.append_column("fork_at", table["fork_at"])),
    "no rows": (Reason.FILE_CORRUPT, lambda table: table.slice(0, 0)),
    "another number of layers": (
        Reason.WRONG_SHAPE,
        with_column("num_moe_layers", pa.array([SPEC.num_moe_layers + 1], pa.int32())),
    ),
    "fewer than no layers": (Reason.WRONG_SHAPE, with_column("num_moe_layers", pa.array([-3], pa.int32()))),
    "too few experts": (Reason.WRONG_SHAPE, with_column("expert_ids", pa.array([[1] * 5], nested(pa.uint8(), 1)))),
    "an empty trajectory": (Reason.WRONG_SHAPE, with_column("token_ids", pa.array([[]], NUMBERS))),
    "an unknown reason": (Reason.FILE_CORRUPT, with_column("finish_reason", pa.array(["tired"]))),
    "an unknown kind": (Reason.FILE_CORRUPT, with_column("turns", pa.array([[{"kind": "system"}]], TURNS))),
    "another number of tokens": (Reason.ROWS_DIFFER, with_column("num_tokens", pa.array([7], pa.int32()))),
    "a newer version": (Reason.ROWS_DIFFER, with_column("max_policy_version", pa.array([9], pa.int32()))),
    "an infinite reward": (Reason.VALUE_NOT_FINITE, with_column("reward_reward", pa.array([np.inf]))),
    "a text that is none": (Reason.FILE_CORRUPT, with_column("rollout_id", no_text())),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_table_is_refused_by_name(dump: Path, name: str):
    reason, change = CRAFTED[name]
    rewrite(dump, change)
    assert refusal(dump).reason == reason


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": True},
        {"use_dictionary": False, "column_encoding": {"rollout_id": "DELTA_BYTE_ARRAY"}},
        {"data_page_version": "2.0", "use_dictionary": ["engine_id"]},
        {"use_dictionary": False, "column_encoding": {"token_ids.list.element": "DELTA_BINARY_PACKED"}},
    ],
)
def test_what_could_repeat_itself_without_end_is_refused(dump: Path, options: dict[str, Any]):
    rewrite(dump, lambda table: table, **options)
    assert refusal(dump).reason == Reason.FILE_CORRUPT
    assert "another writer" in str(refusal(dump))


@pytest.mark.parametrize("use_dictionary", [False, True])
def test_a_dump_larger_than_the_limit_is_refused_before_it_is_decoded(dump: Path, use_dictionary: bool):
    with pytest.raises(ContractError, match="file_too_large"):
        read_parquet(dump, max_bytes=dump.stat().st_size - 1)
    zeros = pa.array([np.zeros(1 << 21, np.int32)], NUMBERS)
    paths = ["kept_ids.list.element"] if use_dictionary else []
    rewrite(dump, with_column("kept_ids", zeros), compression="zstd", use_dictionary=paths)
    assert dump.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(ContractError, match="file_too_large"):
        read_parquet(dump, max_bytes=1 << 20)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_every_flipped_bit_is_refused(tmp_path: Path):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(2), texts=["a", "b"], prompts=["p", "q"])
    whole = path.read_bytes()
    bits = np.random.default_rng(0).permutation(8 * len(whole)).tolist()
    # Of the end, too: the names of columns, the digest, the length of the footer.
    for bit in (*bits[:150], *range(8 * len(whole) - 1000, 8 * len(whole), 7)):
        path.write_bytes(flipped(whole, bit))
        assert refusal(path).reason in {Reason.FILE_CORRUPT, Reason.SCHEMA_VERSION_UNKNOWN}
    assert not any(seals.is_sealed(flipped(whole, bit)) for bit in bits[:10_000])


def test_a_footer_that_contradicts_itself_is_refused(dump: Path):
    """A histogram of repetitions that claims to be one of definitions: pyarrow's accessors end the process there."""
    whole = dump.read_bytes()
    of_repetitions, of_definitions = b"\x3c\x29\x26", b"\x3c\x39\x26"
    assert of_repetitions in whole
    path = dump.with_name("sealed.parquet")
    path.write_bytes(blank(whole.replace(of_repetitions, of_definitions, 1)))
    seals.seal(path)
    assert refusal(path).reason == Reason.FILE_CORRUPT


def flipped(whole: bytes, bit: int) -> bytes:
    broken = bytearray(whole)
    broken[bit // 8] ^= 1 << bit % 8
    return bytes(broken)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"reward_reward", b"reward_rewarD"), (b"score_teacher", b"score_teachex"), (b"engine-0", b"engine-1")],
)
def test_names_and_small_values_are_under_the_digest(dump: Path, old: bytes, new: bytes):
    rewrite(dump, lambda table: table, compression="none")
    whole = dump.read_bytes()
    assert old in whole
    dump.write_bytes(whole.replace(old, new))
    error = refusal(dump)
    assert (error.reason, error.seen) == (Reason.FILE_CORRUPT, "a digest that does not fit the file")


def test_pages_carry_checksums_for_every_reader(dump: Path):
    damage_a_page(dump)
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(dump, page_checksum_verification=True)


def test_a_page_that_was_damaged_before_the_seal_is_refused(dump: Path):
    rewrite(dump, lambda table: table, compression="none")
    damage_a_page(dump)
    assert len(pq.read_table(dump)) == 1
    path = dump.with_name("sealed.parquet")
    path.write_bytes(blank(dump.read_bytes()))
    seals.seal(path)
    assert "checksum" in str(refusal(path))


def damage_a_page(dump: Path) -> None:
    """Flips a bit of the kept mass; without compression it stays plausible."""
    column = pq.read_metadata(dump).row_group(0).column(column_index(dump, "kept_logmass.list.element"))
    data = bytearray(dump.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 4] ^= 1
    dump.write_bytes(data)


def column_index(dump: Path, path: str) -> int:
    group = pq.read_metadata(dump).row_group(0)
    return next(i for i in range(group.num_columns) if group.column(i).path_in_schema == path)


def blank(data: bytes) -> bytes:
    at = data.rfind(seals.KEY) + len(seals.KEY) + 2
    return data[:at] + seals.BLANK + data[at + 64 :]


def test_a_dump_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[str, str]] = []
    fsync, replace = files_module.os.fsync, files_module.os.replace

    def recorded_fsync(handle: int) -> None:
        done.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def recorded_replace(source: Path, target: Path) -> None:
        assert seals.is_sealed(source.read_bytes())
        done.append(("replace", target.name))
        replace(source, target)

    monkeypatch.setattr(files_module.os, "fsync", recorded_fsync)
    monkeypatch.setattr(files_module.os, "replace", recorded_replace)
    write_parquet(tmp_path / "d.parquet", some(1))
    (first, temporary), *rest = done
    assert (first, temporary.startswith(".d.parquet.")) == ("fsync", True)
    assert rest == [("replace", "d.parquet"), ("fsync", tmp_path.name)]


def test_a_dump_of_the_first_version_is_refused_by_name(dump: Path):
    rewrite(dump, lambda table: table.replace_schema_metadata({VERSION_KEY: b"1"}))
    for data in (dump.read_bytes(), dump.read_bytes().replace(seals.KEY, b"other.digest")):
        dump.write_bytes(data)
        error = refusal(dump)
        assert (error.reason, error.seen) == (Reason.SCHEMA_VERSION_UNKNOWN, "1")
        assert "the moerl version that wrote it" in error.remedy


def test_prompts_stand_beside_the_responses(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    write_parquet(tmp_path / "d.parquet", some(2), texts=["a", "b"], prompts=["1+1=", "日本"])
    frame = pandas.read_parquet(tmp_path / "d.parquet")
    assert frame["prompt"].tolist() == ["1+1=", "日本"]
    assert frame["text"].tolist() == ["a", "b"]
    with pytest.raises(ContractError, match="wrong_shape"):
        write_parquet(tmp_path / "d.parquet", some(2), prompts=["a"])
    with pytest.raises(ContractError, match="text_not_utf8"):
        write_parquet(tmp_path / "d.parquet", some(1), prompts=["\ud800"])


def test_files_of_others_and_torn_files_are_refused(tmp_path: Path):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    whole = path.read_bytes()
    pq.write_table(pa.table({"a": [1]}), path)
    assert refusal(path).reason == Reason.SCHEMA_VERSION_UNKNOWN
    for torn in (b"", whole[:-1], whole[: len(whole) // 2], whole[len(whole) // 2 :], whole + b"\0", b"\0" + whole):
        path.write_bytes(torn)
        assert refusal(path).reason == Reason.FILE_CORRUPT
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "absent.parquet")
    assert refusal(tmp_path).reason == Reason.FILE_CORRUPT
