"""Interpreters that have libraries of environments whose needs do not go together with moerl's, or one another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python_with(library: str) -> str:
    """Returns the interpreter of `make environments`, or that of MOERL_<LIBRARY>_PYTHON; skips the test if neither is
    there."""
    named = os.environ.get(f"MOERL_{library.upper()}_PYTHON")
    found = Path(named) if named else ROOT / f".venv-{library}" / "bin" / "python"
    if not found.exists():
        pytest.skip(f"no interpreter with {library}: make environments")
    return str(found)
