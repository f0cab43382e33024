"""Reading the rank from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.rank import rank_info
from moerl.errors import ConfigError
from moerl.launch.rank import die_with_launcher, new_rendezvous

LAUNCHED = {"MOERL_RENDEZVOUS": "file:///run/rendezvous", "RANK": "1", "WORLD_SIZE": "2"}


def test_a_process_that_nobody_launched_is_alone():
    here = rank_info({})
    assert (here.rank, here.world_size, here.is_launched) == (0, 1, False)


def test_a_launched_process_reads_its_rank():
    here = rank_info(LAUNCHED)
    assert (here.rank, here.world_size, here.rendezvous) == (1, 2, "file:///run/rendezvous")
    assert here.is_launched


def test_another_launcher_is_refused():
    with pytest.raises(ConfigError, match="another launcher"):
        rank_info({"WORLD_SIZE": "4", "RANK": "0"})


@pytest.mark.parametrize("change", [{"RANK": "2"}, {"RANK": "-1"}, {"RANK": "x"}, {"WORLD_SIZE": ""}])
def test_rank_variables_that_do_not_fit_are_refused(change: dict[str, str]):
    with pytest.raises(ConfigError, match="rank variables"):
        rank_info(LAUNCHED | change)
    with pytest.raises(ConfigError, match="rank variables"):
        rank_info({name: value for name, value in LAUNCHED.items() if name != "RANK"})


def test_rendezvous_files_are_absolute_and_never_the_same(tmp_path: Path):
    first, second = new_rendezvous(tmp_path), new_rendezvous(tmp_path)
    assert first != second
    assert first.startswith(f"file://{tmp_path.resolve()}/")


def test_a_process_without_a_launcher_is_left_alone():
    die_with_launcher({})
