"""Dumps of other systems, of those formats that need no torch, and our own: what went in comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factories import make_trajectory
from foreign_dumps import (
    make_dumped,
    open_dump,
    same,
    sglang_answer,
    write_lines,
    write_miles_columns,
    write_nemo_rl,
    write_prime_rl_export,
    write_prime_rl_traces,
    write_sglang,
)

from moerl.contract.disk import write_parquet
from moerl.diagnostics.dumps.build import EMPTY
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ConfigError, ContractError

MODEL = (4, (1, 3))
UNSAID = ("name", "temperatures", "top_ps", "policy_versions", "expert_ids", "routed", "kept", "group", "step")


def two(**changes) -> list[DumpedRollout]:
    """Rollouts of different lengths; the second has a tool's tokens between two answers."""
    rng = np.random.default_rng(5)
    return [make_dumped(rng, name="a", **changes), make_dumped(rng, name="b", spans=(4, 2, 3, 6), **changes)]


def test_a_nemo_rl_dump_loses_its_padding_and_keeps_both_policies(tmp_path: Path) -> None:
    rollouts = two()
    write_nemo_rl(tmp_path / "train_data_step12.jsonl", rollouts)
    dump = open_dump(tmp_path / "train_data_step12.jsonl")
    found = list(dump.rollouts)
    for left, right in zip(found, rollouts, strict=True):
        same(left, right, but=UNSAID)
    assert not any(each.says_temperature for each in found)
    assert dump.format == "NeMo-RL train data"
    assert {each.step for each in found} == {12}
    assert found[0].expert_ids is None
    assert "no routes" in dump.notes[0]
    assert not dump.unusable.counts


def test_a_prime_rl_trace_becomes_one_rollout_of_all_its_messages(tmp_path: Path) -> None:
    rollouts = two()
    file = write_prime_rl_traces(tmp_path, rollouts, step=9)
    found = list(open_dump(file).rollouts)
    for left, right in zip(found, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "trainer_logprobs", "prompt", "response"))
        np.testing.assert_array_equal(left.policy_versions, right.policy_versions)
    assert [(each.name, each.group, each.step) for each in found] == [("a/0", "7", 9), ("b/0", "7", 9)]


def test_every_branch_of_a_prime_rl_trace_is_a_rollout(tmp_path: Path) -> None:
    nodes = [
        {"token_ids": [1, 2], "mask": [False, False]},
        {"parent": 0, "token_ids": [3], "mask": [True], "logprobs": [-1.0]},
        {"parent": 0, "token_ids": [4, 5], "mask": [False, True], "logprobs": [-2.0]},
    ]
    write_lines(tmp_path / "traces.jsonl", [{"id": "e", "traces": [{"id": "t", "nodes": nodes}]}])
    found = list(open_dump(tmp_path / "traces.jsonl").rollouts)
    assert [each.token_ids.tolist() for each in found] == [[1, 2, 3], [1, 2, 4, 5]]
    assert [each.rollout_logprobs.tolist() for each in found] == [[0, 0, -1], [0, 0, 0, -2]]


def test_a_policy_that_changed_on_the_way_of_an_episode_leaves_versions_open(tmp_path: Path) -> None:
    node = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [-1.0]}
    run = {"work": {"policy": {"start": 3, "end": 4}}}
    write_lines(tmp_path / "traces.jsonl", [{"traces": [{"nodes": [node]}], "run": run}])
    dump = open_dump(tmp_path / "traces.jsonl")
    assert next(dump.rollouts).policy_versions.tolist() == [-1, -1]
    assert any("changed in the middle" in note for note in dump.notes)


def test_of_a_prime_rl_run_the_traces_that_were_trained_on_are_read_step_by_step(tmp_path: Path) -> None:
    first, second = two()
    write_prime_rl_traces(tmp_path, [second], step=10)
    file = write_prime_rl_traces(tmp_path, [first], step=9)
    everything = file.parent.parent / "all"
    everything.mkdir()
    (everything / "traces.jsonl").write_bytes(file.read_bytes() * 2)
    assert [each.step for each in open_dump(tmp_path).rollouts] == [9, 10]


