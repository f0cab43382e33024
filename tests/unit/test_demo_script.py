"""`make demo` takes the GPU if there is one, and brings what it needs there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$2" in
    *get_device_name*) echo "$GPU" ;;
    *transformer_engine*) exit "$ABSENT" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def demo(folder: Path, gpu: str, *, absent: bool = False) -> list[str]:
    """Runs the script with programs that only say that they were called; returns its lines of output."""
    program(folder / "python", PYTHON)
    program(folder / "moerl", '#!/bin/sh\necho "moerl $*"\n')
    program(folder / "make", '#!/bin/sh\necho "make $*"\n')
    environment = {"BIN": str(folder), "PATH": f"{folder}:{os.environ['PATH']}", "GPU": gpu, "ABSENT": str(int(absent))}
    script = ["bash", str(ROOT / "scripts" / "demo.sh"), "seed=2"]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_without_a_gpu_the_demo_is_the_recipe(tmp_path: Path) -> None:
    assert demo(tmp_path, "") == ["moerl train recipe=demo seed=2"]


def test_on_a_gpu_the_trainer_is_in_bfloat16_and_it_is_said(tmp_path: Path) -> None:
    said, ran = demo(tmp_path, "NVIDIA H200")
    assert said == "demo: on NVIDIA H200, trainer in bfloat16 (model.dtype=bfloat16)"
    assert ran == "moerl train recipe=demo model.dtype=bfloat16 seed=2"


def test_transformer_engine_is_made_first_if_it_is_absent(tmp_path: Path) -> None:
    said, made, _, ran = demo(tmp_path, "NVIDIA H200", absent=True)
    assert "make gpu" in said
    assert made == "make gpu"
    assert ran.startswith("moerl train recipe=demo model.dtype=bfloat16")


def test_make_demo_runs_the_script() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "demo: setup\n\t@bash scripts/demo.sh\n" in text


@pytest.mark.parametrize("expression", ["get_device_name", "transformer_engine"])
def test_the_stand_in_answers_what_the_script_asks(expression: str) -> None:
    assert expression in (ROOT / "scripts" / "demo.sh").read_text(encoding="utf-8")
