"""Names of tests in `tests/conftest.py`, which say which tests share a process, are names of tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import conftest

ROOT = Path(__file__).parents[2]


def begins_a_test(name: str) -> bool:
    path, _, test = name.partition("::")
    place = ROOT / path
    if place.is_dir():
        return path.endswith("/") and not test and any(place.rglob("test_*.py"))
    return place.is_file() and re.search(rf"^def {test or 'test_'}", place.read_text(), re.MULTILINE) is not None


def test_each_name_in_the_order_of_the_tests_begins_a_test_that_is_there() -> None:
    assert [name for name in conftest.FIRST if not begins_a_test(name)] == []


def test_names_of_files_and_tests_that_moved_begin_none() -> None:
    moved = ("tests/unit/orchestration/test_verify.py", "tests/e2e/test_studies.py::test_gone", "tests/e2e")
    assert [name for name in moved if begins_a_test(name)] == []
