"""What our plans gather is what Megatron-Bridge exports, bit for bit, in every layout and family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny_moe
import torch
import weight_sync
from families import FAMILIES
from ranks import Ranks

from moerl.contract.trajectory import ModelSpec

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "EP2": (2, {"expert": 2}),
    "VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ETP2": (2, {"tensor": 2, "expert_tensor": 2}),
    "TP2-EP2": (4, {"tensor": 2, "expert": 2}),
    "TP4": (4, {"tensor": 4}),
    "PP2-CP2-EP2": (4, {"pipeline": 2, "context": 2, "expert": 2}),
    "TP2-PP2-EP2-DP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "PP2-EP2-ETP2-DP4": (8, {"pipeline": 2, "expert": 2, "expert_tensor": 2}),
}
NAMES = ("qwen3_moe", "deepseek_v3", "glm4_moe")
QUICK = {("qwen3_moe", "TP2"), ("deepseek_v3", "TP2"), ("glm4_moe", "VPP2")}
CASES = [
    pytest.param(
        name,
        dtype,
        *LAYOUTS[layout],
        id=f"{name}-{dtype}-{layout}",
        marks=() if layout == "one" or (dtype == "bfloat16" and (name, layout) in QUICK) else pytest.mark.distributed,
    )
    for name in NAMES
    for dtype in ("float32", "bfloat16")
    for layout in LAYOUTS
]
PROCESSES = {1: "one_process", 2: "two_processes", 4: "four_processes", 8: "eight_processes"}


def gather_both_ways(where: Any, path: Path, spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Every root's tensors by both ways of gathering against the bridge's export, and the bytes that travelled."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(path, spec, where, ModelOptions(dtype=dtype), tiny_moe.OPTIMIZER, 8)
    expected = {name: tensor.clone() for name, tensor in trainer.export()}
    found: dict[str, Any] = {"world": where.world_size, "problems": [], "bytes": {}}
    for gather in ("root", "allgather"):
        for roots in sorted({1, where.pipeline, where.world_size}):
            plan = weight_sync.plan_for(trainer, path, roots=roots, gather=gather)
            sink = weight_sync.KeepingSink() if where.rank in plan.options.roots else None
            report = weight_sync.publish(trainer, plan, sink, version=roots)
            mine = sink.tensors if sink is not None else {}
            found["problems"] += [f"{gather}-{roots}: {p}" for p in differences(mine, expected, whole=roots == 1)]
            found["bytes"][f"{gather}-{roots}"] = (report.received_bytes, report.needed_bytes, report.num_bytes)
            if sink is not None:
                assert sink.calls[0] == f"begin {roots}"
                assert sink.calls[-1] == "end"
    found["total"] = sum(tensor.nbytes for tensor in expected.values())
    return found


def differences(found: dict[str, Any], expected: dict[str, Any], *, whole: bool) -> list[str]:
    problems = [f"unknown {name}" for name in found.keys() - expected.keys()]
    if whole and found:
        problems += [f"missing {name}" for name in expected.keys() - found.keys()]
    for name in found.keys() & expected.keys():
        ours, theirs = found[name], expected[name]
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            problems.append(f"{name}: {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}")
        elif not torch.equal(ours.view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)):
            problems.append(f"{name} differs")
    return problems


@pytest.mark.parametrize(("name", "dtype", "world_size", "sizes"), CASES)
def test_both_ways_of_gathering_give_the_bridges_export(
    name: str, dtype: str, world_size: int, sizes: dict[str, int], tmp_path: Path, request: pytest.FixtureRequest
):
    if name == "qwen3_moe" and sizes.get("tensor", 1) == 4:
        # Two key-value heads on four ranks: Megatron cuts inside of a group.
        assert FAMILIES[name].config().num_key_value_heads == 2
    families.write_model(tmp_path, FAMILIES[name], seed=3)
    ranks: Ranks = request.getfixturevalue(PROCESSES[world_size])
    results = ranks.run(gather_both_ways, tmp_path, FAMILIES[name].spec(), dtype, **sizes)
    for result in results:
        assert result["problems"] == []
    for way in results[0]["bytes"]:
        received, needed, sent = np.sum([result["bytes"][way] for result in results], axis=0)
        assert sent == results[0]["total"]
        if way.startswith("root"):
            assert received == needed
            assert needed <= results[0]["total"]
        else:
            assert received >= needed
