"""The models themselves: frozen and strict."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from moerl.config.load import load_config
from moerl.config.schema import CheckpointConfig
from moerl.errors import ConfigError


def test_a_configuration_cannot_be_changed():
    config = load_config(["recipe=tiny"], command="train")
    with pytest.raises(ValidationError):
        config.seed = 5


def test_values_are_not_converted():
    with pytest.raises(ValidationError):
        CheckpointConfig(every="1", keep=2)  # type: ignore[arg-type]


def test_no_configuration_is_loaded_that_breaks_a_rule_between_fields():
    with pytest.raises(ConfigError, match=r"rl\.minibatches"):
        load_config(["recipe=tiny", "rl.minibatches=3"], command="train")
