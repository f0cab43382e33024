"""Dumps that are damaged or made to harm: counted by reason or refused by name, and nothing is ever run."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign_dumps import (
    make_dumped,
    open_dump,
    sglang_answer,
    write_lines,
    write_nemo_rl,
    write_prime_rl_export,
    write_prime_rl_traces,
    write_skyrl,
    write_verl_texts,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.diagnostics.dumps import jsonl, slime
from moerl.diagnostics.dumps.build import EMPTY
from moerl.diagnostics.dumps.minimal import COLUMNS, write_minimal
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.values import RowError
from moerl.errors import ConfigError, MoerlError

GOOD: dict[str, Any] = {
    "token_ids": [11, 40, 2],
    "sampled": [False, True, True],
    "rollout_logprobs": [0, -0.7, -0.2],
    "trainer_logprobs": [0, -0.8, -0.2],
    "policy_versions": 3,
    "expert_ids": [0, 3, 1, 2],
    "num_layers": 1,
    "experts_per_token": 2,
    "kept_offsets": [0, 0, 2, 3],
    "kept_ids": [40, 77, 2],
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": None}, "token ids: missing"),
    ({"token_ids": "abc"}, "token ids: not a list"),
    ({"token_ids": [11, 40.5, 2]}, "token ids: not all are integers"),
    ({"token_ids": [11, True, 2]}, "token ids: not all are integers"),
    ({"token_ids": [11, -40, 2]}, "token ids: an id is out of range"),
    ({"token_ids": [11, 2**31, 2]}, "token ids: an id is out of range"),
    ({"token_ids": [11, 2**200, 2]}, "token ids: an integer is too large"),
    ({"token_ids": [11]}, "token ids: fewer than two"),
    ({"token_ids": [[11], [40], [2]]}, "token ids: not all are integers"),
    ({"sampled": None}, "sampled: missing"),
    ({"sampled": [0, 2, 1]}, "sampled: not all are 0 or 1"),
    ({"sampled": [0, 0, 0]}, EMPTY),
    ({"sampled": [1, 1, 1]}, "sampled: the first token is"),
    ({"sampled": [0, 1]}, "sampled: wrong length"),
    ({"sampled": None, "response_length": 3}, "response length: no token is left for the prompt"),
    ({"sampled": None, "response_length": 0}, EMPTY),
    ({"rollout_logprobs": [0, float("nan"), 0]}, "log-probs of the rollout: one is not finite"),
    ({"rollout_logprobs": [0, float("-inf"), 0]}, "log-probs of the rollout: one is not finite"),
    ({"rollout_logprobs": [0, 10**400, 0]}, "log-probs of the rollout: a number is too large"),
    ({"rollout_logprobs": [0, None, 0]}, "log-probs of the rollout: not all are numbers"),
    ({"rollout_logprobs": [0, -1]}, "log-probs of the rollout: wrong length"),
    ({"trainer_logprobs": [0, float("inf"), 0]}, "log-probs of the trainer: one is not finite"),
    ({"policy_versions": -2}, "policy versions: not an integer in range"),
    ({"policy_versions": [1, 2]}, "policy versions: wrong length"),
    ({"policy_versions": "3"}, "policy versions: not an integer in range"),
    ({"temperatures": -1}, "temperatures: one is negative or not finite"),
    ({"temperatures": float("nan")}, "temperatures: not a finite number"),
    ({"top_ps": [1, 1]}, "top-p: wrong length"),
    ({"num_layers": None}, "num_layers: not an integer in range"),
    ({"num_layers": 2**31 - 1}, "expert_ids: ids do not divide into rows"),
    ({"expert_ids": [0, 3, 1]}, "expert_ids: ids do not divide into rows"),
    ({"expert_ids": [0, -3, 1, 2]}, "expert ids: some of a row are negative"),
    ({"routed": [True]}, "routed: not one for each row of expert ids"),
    ({"trainer_expert_ids": [0, 3]}, "the trainer's expert ids: not a row for each token but the last"),
    ({"kept_offsets": [0, 0, 2, 9]}, "offsets of kept sets: do not lead from zero to the number of ids"),
    ({"kept_offsets": [0, 2, 0, 3]}, "offsets of kept sets: do not lead from zero to the number of ids"),
    ({"kept_offsets": []}, "offsets of kept sets: do not lead from zero to the number of ids"),
    ({"kept_offsets": [0, 3]}, "offsets of kept sets: wrong length"),
    ({"kept_ids": [40, -7, 2]}, "ids of kept sets: an id is out of range"),
    ({"name": ["a"]}, "name: not a text"),
    ({"step": 1.5}, "step: not an integer in range"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG, ids=[f"{n}-{reason}" for n, (_, reason) in enumerate(WRONG)])
def test_a_row_that_cannot_be_used_is_counted_by_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_lines(tmp_path / "dump.jsonl", [GOOD, GOOD | change, GOOD])
    dump = open_dump(tmp_path / "dump.jsonl")
    assert len(list(dump.rollouts)) == 2
    assert dump.unusable.counts == {reason: 1}
    assert dump.unusable.examples[reason].startswith("dump.jsonl line 2: ")


def test_lines_that_are_no_json_objects_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    good = json.dumps(GOOD).encode()
    lines = [good, good[:40], b"[" * 900, b"[1]", b"\xff\xfe", b"1" * 900, b"x" * 5000, b"", good]
    (tmp_path / "dump.jsonl").write_bytes(b"\n".join(lines))
    dump = open_dump(tmp_path / "dump.jsonl")
    assert len(list(dump.rollouts)) == 2
    assert dump.unusable.counts == {"not JSON": 3, "not a JSON object": 2, "line too long": 1}


def test_json_that_is_nested_too_deep_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        jsonl.decode(b'{"a":' * 200_000)


def test_a_dump_that_ends_in_the_middle_of_a_line_keeps_what_was_whole(tmp_path: Path) -> None:
    file = tmp_path / "train_data_step1.jsonl"
    write_nemo_rl(file, [make_dumped(np.random.default_rng(1), name=str(index)) for index in range(3)])
    file.write_bytes(file.read_bytes()[:-30])
    dump = open_dump(file)
    assert len(list(dump.rollouts)) == 2
    assert dump.unusable.counts == {"not JSON": 1}


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, -(2**63), 2**64, 10**400]),
    st.floats(),
    st.text(),
)
lists = st.lists(scalars, max_size=4)
odd = st.one_of(scalars, lists, st.lists(lists, max_size=3), st.dictionaries(st.text(max_size=3), lists, max_size=2))
relaxed = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def read_all(row: Any, **options: Any) -> None:
    """Whatever a row is, reading it ends with rollouts, counts or an error of ours."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "dump.jsonl"
        write_lines(path, [row])
        try:
            dump = open_dump(path, **options)
            count = len(list(dump.rollouts))
        except MoerlError:
            return
        assert count or dump.unusable.counts


