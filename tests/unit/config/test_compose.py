"""The runs of a sweep, from overrides."""

from __future__ import annotations

import pytest

from moerl.config.compose import split_sweep
from moerl.errors import ConfigError


def test_keys_with_several_values_are_split_off() -> None:
    common, swept = split_sweep(["recipe=tiny", "seed=1,2,3", "keep_routing.mode=off,rollout"])
    assert common == ["recipe=tiny"]
    assert list(swept.items()) == [("seed", ("1", "2", "3")), ("keep_routing.mode", ("off", "rollout"))]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("seed=choice(7,9)", ["7", "9"]),
        ("algorithm=grpo,gspo", ["grpo", "gspo"]),
        ("rl.filters=[truncated],[]", ["[truncated]", "[]"]),
        ("task.prompt='a, b','c'", ["'a, b'", "'c'"]),
        ("algorithm.loss=my:one,my:other", ["my:one", "my:other"]),
        ("optimizer.lr=1e-5,3e-5", ["1e-05", "3e-05"]),
    ],
)
def test_values_are_listed_as_hydra_lists_them(text: str, values: list[str]) -> None:
    assert [[*each] for each in split_sweep([text])[1].values()] == [values]


def test_a_list_in_brackets_is_one_value() -> None:
    assert split_sweep(["rl.filters=[truncated,equal_rewards]"])[1] == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1,1"], "a value comes twice"),
        (["seed=1,2", "seed=3"], "given twice"),
        (["recipe=glob(*)"], "values that cannot be listed"),
        (["optimizer.lr=interval(0,1)"], "values that cannot be listed"),
        (["seed"], "not an assignment"),
        (["~seed=1,2"], "not an assignment"),
        (["seed=1,"], "cannot be read"),
    ],
)
def test_what_is_no_sweep_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_sweep(overrides)
