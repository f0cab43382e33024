"""Fixtures of more than one test folder: ranks that are started once per test process, one thread, and tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
import torch
from hypothesis import settings
from ranks import Ranks

# A loaded machine is no error of the code under test.
settings.register_profile("moerl", deadline=None)
settings.load_profile("moerl")

GROUPS = {
    "tests/e2e/test_async.py": "interrupted runs",
    "tests/e2e/test_extend.py": "interrupted runs",
    "tests/e2e/test_faults.py": "interrupted runs",
    "tests/e2e/test_resume.py": "interrupted runs",
    "tests/e2e/test_signals_to_all.py": "interrupted runs",
    "tests/e2e/test_stopping.py": "interrupted runs",
    "tests/distributed/": "distributed",
    "tests/unit/weights/": "distributed",
    "tests/unit/trainer/": "trainer",
    "tests/unit/offline/test_verify.py": "trainer",
    "tests/e2e/test_engine_and_trainer.py": "trainer",
    "tests/e2e/test_bad_inputs.py": "whole runs",
    "tests/e2e/test_dumps.py": "whole runs",
    "tests/e2e/test_episodes.py": "whole runs",
    "tests/e2e/test_examples.py": "whole runs",
    "tests/e2e/test_games.py": "whole runs",
    "tests/e2e/test_options.py": "whole runs",
    "tests/e2e/test_parallel.py": "whole runs",
    "tests/e2e/test_run_directory.py": "whole runs",
    "tests/e2e/test_scorers.py": "whole runs",
    "tests/e2e/test_sessions.py": "whole runs",
    "tests/e2e/test_trackers.py": "whole runs",
    "tests/sglang/": "sglang",
    "tests/e2e/test_commands.py": "whole runs",
    "tests/e2e/test_hub_models.py": "whole runs",
    "tests/e2e/test_profile.py": "whole runs",
    "tests/e2e/test_reports.py": "whole runs",
    "tests/e2e/test_verify.py": "whole runs",
    "tests/e2e/test_wheel.py": "whole runs",
}
"""Files that share what is slow to start, by the beginning of their path: all of a group run in one test process. The
tests of any other file do so too, but for `SINGLE`. Long groups are first."""
SINGLE = (
    "tests/e2e/test_examples.py::test_an_example_does_as_written",
    "tests/e2e/test_setup.py::test_setup_installs",
    "tests/e2e/test_studies.py",
    "tests/unit/diagnostics/causes/test_fault_matrix.py::test_every_fault",
    "tests/unit/diagnostics/causes/test_fault_matrix.py::test_two_faults",
)
"""Tests that take minutes and share little, by the beginning of their names: any test process runs any of them, with
fixtures of its own."""
FIRST = (*SINGLE, *GROUPS, "tests/e2e/", "tests/unit/kernels/", "tests/unit/diagnostics/causes/")
"""Beginnings of paths, in the order in which test processes take them up: what is short is last, so that none of them
has a long group left when the others have ended."""


LONG_SECONDS = 7200
"""Time limit of tests that `make test` leaves out. Their own deadlines count work; this one ends what hangs."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if markers & {"slow", "distributed", "sglang"} and "timeout" not in markers:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: next((n for n, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps groups together. pytest-xdist's own marks do so again when it knows the node ids of pytest 9.2
    (https://github.com/pytest-dev/pytest-xdist/issues/1386)."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SINGLE):
                return nodeid
            file = nodeid.partition("::")[0]
            return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), file)

    # The order of the collection, and not of how many tests a group has.
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """`processes(4)`: so many ranks, started by their first call and kept until the session ends."""
    started: dict[int, Ranks] = {}

    def ranks(number: int) -> Ranks:
        if number not in started:
            started[number] = Ranks(number)
        return started[number]

    yield ranks
    for each in started.values():
        each.close()


@pytest.fixture(scope="session")
def one_process(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(1)


@pytest.fixture(scope="session")
def two_processes(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(2)


@pytest.fixture(scope="session")
def four_processes(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(4)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.write_model(tmp_path_factory.mktemp("untied"), tied=False, seed=1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.write_model(tmp_path_factory.mktemp("tied"), tied=True, seed=2)
