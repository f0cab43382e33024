"""Places of a run's ranks: in the controller, or in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.ranks import placement


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ([], "InProcess"),
        (["parallel.expert=2"], "Processes"),
        # The controller collects answers while the rank trains.
        (["rollout.placement=process", "buffer.max_staleness=1"], "Processes"),
        (["rollout.placement=process"], "InProcess"),
    ],
    ids=["one rank", "two ranks", "one that trains while others are sampled", "one that takes turns"],
)
def test_ranks_are_processes_where_there_are_several_or_where_groups_are_sampled_meanwhile(
    overrides: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("InProcess", "Processes"):
        monkeypatch.setattr(placement, name, lambda *arguments, name=name: name)
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path / 'run'}'", *overrides], command="train")
    assert placement._place(RankConfig.of(config), lambda done, total: None, None) == where
