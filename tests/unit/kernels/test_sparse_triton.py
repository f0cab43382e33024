"""The Triton kernels: the tests of scores and routing maps with Triton's interpreter, and a compilation for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = Path(__file__).parents[2] / "compile_kernels.py"


def run(arguments: list[str], cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("chosen", "at_least"), [("not slow", 50), pytest.param("slow", 10, marks=pytest.mark.slow)])
def test_the_interpreted_kernels_pass_the_same_tests(chosen: str, at_least: int, tmp_path: Path) -> None:
    tests = [
        str(Path(__file__).with_name(name))
        for name in ("test_scores.py", "test_main_grad.py", "test_pairs.py", "test_routing.py")
    ]
    done = run(["-m", "pytest", "-p", "no:xdist", "-m", chosen, *tests], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_without_atomics_and_without_spilled_registers(tmp_path: Path) -> None:
    done = run([str(COMPILE), str(tmp_path / "kernel.ptx")], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
