"""The tables of arguments that moerl sets hold for the release that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.passed_on import SERVER_FIXED, SERVER_KEYS, SERVER_PREFIXES, fixed_argument
from moerl.rollout.sglang.install import server_arguments
from moerl.rollout.sglang.server import ServerOptions, launch_options

pytestmark = pytest.mark.sglang


OF_ONE_RELEASE = {"enable_dp_attention", "attn_dp_size", "attention_data_parallel_size", "enable_hicache"}
"""Names that 0.5.21 or 0.5.23 has, not both."""


def test_the_tables_hold_every_name_of_every_argument_that_moerl_sets(environment: Path) -> None:
    known = server_arguments(environment)
    tables = SERVER_KEYS.keys() | SERVER_FIXED.keys()
    assert tables - known.keys() <= OF_ONE_RELEASE
    assert {name for name, field in known.items() if field in {known[each] for each in tables & known.keys()}} <= {
        *tables,
        *(name for name in known if fixed_argument(name)),
    }
    for prefix in SERVER_PREFIXES:
        assert any(name.startswith(prefix) for name in known)
    chosen = {name.replace("-", "_") for name in launch_options(ServerOptions(Path("/model"), environment), 1)}
    assert chosen <= known.keys()