@relaxed
@given(changes=st.dictionaries(st.sampled_from(sorted(COLUMNS)), odd, max_size=4))
def test_odd_values_in_the_minimal_schema_are_rollouts_or_counted(changes: dict[str, Any]) -> None:
    read_all(GOOD | changes)


def foreign_rows() -> list[dict[str, Any]]:
    rollout = make_dumped(np.random.default_rng(2))
    with TemporaryDirectory() as folder:
        write_nemo_rl(Path(folder) / "nemo.jsonl", [rollout])
        files = [Path(folder) / "nemo.jsonl", write_prime_rl_export(Path(folder), [rollout])]
        files.append(write_prime_rl_traces(Path(folder), [rollout]))
        return [json.loads(file.read_text()) for file in files] + [sglang_answer(rollout)]


FOREIGN = foreign_rows()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a row, at any depth; of each list, those of its first two elements alone."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [path] * bool(path) + [each for key, item in inner for each in places(item, (*path, key))]


@relaxed
@given(data=st.data())
def test_odd_values_in_rows_of_other_systems_are_rollouts_or_counted(data: st.DataObject) -> None:
    row = json.loads(json.dumps(data.draw(st.sampled_from(FOREIGN))))
    *path, last = data.draw(st.sampled_from(places(row)))
    inner = row
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(odd)
    read_all(row, experts_per_token=2, moe_layers=(0, 1))


