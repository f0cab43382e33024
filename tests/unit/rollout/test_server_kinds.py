from __future__ import annotations

from typing import get_args

from moerl.config.rollouts import RolloutConfig, ServedRolloutConfig
from moerl.rollout.server_kinds import SERVER_KINDS


def test_each_section_of_servers_names_a_kind_and_each_kind_has_a_section():
    union, _ = get_args(RolloutConfig)
    sections = [section for section in get_args(union) if issubclass(section, ServedRolloutConfig)]
    assert {section.kind for section in sections} == SERVER_KINDS.keys()
