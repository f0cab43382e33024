"""Directories of NeMo-RL and prime-rl: which files are read, what is left out, and what belongs together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foreign_dumps import make_dumped, open_dump, same, write_nemo_rl, write_prime_rl_export, write_prime_rl_traces

from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.opening import needs_torch, open_dumps, own_files
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ConfigError

GOLDEN = Path(__file__).parents[3] / "golden" / "dumps"
UNSAID = ("name", "temperatures", "top_ps", "expert_ids", "routed", "kept", "step", "prompt", "response")


def two(seed: int = 5) -> list[DumpedRollout]:
    """Returns rollouts of 40 sampled tokens, which nobody samples twice."""
    rng = np.random.default_rng(seed)
    return [make_dumped(rng, name="a", spans=(3, 40)), make_dumped(rng, name="b", spans=(4, 20, 3, 20))]


def rounded(rollouts: list[DumpedRollout]) -> list[DumpedRollout]:
    """Returns rollouts with log-probs as verifiers writes them into traces."""
    return [replace(each, rollout_logprobs=each.rollout_logprobs.round(4)) for each in rollouts]


def moved(file: Path, subset: str) -> Path:
    """Gives the traces of a step the name of another subset, such as `all`."""
    target = file.parent.parent / subset / file.name
    target.parent.mkdir(parents=True)
    return file.rename(target)


# --- NeMo-RL ---------------------------------------------------------------------------------------------------------


def test_validations_in_a_log_directory_of_nemo_rl_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    for step in (11, 12):
        write_nemo_rl(tmp_path / f"train_data_step{step}.jsonl", two(step))
        (tmp_path / f"val_data_step{step}.jsonl").write_text('{"content": [["q", "a"]], "rewards": [1.0], "idx": 0}\n')
    dump = open_dump(tmp_path)
    assert [each.step for each in dump.rollouts] == [11, 11, 12, 12]
    named = "val_data_step11.jsonl, val_data_step12.jsonl"
    assert f"left out: 2 files of evaluations ({named})" in dump.notes


def test_a_directory_without_any_dump_is_refused_by_its_first_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is of no known format"):
        open_dump(tmp_path)


def test_a_summary_under_the_name_of_a_dump_belongs_to_it(tmp_path: Path) -> None:
    write_minimal(tmp_path / "rollouts.parquet", two())
    (tmp_path / "rollouts.json").write_text('{"reward/mean": 1.0}')
    dump = open_dump(tmp_path)
    assert len(list(dump.rollouts)) == 2
    assert not dump.notes
    assert not own_files(tmp_path)
    assert not needs_torch(tmp_path)


# --- prime-rl --------------------------------------------------------------------------------------------------------


def test_a_run_of_prime_rl_is_read_with_the_trainers_log_probs_of_its_exports(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    write_prime_rl_traces(tmp_path, rounded(two()))
    write_prime_rl_export(tmp_path, two())
    dump = open_dump(tmp_path)
    for left, right in zip(dump.rollouts, two(), strict=True):
        same(left, right, but=UNSAID)
    assert dump.format == "prime-rl traces, with prime-rl token export"
    assert dump.notes == ["prime-rl writes no routes, kept sets or sampling parameters into its traces"]


def test_traces_and_exports_that_prime_rl_wrote_itself_belong_together() -> None:
    dump = open_dump(GOLDEN / "prime_rl")
    rollouts = list(dump.rollouts)
    assert all(each.trainer_logprobs for each in rollouts)
    assert any((each.policy_versions >= 0).any() for each in rollouts)
    assert not any("not in the token exports" in note or "left out" in note for note in dump.notes)


def test_traces_and_exports_that_are_named_together_count_once(tmp_path: Path) -> None:
    traces, export = write_prime_rl_traces(tmp_path, two()), write_prime_rl_export(tmp_path, two()[:1])
    (dump,) = open_dumps([export, traces])
    assert [len(each.trainer_logprobs) for each in dump.rollouts] == [1, 0]
    assert "1 of 2 rollouts is not in the token exports" in dump.notes


def test_tokens_that_two_paths_of_a_trace_share_are_those_that_the_trainer_trained(tmp_path: Path) -> None:
    rollout = two()[1]
    only_last = rollout.sampled & (rollout.turns == 3)
    kept = {"sampled": only_last, "rollout_logprobs": np.where(only_last, rollout.rollout_logprobs, 0)}
    write_prime_rl_traces(tmp_path, [rollout])
    write_prime_rl_export(tmp_path, [replace(rollout, **kept)])
    (found,) = open_dump(tmp_path).rollouts
    np.testing.assert_array_equal(found.sampled, only_last)
    np.testing.assert_array_equal(found.policy_versions >= 0, only_last)
    assert found.trainer_logprobs


def test_exports_of_other_steps_than_the_traces_are_refused(tmp_path: Path) -> None:
    write_prime_rl_traces(tmp_path, two(), step=12)
    write_prime_rl_export(tmp_path, two(), step=13)
    dump = open_dump(tmp_path)
    with pytest.raises(ConfigError, match=r"token exports do not fit together.*step 12, token exports of step 13"):
        list(dump.rollouts)


def test_exports_alone_are_read_as_they_are(tmp_path: Path) -> None:
    write_prime_rl_export(tmp_path, two())
    assert open_dump(tmp_path).format == "prime-rl token export"


@pytest.mark.parametrize("subset", ["all", "math", "effective"])
def test_traces_of_a_step_are_found_under_any_name(tmp_path: Path, subset: str) -> None:
    file = write_prime_rl_traces(tmp_path, two())
    if subset != "effective":
        moved(file, subset)
    for path in (tmp_path, tmp_path / "rollouts" / "step_4", file.parent.parent):
        assert len(list(open_dump(path).rollouts)) == 2


def test_traces_of_several_environments_are_read_together(tmp_path: Path) -> None:
    moved(write_prime_rl_traces(tmp_path, two(1)), "math")
    (tmp_path / "rollouts" / "step_4" / "train" / "effective").rmdir()
    moved(write_prime_rl_traces(tmp_path, two(2)), "code")
    assert len(list(open_dump(tmp_path).rollouts)) == 4


def test_a_trace_is_not_read_from_all_and_from_effective(tmp_path: Path) -> None:
    file = write_prime_rl_traces(tmp_path, two())
    shutil.copytree(file.parent, file.parent.parent / "all")
    dump = open_dump(tmp_path)
    assert len(list(dump.rollouts)) == 2
    assert not any("left out" in note for note in dump.notes)


def test_evaluations_and_steps_that_were_not_trained_are_left_out_of_a_prime_rl_run_and_named(tmp_path: Path) -> None:
    file = write_prime_rl_traces(tmp_path, two(1), step=12)
    shutil.copytree(file.parent, file.parent.parent.parent / "eval" / "effective")
    shutil.copytree(file.parent, file.parent.parent / "math")
    moved(write_prime_rl_traces(tmp_path, two(2), step=13), "all")
    dump = open_dump(tmp_path)
    assert [each.step for each in dump.rollouts] == [12, 12]
    (note,) = (note for note in dump.notes if note.startswith("left out: "))
    assert "1 file of evaluations" in note
    assert "1 step without effective traces" in note
    assert "1 file next to effective traces" in note
    assert len(list(open_dump(file.parent.parent.parent / "eval").rollouts)) == 2


def test_what_was_looked_for_in_a_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train/effective/traces\.jsonl or token_exports/step_N/rank_R\.jsonl"):
        open_dump(tmp_path)


# --- twice -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train_data_step12.jsonl"
    write_nemo_rl(file, two())
    (tmp_path / "link.jsonl").symlink_to(file)
    for other in (file, tmp_path / "link.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"a file is named twice; seen: .*train_data_step12\.jsonl"):
            open_dumps([file, other])


def test_a_rollout_that_stands_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", two())
    write_minimal(tmp_path / "other.jsonl", rounded(two()[1:]))
    dumps = open_dumps([tmp_path / "train_data_step4.jsonl", tmp_path / "other.jsonl"])
    with pytest.raises(ConfigError, match=r"stands in two files.*train_data_step4\.jsonl and .*other\.jsonl"):
        [list(dump.rollouts) for dump in dumps]


def test_a_copy_beside_its_original_is_refused(tmp_path: Path) -> None:
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", two())
    shutil.copy(tmp_path / "train_data_step4.jsonl", tmp_path / "train_data_step4 (1).jsonl")
    with pytest.raises(ConfigError, match="stands in two files"):
        list(open_dump(tmp_path).rollouts)


def test_equal_rollouts_of_one_file_of_other_steps_or_of_other_log_probs_are_taken_as_they_are(tmp_path: Path) -> None:
    rollouts = two()
    far = [replace(each, rollout_logprobs=each.rollout_logprobs * np.float32(1.01)) for each in rollouts]
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", [*rollouts, *rollouts])
    write_nemo_rl(tmp_path / "train_data_step5.jsonl", rollouts)
    write_minimal(tmp_path / "far.jsonl", far)
    dumps = open_dumps([tmp_path / name for name in ("train_data_step4.jsonl", "train_data_step5.jsonl", "far.jsonl")])
    assert [len(list(dump.rollouts)) for dump in dumps] == [4, 2, 2]


def test_short_answers_that_two_files_share_get_a_note(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    short = [make_dumped(rng, name=str(number), spans=(3, 2)) for number in range(3)]
    for name in ("one.jsonl", "two.jsonl"):
        write_minimal(tmp_path / name, short)
    one, other = open_dumps([tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    assert len(list(one.rollouts)) == len(list(other.rollouts)) == 3
    assert not one.notes
    assert "count twice" in other.notes[-1]