SAMPLE: dict[str, Any] = {
    "tokens": [1, 2, 3, 4],
    "response_length": 3,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-1.0, 0.0, -2.0],
    "rollout_routed_experts": np.zeros((3, 2, 2), np.int32),
    "rollout_top_p_token_ids": np.array([5, 4], np.int32),
    "rollout_top_p_token_offsets": [0, 0, 0, 2],
    "weight_versions": ["3", "4"],
    "index": 0,
}


def from_samples(*samples: Any) -> tuple[list[Any], Reading]:
    reading = Reading()
    return list(slime.read({"rollout_id": 1, "samples": list(samples)}, Path("4.pt"), reading)), reading


def test_a_version_for_each_answer_goes_to_its_tokens() -> None:
    ((found,), _) = from_samples(SAMPLE)
    assert found.policy_versions.tolist() == [-1, 3, -1, 4]


def test_versions_that_cannot_be_told_apart_are_not_known() -> None:
    ((found,), reading) = from_samples(SAMPLE | {"weight_versions": ["3", "4", "5"]})
    assert found.policy_versions.tolist() == [-1] * 4
    assert any("several versions" in note for note in reading.notes)


def test_versions_that_are_texts_are_numbered_and_a_note_says_so() -> None:
    rollouts, reading = from_samples(*[SAMPLE | {"weight_versions": [name]} for name in ("b", "a", "b", "9")])
    assert [each.policy_versions[1] for each in rollouts] == [0, 1, 0, 2]
    assert [note for note in reading.notes if "numbered" in note] == [
        "policy versions are texts here and were numbered in order of appearance (0: 'b', 1: 'a', 2: '9')"
    ]


def test_a_text_among_numeric_versions_is_not_known() -> None:
    reading = Reading()
    versions = ("7", "default", None, "99999999999", "²", 8)
    assert reading.version_numbers(versions) == [7, -1, -1, -1, -1, 8]
    with pytest.raises(RowError):
        reading.version_numbers([1.5])


arrays = st.builds(
    lambda shape, dtype: np.zeros(shape, dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from([np.int32, np.uint8, np.float64, np.bool_, np.complex64, "U1", "M8[s]", object]),
)


@relaxed
@given(changes=st.dictionaries(st.sampled_from(sorted(SAMPLE)), st.one_of(odd, arrays), max_size=3))
def test_odd_values_in_samples_of_slime_are_rollouts_or_counted(changes: dict[str, Any]) -> None:
    rollouts, reading = from_samples(SAMPLE | changes)
    assert len(rollouts) + reading.unusable.counts.total() == 1


def test_lists_that_hold_each_other_take_no_memory_and_no_time() -> None:
    bomb: list[Any] = [0]
    for _ in range(60):
        bomb = [bomb] * 1000
    circle: list[Any] = []
    circle.append(circle)
    for name in ("tokens", "rollout_log_probs", "rollout_routed_experts", "rollout_top_p_token_ids", "loss_mask"):
        for hostile in (bomb, circle):
            rollouts, reading = from_samples(SAMPLE | {name: hostile})
            assert not rollouts
            assert reading.unusable.counts.total() == 1


class Harm:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["batch.pkl", "batch.jsonl", "batch.parquet"])
def test_a_pickle_is_never_unpickled(tmp_path: Path, name: str, protocol: int) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Harm(tmp_path / "harm"), protocol))
    with pytest.raises(ConfigError, match=r"converter\.py\.txt"):
        list(open_dump(tmp_path / name).rollouts)
    assert not (tmp_path / "harm").exists()


