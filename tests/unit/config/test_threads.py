"""Who gets how many of a run's CPU threads."""

from __future__ import annotations

import pytest

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig, engine_threads, rank_threads

IN_PROCESS, TWO = "rollout.placement=process", "parallel.expert=2"


def config_of(*keys: str) -> RankConfig:
    return RankConfig.of(load_config(["recipe=tiny", "run_dir=x", *keys], command="train"))


@pytest.mark.parametrize(
    ("keys", "cold_start", "learning", "engine"),
    [
        pytest.param(["num_threads=1"], 1, 1, 1, id="one"),
        pytest.param(["num_threads=8"], 8, 8, 8, id="in turns"),
        pytest.param(["num_threads=8", TWO], 4, 4, 8, id="two ranks in turns with the engine"),
        pytest.param(["num_threads=1", IN_PROCESS], 1, 1, 1, id="one, and the engine in a process"),
        pytest.param(["num_threads=2", IN_PROCESS], 2, 1, 1, id="two, and the engine in a process"),
        pytest.param(["num_threads=5", IN_PROCESS], 5, 3, 2, id="five, and the engine in a process"),
        pytest.param(["num_threads=2", IN_PROCESS, TWO], 1, 1, 1, id="more processes than threads"),
    ],
)
def test_processes_that_work_at_the_same_time_share_the_threads(
    keys: list[str], cold_start: int, learning: int, engine: int
) -> None:
    config = config_of(*keys)
    assert (rank_threads(config, "sft"), rank_threads(config, "rl"), engine_threads(config)) == (
        cold_start,
        learning,
        engine,
    )


def test_an_engine_on_another_node_takes_no_threads_of_the_trainers():
    config = config_of("num_threads=8", IN_PROCESS)
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"on": "ray"})})
    assert (rank_threads(config, "rl"), engine_threads(config)) == (8, 8)
