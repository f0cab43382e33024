"""Tests that need a package which is not installed are skipped, and say so."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_package_is_looked_for_by_importing_a_name_that_a_folder_of_tests_has() -> None:
    """Helpers are imported from `tests/`, and a folder there is a package, too: `tests/ray` was Ray."""
    folders = {folder.name for folder in TESTS.iterdir() if folder.is_dir()}
    texts = {file.relative_to(TESTS): file.read_text() for file in TESTS.rglob("*.py")}
    asked = [(str(file), name) for file, text in texts.items() for name in re.findall(r'importorskip\("(\w+)', text)]
    assert asked
    assert [each for each in asked if each[1] in folders] == []