def test_a_batch_of_skyrl_is_refused_with_its_converter(tmp_path: Path) -> None:
    write_skyrl(tmp_path / "batch.pkl", [make_dumped(np.random.default_rng(1))])
    with pytest.raises(ConfigError, match=r"SkyRL.*converter\.py\.txt"):
        open_dump(tmp_path / "batch.pkl")


def test_texts_of_verl_are_refused(tmp_path: Path) -> None:
    write_verl_texts(tmp_path / "4.jsonl", [make_dumped(np.random.default_rng(1))])
    with pytest.raises(ConfigError, match="texts alone"):
        open_dump(tmp_path / "4.jsonl")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"PAR1",
        b"PAR1" + bytes(20),
        b"PK\x03\x04" + bytes(50),
        b"hello",
        b"{",
        b"[",
        b"[1, 2]",
        b"[[",
        b'{"a": 1}',
    ],
)
def test_a_file_of_no_known_format_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dump").write_bytes(content)
    with pytest.raises(ConfigError, match="DUMP"):
        list(open_dump(tmp_path / "dump").rollouts)


def test_a_zip_file_without_torch_is_refused_by_name(tmp_path: Path) -> None:
    for name, expected in (("a.txt", "no known format"), ("archive/data.pkl", "needs torch")):
        with zipfile.ZipFile(tmp_path / "dump.pt", "w") as archive:
            archive.writestr(name, "x")
        with pytest.raises(ConfigError, match=expected):
            open_dump(tmp_path / "dump.pt")


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="no rollouts"):
            open_dump(path)
    with pytest.raises(ConfigError, match="moe_layers"):
        open_dump(tmp_path, moe_layers=[])


def test_a_directory_of_two_formats_is_refused(tmp_path: Path) -> None:
    rollout = make_dumped(np.random.default_rng(1))
    write_minimal(tmp_path / "1.jsonl", [rollout])
    write_nemo_rl(tmp_path / "2.jsonl", [rollout])
    with pytest.raises(ConfigError, match="several formats"):
        list(open_dump(tmp_path).rollouts)


def test_a_parquet_file_that_is_cut_or_changed_is_refused_or_counted(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    rng = np.random.default_rng(4)
    write_minimal(whole, [make_dumped(rng, name=str(index)) for index in range(3)])
    data, refused = whole.read_bytes(), 0
    for trial in range(60):
        changed = bytearray(data)
        if trial % 3:
            changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        else:
            del changed[int(rng.integers(len(data))) :]
        (tmp_path / "changed.parquet").write_bytes(changed)
        try:
            list(open_dump(tmp_path / "changed.parquet").rollouts)
        except MoerlError:
            refused += 1
    assert refused > 40


def test_columns_of_other_types_and_nulls_are_counted(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "token_ids": [[1, 2, 3], [1, None, 3], None],
        "rollout_logprobs": [[0.0, -1.0, -2.0]] * 3,
        "response_length": [2] * 3,
    }
    pq.write_table(pa.table(columns), tmp_path / "dump.parquet")
    dump = open_dump(tmp_path / "dump.parquet")
    assert len(list(dump.rollouts)) == 1
    assert dump.unusable.counts == {"token ids: not all are integers": 1, "token ids: missing": 1}
    pq.write_table(pa.table(columns | {"token_ids": [{"a": 1}] * 3}), tmp_path / "dump.parquet")
    dump = open_dump(tmp_path / "dump.parquet")
    assert not list(dump.rollouts)
    assert dump.unusable.counts == {"token ids: not a list": 3}


def test_a_row_group_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_minimal(tmp_path / "dump.parquet", [make_dumped(np.random.default_rng(1))])
    monkeypatch.setattr("moerl.diagnostics.dumps.parquet._MAX_GROUP_VALUES", 20)
    with pytest.raises(ConfigError, match="row group 0"):
        list(open_dump(tmp_path / "dump.parquet").rollouts)
