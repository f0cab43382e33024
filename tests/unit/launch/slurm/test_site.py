"""The file of a site: every key is checked before anything is submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moerl.errors import ConfigError
from moerl.launch.slurm.site import Container, Site, load_site

EXAMPLE = Path(__file__).parents[4] / "scripts" / "slurm" / "site.yaml"


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "site.yaml").write_text(text)
    return tmp_path / "site.yaml"


def test_the_example_is_valid_also_uncommented_and_names_every_key(tmp_path: Path) -> None:
    assert load_site(EXAMPLE) == Site()
    lines = re.findall(r"^# ([a-z_]+: .+)$", EXAMPLE.read_text(), re.MULTILINE)
    site = load_site(write(tmp_path, "\n".join(lines)))
    assert site.model_fields_set == set(Site.model_fields)
    assert site.container is not None
    assert site.container.model_fields_set == set(Container.model_fields)


def test_without_a_file_nothing_is_asked_for() -> None:
    assert load_site(None) == Site()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitions: a", "partitions: unknown key; expected: one of partition, account"),
        ("gpus_per_node: many", "gpus_per_node: wrong value; seen: 'many'"),
        ("container: {runtime: docker, image: a}", "container.runtime: wrong value; seen: 'docker'"),
        ("container: {runtime: enroot, image: a, name: b}", "container.name: unknown key; expected: one of runtime"),
        ("environment: {'A B': c}", "the name of an environment variable"),
        ('environment: {A: "b\\nc"}', "one line of printable text"),
        ("sbatch: [--requeue]", "--requeue is decided by one"),
        ("sbatch: ['--comment=\"a']", "a value without quotes"),
        ("sbatch: ['partition=a']", "an option of sbatch"),
        ("partition: 'a b'", "partition: wrong value; seen: 'a b'"),
        ("- a", "the file: wrong value"),
        ("a: [", "--site: cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_site(write(tmp_path, text))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--site: cannot be read"):
        load_site(tmp_path / "none.yaml")