def test_a_prime_rl_token_export_has_both_policies(tmp_path: Path) -> None:
    rollouts = two()
    file = write_prime_rl_export(tmp_path, rollouts)
    for left, right in zip(open_dump(file).rollouts, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "prompt", "response"))
    assert len(list(open_dump(tmp_path).rollouts)) == 2


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.json"])
def test_sglang_answers_keep_routes_of_moe_layers_kept_sets_and_settings(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(6)
    rollouts = [make_dumped(rng, name=str(index), spans=(index + 2, 4)) for index in range(3)]
    write_sglang(tmp_path / name, rollouts, model=MODEL)
    dump = open_dump(tmp_path / name, moe_layers=MODEL[1], experts_per_token=2)
    for left, right in zip(dump.rollouts, rollouts, strict=True):
        same(left, right, but=("trainer_logprobs",))
        assert not left.trainer_logprobs


def test_rows_that_sglang_did_not_send_are_not_routed(tmp_path: Path) -> None:
    rollout = make_dumped(np.random.default_rng(7))
    write_sglang(tmp_path / "answers.jsonl", [rollout], model=MODEL, start=2)
    (found,) = open_dump(tmp_path / "answers.jsonl", moe_layers=(1, 3), experts_per_token=2).rollouts
    assert found.routed is not None
    assert found.expert_ids is not None
    assert rollout.expert_ids is not None
    assert found.routed.tolist() == [False, False] + [True] * 5
    np.testing.assert_array_equal(found.expert_ids[2:], rollout.expert_ids[2:])


def test_without_kept_sets_the_log_probs_of_an_sglang_answer_are_the_plain_ones(tmp_path: Path) -> None:
    rollout = make_dumped(np.random.default_rng(7), kept=None, expert_ids=None, routed=None)
    write_sglang(tmp_path / "answers.jsonl", [rollout])
    (found,) = open_dump(tmp_path / "answers.jsonl").rollouts
    np.testing.assert_allclose(found.rollout_logprobs[3:], rollout.rollout_logprobs[3:] - 0.125, rtol=1e-6)


def test_of_log_probs_of_whole_kept_sets_the_sampled_token_s_is_taken(tmp_path: Path) -> None:
    answer = sglang_answer(make_dumped(np.random.default_rng(7)))
    sets, own = answer["meta_info"]["output_token_sampling_mask"], answer["output_ids"]
    answer["meta_info"]["output_token_sampling_logprobs"] = [[-float(each) for each in ids] for ids in sets]
    write_lines(tmp_path / "answers.jsonl", [answer])
    (found,) = open_dump(tmp_path / "answers.jsonl", experts_per_token=2).rollouts
    assert found.rollout_logprobs[3:].tolist() == [-float(token) for token in own]


def test_an_sglang_answer_without_tokens_is_an_empty_response(tmp_path: Path) -> None:
    answer = sglang_answer(make_dumped(np.random.default_rng(7)))
    answer["meta_info"]["output_token_logprobs"] = []
    answer["output_ids"] = []
    write_lines(tmp_path / "answers.jsonl", [answer])
    dump = open_dump(tmp_path / "answers.jsonl")
    assert not list(dump.rollouts)
    assert dump.unusable.counts == {EMPTY: 1}


def test_input_ids_of_an_sglang_answer_may_come_from_its_log_probs(tmp_path: Path) -> None:
    answer = sglang_answer(make_dumped(np.random.default_rng(7)))
    ids = answer.pop("input_ids")
    answer["meta_info"]["input_token_logprobs"] = [
        [None if t == 0 else -1.0, token, None] for t, token in enumerate(ids)
    ]
    write_lines(tmp_path / "answers.jsonl", [answer])
    (found,) = open_dump(tmp_path / "answers.jsonl", experts_per_token=2).rollouts
    assert found.token_ids[:3].tolist() == ids


def test_flat_routes_are_refused_where_nothing_says_how_many_experts_a_token_has(tmp_path: Path) -> None:
    write_sglang(tmp_path / "answers.jsonl", two()[:1])
    with pytest.raises(ConfigError, match="how many experts"):
        list(open_dump(tmp_path / "answers.jsonl").rollouts)


@pytest.mark.parametrize("moe_layers", [None, (0, 1), (5, 9)])
def test_layers_are_left_as_they_are_where_they_do_not_have_to_be_picked(tmp_path: Path, moe_layers) -> None:
    rollout = make_dumped(np.random.default_rng(7))
    write_sglang(tmp_path / "answers.jsonl", [rollout])
    (found,) = open_dump(tmp_path / "answers.jsonl", moe_layers=moe_layers, experts_per_token=2).rollouts
    assert found.expert_ids is not None
    np.testing.assert_array_equal(found.expert_ids, rollout.expert_ids)


def test_dashboard_columns_of_miles_are_read(tmp_path: Path) -> None:
    rollouts = two()
    write_miles_columns(tmp_path / "rollout_4.parquet", rollouts)
    dump = open_dump(tmp_path / "rollout_4.parquet")
    for left, right in zip(dump.rollouts, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "trainer_logprobs", "prompt", "response"))
    assert dump.format == "miles dashboard columns"


def test_a_dump_of_ours_is_read_with_its_texts_and_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    trajectories = [make_trajectory(rng, rollout_id=f"r{index}") for index in range(2)]
    (tmp_path / "rollouts").mkdir()
    for step in (2, 10):
        file = tmp_path / "rollouts" / f"step-{step:06d}.parquet"
        write_parquet(file, trajectories, texts=["x", "y"], prompts=["p", "q"])
    dump = open_dump(tmp_path)
    found = list(dump.rollouts)
    assert [(each.name, each.step, each.prompt, each.response) for each in found] == [
        ("r0", 2, "p", "x"),
        ("r1", 2, "q", "y"),
        ("r0#2", 10, "p", "x"),
        ("r1#2", 10, "q", "y"),
    ]
    first, given = found[0], trajectories[0]
    for name in ("token_ids", "sampled", "rollout_logprobs", "policy_versions", "routed", "temperatures"):
        np.testing.assert_array_equal(getattr(first, name), getattr(given, name))
    assert first.expert_ids is not None
    np.testing.assert_array_equal(first.expert_ids, given.expert_ids)
    assert first.kept is given.kept or first.kept is not None
    assert first.top_ps.tolist() == [1, 1, 1, *[np.float32(0.9)] * 5]
    assert first.turns.tolist() == [0] * 3 + [1] * 5


def test_a_dump_of_ours_that_was_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.parquet"
    write_parquet(file, [make_trajectory(np.random.default_rng(1))])
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    with pytest.raises(ContractError, match="file_corrupt"):
        list(open_dump(file).rollouts)
