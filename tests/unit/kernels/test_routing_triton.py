"""The Triton kernels of routing maps, compiled for a GPU. `test_sparse_triton.py` interprets them."""

from __future__ import annotations

import os
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
from moerl.kernels import routing_triton

def build(kernel, pointers, **constants):
    names = kernel.arg_names
    signature = {name: pointers.get(name, "i32") for name in names} | {name: "constexpr" for name in constants}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return set(re.findall(r"\\b(?:atom|red)\\.[a-z0-9_.]+", ptx))

longs = {name: "*i64" for name in ("keys_ptr", "checksum_ptr", "load_ptr", "out_ptr", "own_ptr", "recorded_ptr")}
flags = {name: "*u8" for name in ("map_ptr", "counted_ptr", "real_ptr", "routed_ptr")}
for experts, scores in ((8, "*fp32"), (512, "*bf16")):
    fixed = {"ROWS": 4096 // experts, "EXPERTS": experts}
    sums = {"WITH_CHECKSUM": True, "WITH_LOAD": True}
    atomics = build(routing_triton._map_sums_kernel, longs | flags, **fixed, **sums)
    assert atomics and all(name.endswith("add.u64") for name in atomics), atomics
    assert not build(routing_triton._row_checksums_kernel, longs | flags, **fixed)
    pointers = longs | flags | {"scores_ptr": scores, "differing_ptr": "*i32", "statistics_ptr": "*fp64"}
    fixed |= {"NUM_CHOSEN": 8, "LEAVES_SOME_OUT": experts > 8, "NUM_STATISTICS": 5}
    assert not build(routing_triton._choices_kernel, pointers, **fixed)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_and_add_nothing_but_integers_with_atomics(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
