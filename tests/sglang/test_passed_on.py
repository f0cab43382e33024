"""The tables of arguments that moerl sets hold for the release that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.passed_on import SERVER_FIXED, SERVER_KEYS
from moerl.rollout.sglang.install import server_arguments
from moerl.rollout.sglang.server import ServerOptions, launch_options

pytestmark = pytest.mark.sglang


def test_the_tables_hold_every_name_of_every_argument_that_moerl_sets(environment: Path) -> None:
    known = server_arguments(environment)
    tables = SERVER_KEYS.keys() | SERVER_FIXED.keys()
    assert tables <= known.keys()
    assert {name for name, field in known.items() if field in {known[each] for each in tables}} <= tables
    chosen = {name.replace("-", "_") for name in launch_options(ServerOptions(Path("/model"), environment), 1)}
    assert chosen <= known.keys()
