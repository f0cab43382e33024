"""A SLURM that the tests start themselves, and runs that are submitted to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from moerl_runs import DoneRun, Finished, moerl
from slurm_cluster import Cluster, missing_programs
from slurm_jobs import TRAIN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_programs()
    for item in items:
        if Path(__file__).parent in item.path.parents and missing:
            reason = f"not installed: {', '.join(missing)} (apt packages slurm-wlm, munge, shellcheck)"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node."""
    with Cluster(tmp_path_factory.mktemp("slurm"), 1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> DoneRun:
    """The run of `slurm_jobs.TRAIN` without SLURM."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    finished: Finished = moerl(
        "train",
        *TRAIN,
        f"run_dir='{run}'",
        command=(sys.executable, "-m", "moerl"),
        path=[Path(each) for each in sys.path],
    )
    assert finished.status == 0, finished.output
    return DoneRun(run, finished)
