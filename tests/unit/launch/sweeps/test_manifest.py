"""`sweep.json`: names of runs, and what may not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.compose import split_sweep
from moerl.errors import ConfigError
from moerl.launch.sweeps.manifest import (
    MANIFEST_FILE,
    Manifest,
    new_manifest,
    read_manifest,
    refuse_changes,
    write_manifest,
)


def made(*overrides: str, config_dir: Path | None = None) -> Manifest:
    return new_manifest(*split_sweep(overrides), config_dir)


def test_every_value_comes_with_every_other() -> None:
    manifest = made("recipe=tiny", "seed=1,2,3", "keep_routing.mode=off,rollout")
    assert (manifest.common, manifest.keys) == (["recipe=tiny"], ["seed", "keep_routing.mode"])
    points = [tuple(run.values.values()) for run in manifest.runs]
    assert points[:3] == [("1", "off"), ("1", "rollout"), ("2", "off")]
    assert len(points) == 6


def test_runs_have_names_that_people_can_read_and_that_differ() -> None:
    manifest = made("seed=1,2", "keep_routing.mode=off,rollout", "task.prompt='a/../b','c d'")
    names = [run.name for run in manifest.runs]
    assert names[0] == "000_seed-1_mode-off_prompt-a-..-b"
    assert len(set(names)) == 8
    assert all("/" not in name and " " not in name for name in names)


def test_long_values_are_cut_and_names_still_differ() -> None:
    names = [run.name for run in made(f"task.prompt='{'x' * 300}1','{'x' * 300}2'").runs]
    assert names[0] != names[1]
    assert max(map(len, names)) <= 80


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = made("recipe=tiny", "seed=1,2", config_dir=tmp_path)
    manifest.runs[0].state, manifest.runs[0].status = "failed", -9
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert manifest.config_dir == str(tmp_path.resolve())


def test_the_same_sweep_is_not_refused(tmp_path: Path) -> None:
    refuse_changes(made("recipe=tiny", "seed=1,2"), made("recipe=tiny", "seed=range(1,3)"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "key", "seen", "expected"),
    [
        (["recipe=tiny", "seed=1,3"], "seed", "1,3", "1,2"),
        (["recipe=tiny", "seed=1,2,3"], "seed", "1,2,3", "1,2"),
        (["recipe=laptop", "seed=1,2"], "recipe", "laptop", "tiny"),
        (["recipe=tiny", "seed=1,2", "rl.steps=9"], "rl.steps", "9", "nothing"),
        (["seed=1,2"], "recipe", "nothing", "tiny"),
    ],
)
def test_another_sweep_in_the_same_directory_is_refused_by_name(
    overrides: list[str], key: str, seen: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_changes(made("recipe=tiny", "seed=1,2"), made(*overrides), tmp_path)
    assert raised.value.what.startswith(f"{key}: not as in the sweep")
    assert (raised.value.seen, raised.value.expected) == (seen, expected)


@pytest.mark.parametrize("content", [None, "{", '{"keys": []}'])
def test_a_directory_without_a_sweep_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(ConfigError, match="holds no sweep"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_build_is_refused(tmp_path: Path) -> None:
    manifest = made("seed=1,2")
    manifest.schema = "moerl-sweep-9"
    write_manifest(manifest, tmp_path)
    with pytest.raises(ConfigError, match="of another build"):
        read_manifest(tmp_path)
