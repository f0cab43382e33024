"""Compiles every Triton kernel for an H100, down to machine code, on a machine without one: `python
tests/compile_kernels.py FILE`.

Prints registers and shared memory. Fails if a kernel spills registers, uses atomics other than those of integers, does
not round to nearest or reads bfloat16 number by number. FILE is written over.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moerl.contract.trainer import STATISTICS
from moerl.kernels import routing_triton, slabs_triton, sparse_triton

LONG = {"offsets_ptr", "targets_ptr"}
INT = {
    *("rows_ptr", "columns_ptr", "positions_ptr", "sources_ptr"),
    *("starts_ptr", "counts_ptr", "first_parts_ptr", "split_ptr"),
}
HALF = {"hidden_ptr", "weight_ptr", "source_ptr", "out_ptr"}
"""Pointers to numbers of the dtype of hidden states and head; other numbers have that of sums."""
EVEN = ("width", "num_columns")
OF_ROUTING = {
    **dict.fromkeys(("map_ptr", "counted_ptr", "real_ptr", "routed_ptr"), "*u8"),
    **dict.fromkeys(("keys_ptr", "checksum_ptr", "load_ptr", "out_ptr", "own_ptr", "recorded_ptr"), "*i64"),
    **{"scores_ptr": "*fp32", "differing_ptr": "*i32", "statistics_ptr": "*fp64"},
    **{"num_rows": "i32", "num_experts": "i32", "layer_term": "i64"},
}
"""Arguments of the kernels of routing maps."""


def kinds_of(kernel: Any, half: str, sums: str) -> dict[str, str]:
    def kind(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32"
        return "*i64" if name in LONG else "*i32" if name in INT else half if name in HALF else sums

    return {name: kind(name) for name in kernel.arg_names}


def ptx_of(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> str:
    """Compiles one kernel as a launch with pointers and sizes that 16 divides does, and prints what it takes."""
    names: list[str] = kernel.arg_names
    even = [name for name in names if name.endswith("_ptr") or name in EVEN]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    ptx: str = done.asm["ptx"]
    with open(sys.argv[1], "w") as file:
        file.write(ptx)
    command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", sys.argv[1], "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in report, (kernel.__name__, report)
    registers = re.findall(r"Used (\d+) registers", report)[0]
    print(f"{kernel.__name__}, {kinds[names[0]]}: {registers} registers, {done.metadata.shared} bytes of shared memory")
    return ptx


def check(kernel: Any, half: str, sums: str, **constants: Any) -> Any:
    """Compiles a kernel and returns it. half, sums: pointers to numbers of hidden states and head, and to sums."""
    ptx = ptx_of(kernel, kinds_of(kernel, half, sums), constants)
    assert not re.search(r"\b(atom|red)\.", ptx), f"{kernel.__name__} uses atomics"
    if half == "*bf16" and "out_ptr" in kernel.arg_names:
        assert "cvt.rn.bf16" in ptx, f"{kernel.__name__} does not round to nearest"
    if half == "*bf16" and HALF & set(kernel.arg_names):
        assert re.search(r"ld\.global[.0-9a-zA-Z:]*\.v4\.b32", ptx), f"{kernel.__name__} reads number by number"
    return kernel


def check_routing() -> set[Any]:
    """Compiles the kernels of routing maps for models of few and of many experts, and returns them."""
    maps, rows = routing_triton._map_sums_kernel, routing_triton._row_checksums_kernel
    choices = routing_triton._choices_kernel
    for num_experts in (8, 64, 128, 256):
        size = {"ROWS": routing_triton.BLOCK_ELEMENTS // num_experts, "EXPERTS": num_experts}
        sums = ptx_of(maps, OF_ROUTING, {**size, "WITH_CHECKSUM": True, "WITH_LOAD": True})
        assert set(re.findall(r"\b(?:atom|red)\.[\w.:]*", sums)) == {"atom.global.gpu.acq_rel.add.u64"}
        of_choices = {"NUM_CHOSEN": 8, "LEAVES_SOME_OUT": num_experts > 8, "NUM_STATISTICS": len(STATISTICS)}
        compared = ptx_of(choices, OF_ROUTING, {**size, **of_choices}, routing_triton.WARPS_OF_CHOICES)
        for ptx in (ptx_of(rows, OF_ROUTING, size), compared):
            assert not re.search(r"\b(atom|red)\.", ptx)
    return {maps, rows, choices}


def main() -> None:
    sparse, slabs = sparse_triton, slabs_triton
    built = check_routing()
    gradients = {"OF_LOGPROBS": True, "OF_ENTROPY": True}
    for half, sums, accumulate in (
        ("*bf16", "*fp32", tl.float32),
        ("*fp32", "*fp32", tl.float32),
        ("*fp64", "*fp64", tl.float64),
    ):
        many = {"BLOCK": sparse.SUM_WIDTH, "ACCUMULATE": accumulate}
        dots = {"BLOCK": sparse.DOT_WIDTH, "PAIRS": sparse.DOT_PAIRS, "ACCUMULATE": accumulate}
        built |= {
            check(sparse.dots_kernel, half, sums, **dots),
            *(check(sparse.sums_kernel, half, sums, PAIRS=sparse.SUM_PAIRS, ADD=add, **many) for add in (False, True)),
            *(check(sparse.parts_kernel, half, sums, ADD=add, **many) for add in (False, True)),
            check(slabs.gradient_kernel, half, sums, BLOCK=slabs.BLOCK_COLUMNS, **gradients),
            check(slabs.kl_gradient_kernel, half, sums, BLOCK=slabs.BLOCK_COLUMNS),
        }
    for sums in ("*fp32", "*fp64"):
        built |= {
            check(sparse.sets_kernel, sums, sums, BLOCK=sparse.SET_BLOCK),
            check(sparse.sets_gradient_kernel, sums, sums, BLOCK=sparse.SET_BLOCK, OF_KEPT=True, **gradients),
            check(slabs.add_kernel, sums, sums, BLOCK=slabs.BLOCK_COLUMNS),
            check(slabs.add_kl_kernel, sums, sums, BLOCK=slabs.BLOCK_COLUMNS),
        }
    modules = (routing_triton, sparse, slabs)
    kernels = {each for module in modules for name, each in vars(module).items() if name.endswith("_kernel")}
    assert built == kernels, "a kernel that is not compiled here"


if __name__ == "__main__":
    main()
