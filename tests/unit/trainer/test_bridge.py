"""Importing Megatron-Bridge where it is not installed."""

from __future__ import annotations

import sys

import pytest

from moerl.errors import ConfigError
from moerl.trainer import bridge, platform


def test_a_missing_bridge_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "prepare", lambda: None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ConfigError, match=r"remedy: pip install --no-deps megatron-bridge==0\.6\.2$"):
        bridge.import_bridge()
