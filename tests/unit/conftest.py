"""Commands that do nothing, for tests of the command line."""

from __future__ import annotations

import sys
import types

import pytest

from moerl.config.schema import RunConfig


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RunConfig, bool | None]]:
    """Stands in for the commands; holds (command, config, resume) of each call."""
    calls: list[tuple[str, RunConfig, bool | None]] = []
    fake = types.ModuleType("moerl.orchestration.commands")

    def make(commands: tuple[str, ...]):
        def run(config: RunConfig, resume: bool | None = None, **settings: object) -> int:
            assert config.command in commands
            calls.append((config.command, config, resume))
            return 0

        return run

    for commands in (("train", "sft"), ("rollout",), ("eval",)):
        setattr(fake, f"run_{commands[0]}", make(commands))
    monkeypatch.setitem(sys.modules, "moerl.orchestration.commands", fake)
    monkeypatch.setattr("moerl.orchestration.commands", fake, raising=False)
    return calls
