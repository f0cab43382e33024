"""Looks at the container of a job, with stand-ins for srun."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_config

from moerl.config.load import load_plan
from moerl.errors import ConfigError
from moerl.launch.checks import containers
from moerl.launch.checks.containers import has_pyxis, look_at_container
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.inputs import Note
from moerl.launch.doctor.machine import check_slurm

LISTS = ("echo", "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
LISTS_NOT = ("echo", "      --container=PATH")


def facts(runtime: str, *keys: str, shown: tuple[Path, ...] = ()) -> Facts:
    config = load_plan(["recipe=tiny", *keys])
    return Facts("dry run", config, container="the container a.sqsh", runtime=runtime, shown=shown)


def test_srun_says_whether_pyxis_is_there() -> None:
    assert has_pyxis(LISTS) is True
    assert has_pyxis(LISTS_NOT) is False
    assert has_pyxis(("/no/srun",)) == "no srun on this machine"
    assert has_pyxis(("sh", "-c", "echo no configuration >&2; exit 1")) == "srun ended with 1: no configuration"


def test_a_site_without_pyxis_is_refused_and_one_that_cannot_be_asked_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containers.has_pyxis, "__defaults__", (LISTS_NOT,))
    with pytest.raises(ConfigError, match="this SLURM has no pyxis; seen: `srun --help` does not list"):
        look_at_container(facts("pyxis"))
    assert isinstance(look_at_container(facts("enroot")), str)
    monkeypatch.setattr(containers.has_pyxis, "__defaults__", (("/no/srun",),))
    seen = look_at_container(facts("pyxis"))
    assert isinstance(seen, Note)
    assert seen.seen == "cannot be asked for pyxis: no srun on this machine"
    monkeypatch.setattr(containers.has_pyxis, "__defaults__", (LISTS,))
    assert look_at_container(facts("pyxis")) == "the container a.sqsh shows what is read"


def test_a_model_that_no_mount_shows_is_a_note(tmp_path: Path) -> None:
    write_hf_config(tmp_path / "model", max_position_embeddings=512)
    keys = ("model=pretrained", f"model.path='{tmp_path / 'model'}'")
    hidden = look_at_container(facts("enroot", *keys, shown=(tmp_path / "runs",)))
    assert isinstance(hidden, Note)
    assert hidden.seen == f"no mount of the container a.sqsh shows {tmp_path / 'model'}"
    assert look_at_container(facts("enroot", *keys, shown=(tmp_path,))) == "the container a.sqsh shows what is read"


def test_data_dumps_and_an_image_that_no_node_may_have_are_notes(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    keys = (
        *("task=dataset", f"task.path='{data}'", "task.rewards.form.kind=json", "task.rewards.form.file=/forms/a.json"),
        *("sft.steps=0", "rollout=dumps", f"rollout.path='{tmp_path / 'dumps'}'"),
    )
    hidden = look_at_container(facts("enroot", *keys))
    assert isinstance(hidden, Note)
    for path in (data, tmp_path / "dumps", "/forms/a.json"):
        assert str(path) in hidden.seen
    own = ("task=jsonl", f"task.path='{data}'", "task.reward=mine:f")
    assert isinstance(look_at_container(facts("enroot", *own)), Note)
    assert isinstance(look_at_container(facts("enroot", *own, shown=(tmp_path,))), str)
    of_no_node = facts("enroot", *own, shown=(tmp_path,))
    of_no_node.image = tmp_path / "moerl.sqsh"
    missing = look_at_container(of_no_node)
    assert isinstance(missing, Note)
    assert missing.seen == f"{tmp_path / 'moerl.sqsh'}: cannot be seen from here"
    both = facts("enroot", *own)
    both.image = of_no_node.image
    seen = look_at_container(both)
    assert isinstance(seen, Note)
    for each in (f"shows {data}", "moerl.sqsh: cannot be seen", "add them to `mounts`", "correct container.image"):
        assert each in f"{seen.seen} {seen.remedy}", "one finding hides no other"
    of_no_node.image.touch()
    assert isinstance(look_at_container(of_no_node), str)


def test_a_run_without_a_container_is_not_looked_at() -> None:
    assert look_at_container(Facts("dry run", load_plan(["recipe=tiny"]))) == "commands run on the nodes themselves"


def test_doctor_says_what_srun_can() -> None:
    assert [check_slurm(pyxis).level for pyxis in (True, False, "srun ended with 1")] == ["green", "green", "yellow"]
    assert check_slurm(False).seen == "srun without the plugin pyxis; runtime: pyxis of a site file needs it"
