"""An installed wheel works outside of the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from moerl_runs import DoneRun, moerl
from waiting import run_within

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    done = run_within([python, *PIP, *map(str, arguments)], 300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_installed_wheel_finds_its_configs_and_reward_worker(tmp_path: Path) -> None:
    """Slow because the build backend is fetched from the package index."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("moerl-*.whl")
    pip("install", "--no-deps", "--target", site, wheel)
    command = (sys.executable, "-m", "moerl")
    [metadata] = [path.read_text() for path in site.glob("moerl-*.dist-info/METADATA")]
    assert "Requires-Python: <3.13,>=3.12" in metadata
    assert "# moerl" in metadata
    assert "](docs/" not in metadata  # an index shows the README alone: links into the repository are text
    shown = moerl("train", "--show-config", "recipe=tiny", cwd=elsewhere, path=[site], command=command)
    assert shown.status == 0, shown.output
    assert yaml.safe_load(shown.output)["recipe"] == "tiny"
    kinds = (".py", ".yaml", ".patch", ".txt", ".j2", ".sbatch")
    packed = {path.relative_to(site / "moerl") for path in (site / "moerl").rglob("*") if path.suffix in kinds}
    # Configs, templates, patches and scripts for SLURM stand beside the package in a checkout, and in it in a wheel.
    here = {
        path.relative_to(parent)
        for parent, folder in (
            (ROOT / "moerl", ROOT / "moerl"),
            (ROOT, ROOT / "configs"),
            (ROOT, ROOT / "patches"),
            (ROOT, ROOT / "scripts" / "slurm"),
            (ROOT, ROOT / "templates"),
        )
        for path in folder.rglob("*")
        if path.suffix in kinds
    }
    assert packed == here
    where = "import moerl, sys; sys.exit(moerl.__file__)"
    used = moerl(cwd=elsewhere, path=[site], command=(sys.executable, "-c", where))
    assert used.output.strip() == str(site / "moerl" / "__init__.py")


@pytest.mark.slow
def test_a_wheel_without_extras_plans_and_reads_and_says_what_else_needs_which(tmp_path: Path, tiny: DoneRun) -> None:
    """Slow because all packages come from the package index."""
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("moerl-*.whl")
    venv, page = tmp_path / "venv", tmp_path / "page.html"
    python = venv / "bin" / "python"
    run_within([sys.executable, "-m", "venv", venv], 120).check_returncode()
    pip("install", wheel, python=python)
    assert not [*venv.glob("lib/python*/site-packages/torch")]
    for command in (
        "--help",
        "plan memory recipe=tiny",
        "plan weights recipe=tiny",
        "plan run recipe=tiny",
        "train --show-config recipe=tiny",
        f"status {tiny.folder}",
        f"samples {tiny.folder}",
        f"watch --once {tiny.folder}",
        f"report {tiny.folder} --output {page}",
        f"diagnose {ROOT}/tests/golden/dumps/nemo_rl/train_data_step4.jsonl --output {page}",
    ):
        done = moerl(*command.split(), cwd=tmp_path, command=(str(python), "-m", "moerl"))
        assert done.status == 0, f"{command}: {done.output}"
    (tmp_path / "site.yaml").write_text("python: /opt/moerl/bin/python\n")
    dump = f"{tiny.folder}/rollouts --model {tiny.folder}/final_model"
    for command, extra in (
        ("train recipe=tiny", "train"),
        (f"verify {dump}", "train"),
        (f"diagnose {dump} --output {page}", "hf"),
        ("launch slurm recipe=tiny --time 30 --dry-run", "train"),
        ("launch slurm recipe=tiny --time 30 --site site.yaml --dry-run", "tasks"),
        ("doctor recipe=tiny rollout=sglang", "train"),
    ):
        done = moerl(*command.split(), cwd=tmp_path, command=(str(python), "-m", "moerl"))
        assert done.status != 0
        assert f"extra `{extra}`" in done.output, done.output
