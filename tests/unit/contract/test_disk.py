"""Parquet dumps: exact, readable without moerl, whole or absent."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import SPEC, make_trajectory, same_trajectory, trajectories
from hypothesis import given, settings

from moerl.contract import ContractError, ModelSpec, Reason, Trajectory
from moerl.contract import disk as disk_module
from moerl.contract.disk import read_parquet, write_parquet

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


def test_a_broken_row_is_refused_on_reading(tmp_path: Path):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    table = pq.read_table(path)
    column = table.schema.get_field_index("rollout_logprobs")
    broken = pa.array([[1.0] * 5], pa.list_(pa.float32()))
    pq.write_table(table.set_column(column, table.schema.field(column), broken), path)
    with pytest.raises(ContractError, match="logprob_positive"):
        read_parquet(path)


@pytest.mark.parametrize("column", ["token_ids", "turns", "rollout_id", "fingerprint"])
def test_a_missing_or_retyped_column_is_refused(tmp_path: Path, column: str):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([column]), path)
    with pytest.raises(ContractError, match="missing_field"):
        read_parquet(path)
    index = table.schema.get_field_index(column)
    pq.write_table(table.set_column(index, column, pa.array([1])), path)
    with pytest.raises(ContractError, match="wrong_type"):
        read_parquet(path)


def test_an_impossible_shape_is_refused(tmp_path: Path):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    table = pq.read_table(path)
    index = table.schema.get_field_index("num_moe_layers")
    pq.write_table(
        table.set_column(index, table.schema.field(index), pa.array([SPEC.num_moe_layers + 1], pa.int32())), path
    )
    with pytest.raises(ContractError, match="file_corrupt"):
        read_parquet(path)


def test_files_of_others_and_torn_files_are_refused(tmp_path: Path):
    path = tmp_path / "d.parquet"
    write_parquet(path, some(1))
    whole = path.read_bytes()
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ContractError, match="schema_version_unknown"):
        read_parquet(path)
    for torn in (b"", whole[:-1], whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        path.write_bytes(torn)
        with pytest.raises(ContractError) as caught:
            read_parquet(path)
        assert caught.value.reason == Reason.FILE_CORRUPT
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "absent.parquet")
