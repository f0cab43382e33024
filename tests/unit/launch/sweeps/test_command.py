"""`moerl train -m`: what it refuses before any run starts. The runs themselves: tests/e2e/test_sweeps.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl import cli
from moerl.config.compose import split_sweep
from moerl.launch.sweeps.command import read_options
from moerl.launch.sweeps.manifest import new_manifest, write_manifest


def test_keys_of_the_sweep_are_taken_out() -> None:
    options = read_options(["recipe=tiny", "sweep.dir=a b", "seed=1,2", "sweep.jobs=3"])
    assert (options.folder, options.jobs, options.overrides) == (Path("a b"), 3, ["recipe=tiny", "seed=1,2"])
    assert read_options(["seed=1,2"]).jobs is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=tiny"], "-m: nothing is swept"),
        (["seed=1,2", "run_dir=runs/one"], "run_dir: set by the sweep"),
        (["seed=1,2", "resume=auto"], "resume: set by the sweep"),
        (["seed=1,2", "sweep.jobs=0"], "sweep.jobs: no number of runs"),
        (["seed=1,2", "sweep.jobs=1", "sweep.jobs=2"], "sweep.jobs: no key of sweeps, given twice"),
        (["seed=1,2", "sweep.size=2"], "sweep.size: no key of sweeps"),
        (["seed=1,2", "sweep.dir="], "sweep.dir: no key of sweeps, given twice or empty"),
        (["sweep.dir=none"], "sweep.dir: holds no sweep"),
        (["recipe=tiny", "rl.group_size=4,1"], "rl.group_size"),
        (["recipe=tiny", "rl.groupsize=4,2"], "rl.groupsize: unknown key"),
    ],
)
def test_what_is_wrong_is_refused_before_a_run_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "-m", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_would_be_refused_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=tiny", "seed=1,2", "rl.group_size=4,1", f"sweep.dir={tmp_path / 'sweep'}"]
    assert cli.main(["train", "-m", *words]) == 2
    assert "in the run with seed=1 rl.group_size=1; no run was started" in capsys.readouterr().err


def test_other_values_in_the_directory_of_a_sweep_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(new_manifest(*split_sweep(["recipe=tiny", "seed=1,2"]), None), tmp_path)
    assert cli.main(["train", "-m", "recipe=tiny", "seed=1,2,3", f"sweep.dir={tmp_path}"]) == 2
    assert f"seed: not as in the sweep that is in {tmp_path}; seen: 1,2,3; expected: 1,2" in capsys.readouterr().err


def test_show_config_prints_the_command_line_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert cli.main(["train", "-m", "recipe=tiny", "seed=1,2", f"sweep.dir={folder}", "--show-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("moerl train recipe=tiny seed=2 ")
    assert lines[1].endswith(" resume=auto")
    assert not folder.exists()


def test_several_values_without_m_point_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "recipe=tiny", "seed=1,2"]) == 2
    assert "moerl train -m" in capsys.readouterr().err
