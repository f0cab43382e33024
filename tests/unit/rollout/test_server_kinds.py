from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from moerl.config.load import load_config
from moerl.config.rollouts import RolloutConfig, ServedRolloutConfig
from moerl.errors import ConfigError
from moerl.rollout.server_kinds import SERVER_KINDS
from moerl.rollout.sglang import kind


def test_each_section_of_servers_names_a_kind_and_each_kind_has_a_section():
    union, _ = get_args(RolloutConfig)
    sections = [section for section in get_args(union) if issubclass(section, ServedRolloutConfig)]
    assert {section.kind for section in sections} == SERVER_KINDS.keys()


def test_a_cluster_that_cannot_be_reached_does_not_matter_to_servers_that_others_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(launch: Any) -> str:
        raise ConfigError("launch.address: not to be reached from here")

    monkeypatch.setattr(kind, "controller_address", refuse)
    config = load_config(
        ["recipe=tiny", "rollout=sglang_server", "rollout.server=server.json", "run_dir=x"], command="train"
    )
    assert isinstance(config.rollout, ServedRolloutConfig)
    run: Any = SimpleNamespace(launch=config.launch, folder=tmp_path)
    assert len(SERVER_KINDS["sglang"].launchers(config.rollout, run)) == 1
