"""The Triton kernels: the tests of all scores with Triton's interpreter, and a compilation for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moerl.kernels import sparse_triton

def build(kernel, pointers, **constants):
    names = kernel.arg_names
    signature = {name: pointers.get(name, "i32") for name in names} | {name: "constexpr" for name in constants}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert not re.search(r"\\b(atom|red)\\.", built.asm["ptx"])
    if pointers["out_ptr"] == "*bf16":
        assert "cvt.rn.bf16" in built.asm["ptx"]

longs = {name: "*i64" for name in ("rows_ptr", "columns_ptr", "sources_ptr", "offsets_ptr", "outs_ptr")}
fixed = {"BLOCK": 512, "ACCUMULATE": triton.language.float32}
for dtype in ("*bf16", "*fp32"):
    build(sparse_triton._dots_kernel, longs | {"hidden_ptr": dtype, "weight_ptr": dtype, "out_ptr": "*fp32"}, **fixed)
    for add, out in ((True, "*fp32"), (False, dtype)):
        pointers = longs | {"source_ptr": dtype, "factors_ptr": "*fp32", "out_ptr": out}
        build(sparse_triton._segment_kernel, pointers, ADD=add, **fixed)
"""


def run(arguments: list[str], cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_scores_of_the_interpreted_kernels_pass_the_same_tests(tmp_path: Path) -> None:
    tests = [str(Path(__file__).with_name(name)) for name in ("test_scores.py", "test_pairs.py")]
    done = run(["-m", "pytest", "-p", "no:xdist", *tests], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 30


def test_the_kernels_compile_for_a_gpu_without_atomics(tmp_path: Path) -> None:
    done = run(["-c", COMPILE], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
