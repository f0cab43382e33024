"""Fixtures of end-to-end tests: forked runs, and runs that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moerl_runs import DoneRun, Runs, Sums


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    return Sums.write(tmp_path_factory.mktemp("sums"))


@pytest.fixture(scope="session")
def undisturbed(forked: Runs, sums: Sums, tmp_path_factory: pytest.TempPathFactory) -> DoneRun:
    """The sums, trained from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = forked.run(*sums.train(folder), path=[sums.folder])
    assert finished.status == 0, finished.output
    return DoneRun(folder, finished)


@pytest.fixture(scope="session")
def tiny(forked: Runs, tmp_path_factory: pytest.TempPathFactory) -> DoneRun:
    """`moerl train recipe=tiny`, from beginning to end, with curves."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    finished = forked.run("train", "recipe=tiny", f"run_dir='{folder}'", draws=True)
    assert finished.status == 0, finished.output
    return DoneRun(folder, finished)
