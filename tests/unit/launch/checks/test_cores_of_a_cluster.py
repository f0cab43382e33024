"""Cores that actors of a run ask of a Ray cluster without GPUs: a job whose nodes have fewer is not submitted."""

from __future__ import annotations

import pytest

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig, cluster_cpus
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Door, Facts
from moerl.launch.checks.room import look_at_devices

SERVERS = ("rollout=sglang", "rollout.environment=/env", "rollout.servers=2")


def facts(*keys: str, cores: int, door: Door = "dry run") -> Facts:
    config = load_config(["recipe=tiny", "parallel.data=2", *keys], command="train")
    # Also if Ray is not installed, which rules between keys ask for.
    on_ray = config.model_copy(update={"launch": config.launch.model_copy(update={"on": "ray"})})
    return Facts(door, on_ray, num_gpus=0, num_cores=cores)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ((), 2),
        (("num_threads=4",), 4),
        (SERVERS, 4),
        ((*SERVERS, "rollout.placement=colocated", "rollout.memory_share=0.4"), 2),
        (("rollout.placement=process", "buffer.max_staleness=1", "num_threads=4"), 8),
    ],
)
def test_a_job_with_a_core_too_few_is_refused_with_the_number(keys: tuple[str, ...], asked: int) -> None:
    wanted = facts(*keys, cores=asked)
    assert cluster_cpus(RankConfig.of(wanted.config)) == asked
    look_at_devices(wanted)
    with pytest.raises(ConfigError, match=rf"launch\.on=ray: .*seen: {asked - 1} cores.*at least {asked} cores"):
        look_at_devices(facts(*keys, cores=asked - 1))


def test_a_cluster_that_a_run_starts_itself_has_the_cores_that_are_asked_for() -> None:
    look_at_devices(facts(*SERVERS, cores=1, door="doctor"))
