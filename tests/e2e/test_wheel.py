"""An installed wheel works outside of the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from moerl_runs import moerl

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def pip(*arguments: str | Path) -> None:
    done = subprocess.run([*PIP, *map(str, arguments)], capture_output=True, text=True, timeout=300)
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
