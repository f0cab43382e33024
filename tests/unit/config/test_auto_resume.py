"""``resume=auto``: one command line that starts a run and goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.load import dump_config, load_config, resolve_auto
from moerl.errors import ConfigError

TINY = ["recipe=tiny", "rl.steps=5"]


def store(run_dir: Path, *overrides: str) -> None:
    config = load_config([*TINY, f"run_dir='{run_dir}'", *overrides], command="train")
    (run_dir / "config.yaml").write_text(dump_config(config))


def resolved(run_dir: Path, *overrides: str, command: str = "train") -> tuple[list[str], list[str]]:
    return resolve_auto([*overrides, f"run_dir='{run_dir}'", "resume=auto"], command=command)


def test_where_there_is_nothing_the_run_starts(tmp_path: Path) -> None:
    assert resolved(tmp_path, *TINY) == ([*TINY, f"run_dir='{tmp_path}'"], [])


def test_where_there_is_a_run_the_same_command_line_goes_on_with_it(tmp_path: Path) -> None:
    store(tmp_path)
    assert resolved(tmp_path, *TINY) == ([f"resume={tmp_path}"], [])


def test_what_the_command_line_changes_follows_the_rules_of_a_run_that_goes_on(tmp_path: Path) -> None:
    store(tmp_path)
    overrides, _ = resolved(tmp_path, "recipe=tiny", "rl.steps=9", "checkpoint.keep=7")
    assert overrides == [f"resume={tmp_path}", "rl.steps=9", "checkpoint.keep=7"]
    assert load_config(overrides, command="train").rl.steps == 9
    overrides, _ = resolved(tmp_path, *TINY, "optimizer.lr=1.0")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: cannot change when a run goes on"):
        load_config(overrides, command="train")


def test_a_key_that_was_changed_by_hand_and_is_not_given_stays_and_is_said(tmp_path: Path) -> None:
    store(tmp_path, "checkpoint.every=3")
    overrides, notes = resolved(tmp_path, *TINY)
    assert overrides == [f"resume={tmp_path}"]
    assert notes == ["checkpoint.every stays 3, as the run has it; the command line's recipe says 1"]


@pytest.mark.parametrize("other", [["recipe=laptop", "num_threads=1"], ["recipe=tiny", "task=chain_sum"]])
def test_the_command_line_of_another_run_is_refused(other: list[str], tmp_path: Path) -> None:
    store(tmp_path)
    with pytest.raises(ConfigError, match="cannot change when a run goes on"):
        resolved(tmp_path, *other, "rl.steps=5")


def test_without_a_run_directory_there_is_nothing_to_look_for() -> None:
    with pytest.raises(ConfigError, match="resume=auto: needs a run directory"):
        resolve_auto(["recipe=tiny", "resume=auto"], command="train")


def test_other_command_lines_are_as_they_were(tmp_path: Path) -> None:
    for overrides in (TINY, [f"resume={tmp_path}"], ["resume=./auto"]):
        assert resolve_auto(overrides, command="train")[0] == overrides


def test_commands_that_train_nothing_have_nothing_to_go_on_with(tmp_path: Path) -> None:
    overrides, _ = resolved(tmp_path, *TINY, command="eval")
    with pytest.raises(ConfigError, match="resume: moerl eval has nothing to go on with"):
        load_config(overrides, command="eval")
