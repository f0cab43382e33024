"""The minimal schema: what is written is read, by this and by a converter that knows nothing of moerl."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from factories import SPEC
from foreign_dumps import make_dumped, open_dump, same, write_lines, write_skyrl
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import run_within

from moerl.contract.fields import KeptSets
from moerl.contract.trajectory import SamplingParams
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.records import record_of
from moerl.diagnostics.dumps.refused import CONVERTER
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ConfigError, ContractError

LINE: dict[str, Any] = {"token_ids": [5, 6, 7], "rollout_logprobs": [-1.0, -2.0], "response_length": 2}


@st.composite
def dumped_rollouts(draw: st.DrawFn) -> list[DumpedRollout]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=3, unique=True))
    out = []
    for name in names:
        spans = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
        rollout = make_dumped(
            rng, name=name, spans=spans, layers=draw(st.integers(1, 3)), experts=draw(st.integers(1, 3))
        )
        num_tokens = len(rollout)
        changes: dict[str, Any] = {
            "expert_ids": None if (ids := rollout.expert_ids) is None else ids[: draw(st.integers(0, len(ids)))],
            "trainer_logprobs": {},
            "step": draw(st.integers(-1, 9)),
            "engine": draw(st.sampled_from(["", "e"])),
            "turns": rng.integers(0, 3, num_tokens).astype(np.int16),
        }
        changes["routed"] = rng.random(len(changes["expert_ids"])) < 0.5
        if draw(st.booleans()):
            changes |= {"expert_ids": None, "routed": None, "kept": None}
        if draw(st.booleans()):
            changes["trainer_logprobs"] = {"both": rollout.rollout_logprobs, "trainer": rollout.rollout_logprobs}
            changes["trainer_expert_ids"] = rng.integers(0, 9, (num_tokens - 1, 2, 4)).astype(np.int32)
            changes["prefix_versions"] = rng.integers(-1, 3, num_tokens).astype(np.int32)
        out.append(make_dumped(rng, name=name, spans=spans, **changes))
    return out


@settings(max_examples=30, deadline=None)
@given(rollouts=dumped_rollouts(), ending=st.sampled_from([".parquet", ".jsonl"]))
def test_rollouts_are_read_as_they_were_written(rollouts: list[DumpedRollout], ending: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"dump{ending}"
        write_minimal(path, rollouts)
        if ending == ".jsonl" and not rollouts:
            with pytest.raises(ConfigError, match="empty file"):
                open_dump(path)
            return
        dump = open_dump(path)
        found = list(dump.rollouts)
    assert not dump.unusable.counts
    for left, right in zip(found, rollouts, strict=True):
        same(left, right)


def test_columns_of_the_response_alone_count_from_its_first_token(tmp_path: Path) -> None:
    more = {"policy_versions": [3, 4], "temperatures": 0.5, "kept_offsets": [0, 2, 3], "kept_ids": [9, 6, 7]}
    write_lines(tmp_path / "dump.jsonl", [LINE | more])
    (found,) = open_dump(tmp_path / "dump.jsonl").rollouts
    assert found.sampled.tolist() == [False, True, True]
    assert found.rollout_logprobs.tolist() == [0, -1, -2]
    assert found.policy_versions.tolist() == [-1, 3, 4]
    assert found.temperatures.tolist() == [1, 0.5, 0.5]
    assert found.top_ps.tolist() == [1, 1, 1]
    assert found.turns.tolist() == [0, 1, 1]
    assert found.kept is not None
    assert (found.kept.offsets.tolist(), found.kept.ids.tolist()) == ([0, 0, 2, 3], [6, 9, 7])
    assert found.name == "dump.jsonl line 1"


def test_a_row_of_negative_ids_was_not_recorded(tmp_path: Path) -> None:
    routes = {"expert_ids": [-1, -1, 3, 4], "num_layers": 1, "experts_per_token": 2}
    write_lines(tmp_path / "dump.jsonl", [LINE | routes])
    (found,) = open_dump(tmp_path / "dump.jsonl").rollouts
    assert found.routed is not None
    assert found.expert_ids is not None
    assert found.routed.tolist() == [False, True]
    assert found.expert_ids.tolist() == [[[0, 0]], [[3, 4]]]


def test_a_file_that_pandas_wrote_is_read(tmp_path: Path) -> None:
    pd.DataFrame([LINE, LINE | {"policy_versions": 3, "group": "g"}]).to_parquet(tmp_path / "dump.parquet")
    found = list(open_dump(tmp_path / "dump.parquet").rollouts)
    assert [each.token_ids.tolist() for each in found] == [[5, 6, 7]] * 2
    assert found[1].group == "g"


def test_rollouts_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    write_lines(tmp_path / "dump.jsonl", [LINE | {"name": name} for name in ("a", "a", "a#2", "a")])
    names = [each.name for each in open_dump(tmp_path / "dump.jsonl").rollouts]
    assert len(set(names)) == 4
    assert names[0] == "a"


def test_an_unknown_scorer_or_ending_is_not_written(tmp_path: Path) -> None:
    rollout = make_dumped(np.random.default_rng(1))
    with pytest.raises(ConfigError, match=r"\.parquet or \.jsonl"):
        write_minimal(tmp_path / "dump.csv", [rollout])
    rollout = make_dumped(np.random.default_rng(1), trainer_logprobs={"mine": rollout.rollout_logprobs})
    with pytest.raises(ConfigError, match="mine"):
        write_minimal(tmp_path / "dump.jsonl", [rollout])
    assert not list(tmp_path.iterdir())


def test_a_large_dump_has_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moerl.diagnostics.dumps.minimal._GROUP_VALUES", 100)
    rollouts = [make_dumped(np.random.default_rng(index), name=str(index)) for index in range(5)]
    write_minimal(tmp_path / "dump.parquet", rollouts)
    assert pq.ParquetFile(tmp_path / "dump.parquet").num_row_groups > 1
    for left, right in zip(open_dump(tmp_path / "dump.parquet").rollouts, rollouts, strict=True):
        same(left, right)


def convert(tmp_path: Path, source: str) -> Path:
    script, target = tmp_path / "converter.py", tmp_path / "converted.jsonl"
    script.write_text(CONVERTER.read_text())
    run_within([sys.executable, "-I", script, tmp_path / source, target], 60).check_returncode()
    return target


def test_the_converter_writes_a_pickle_of_skyrl_into_the_minimal_schema(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rollouts = [make_dumped(rng, name=str(index), spans=spans) for index, spans in enumerate([(3, 5), (2, 2, 1, 4)])]
    write_skyrl(tmp_path / "batch.pkl", rollouts)
    found = list(open_dump(convert(tmp_path, "batch.pkl")).rollouts)
    unsaid = ("temperatures", "top_ps", "policy_versions", "kept", "group", "prompt", "response")
    for left, right in zip(found, rollouts, strict=True):
        same(left, right, but=unsaid)


def test_the_converter_knows_the_padding_of_verl_on_both_sides(tmp_path: Path) -> None:
    batch = {
        "input_ids": [[0, 11, 12, 40, 41, 2], [11, 12, 13, 50, 2, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],
        "response_mask": [[1, 0, 1], [1, 1, 0]],
        "rollout_log_probs": [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]],
        "old_log_probs": [[-1.5, -9.0, -3.5], [-4.5, -5.5, 0.0]],
    }
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(SimpleNamespace(batch=batch)))
    first, second = open_dump(convert(tmp_path, "batch.pkl")).rollouts
    assert first.token_ids.tolist() == [11, 12, 40, 41, 2]
    assert first.sampled.tolist() == [False, False, True, False, True]
    assert first.rollout_logprobs.tolist() == [0, 0, -1, 0, -3]
    assert second.token_ids.tolist() == [11, 12, 13, 50, 2]
    assert second.trainer_logprobs["trainer"].tolist() == [0, 0, 0, -4.5, -5.5]


def test_one_json_object_over_several_lines_is_a_dump_of_one_rollout(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(json.dumps(LINE, indent=1))
    dump = open_dump(tmp_path / "dump.json")
    assert len(list(dump.rollouts)) == 1
    assert not dump.unusable.counts


def test_kept_sets_without_their_offsets_are_counted(tmp_path: Path) -> None:
    write_lines(tmp_path / "dump.jsonl", [LINE | {"kept_ids": [1]}, LINE])
    dump = open_dump(tmp_path / "dump.jsonl")
    assert len(list(dump.rollouts)) == 1
    assert dump.unusable.counts == {"kept sets: offsets or ids are missing": 1}


def test_the_lines_of_the_documentation_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "dump_formats.md").read_text()
    block = page.split("```json\n")[1].split("```")[0]
    write_lines(tmp_path / "dump.jsonl", [json.loads(line) for line in block.splitlines()])
    dump = open_dump(tmp_path / "dump.jsonl")
    found = list(dump.rollouts)
    assert len(found) == len(block.splitlines())
    assert not dump.unusable.counts
    assert isinstance(found[-1].kept, KeptSets)
    assert found[-1].expert_ids is not None


@pytest.mark.parametrize(
    "said", [{"reward": float("nan")}, {"reward": True}, {"reward": {"a": 1}}, {"finish_reason": {"type": "stop"}}]
)
def test_a_reward_or_an_end_that_only_training_reads_costs_no_row(said: dict[str, Any], tmp_path: Path) -> None:
    row = {"token_ids": [5, 6, 7], "response_length": 2, "rollout_logprobs": [-1.0, -1.0], **said}
    write_lines(tmp_path / "dump.jsonl", [row])
    dump = open_dump(tmp_path / "dump.jsonl")
    [rollout] = dump.rollouts
    assert not dump.unusable.counts
    assert (rollout.rewards, rollout.finish_reason) == ({}, "")
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=None, min_p=0.0, seed=0)
    with pytest.raises(ContractError, match="missing_field"):
        record_of(rollout, SPEC, sampling)
