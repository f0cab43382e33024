"""Tensors that our plans gather, equal bit for bit to the export of Megatron-Bridge, in every layout and family."""

from __future__ import annotations

from collections.abc import Callable
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

from moerl.batching.packing import PackOptions, pack_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims
from moerl.contract.trajectory import ModelSpec
from moerl.models.description import read_model
from moerl.weights.manifest import model_manifest

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "EP2": (2, {"expert": 2}),
    "VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ETP2": (2, {"tensor": 2, "expert_tensor": 2}),
    "TP2-EP2": (4, {"tensor": 2, "expert": 2}),
    # More ranks than key-value heads: Megatron cuts inside of what belongs to one.
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


def gather_both_ways(layout: Any, path: Path, spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Every sender's tensors by both ways of gathering against the bridge's export, and the bytes that travelled."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(dtype=dtype), tiny_moe.OPTIMIZER, 8)
    expected = {name: tensor.clone() for name, tensor in trainer.export()}
    found: dict[str, Any] = {"world": layout.dims.world_size, "problems": [], "bytes": {}}
    # Megatron's local layers cut the projections into latent spaces.
    if weight_sync.plan_for(trainer, path).manifest != model_manifest(
        read_model(path), layout.dims, split_latents=True
    ):
        found["problems"].append("the trainer publishes other tensors than follow from sizes")
    for gather in ("sender", "allgather"):
        for senders in sorted({1, layout.dims.pipeline, layout.dims.world_size}):
            plan = weight_sync.plan_for(trainer, path, senders=senders, gather=gather)
            sink = weight_sync.KeepingSink() if layout.rank in plan.options.senders else None
            report = weight_sync.publish(trainer, plan, sink, version=senders)
            mine = sink.tensors if sink is not None else {}
            found["problems"] += [f"{gather}-{senders}: {p}" for p in differences(mine, expected, whole=senders == 1)]
            found["bytes"][f"{gather}-{senders}"] = (report.received_bytes, report.needed_bytes, report.num_bytes)
            if sink is not None:
                assert sink.calls[0] == f"begin {senders}"
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
    name: str, dtype: str, world_size: int, sizes: dict[str, int], tmp_path: Path, processes: Callable[[int], Ranks]
):
    families.write_model(tmp_path, FAMILIES[name], seed=3)
    results = processes(world_size).run(gather_both_ways, tmp_path, FAMILIES[name].spec(), dtype, **sizes)
    for result in results:
        assert result["problems"] == []
    for way in results[0]["bytes"]:
        received, needed, sent = np.sum([result["bytes"][way] for result in results], axis=0)
        assert sent == results[0]["total"]
        if way.startswith("sender"):
            assert received == needed
            assert needed <= results[0]["total"]
        else:
            assert received >= needed


# --- into an engine, between training steps --------------------------------------------------------------------------


def train_and_sync(
    layout: Any, path: Path, spec: ModelSpec, dtype: str, expert_bias: str, batches: list[list[Microbatch]]
) -> list[str]:
    """Versions 0, 1 and 2 of a policy in training, each in an embedded engine compared with the bridge's export."""
    from transformers import AutoModelForCausalLM

    from moerl.contract.shares import cut_share
    from moerl.rollout.embedded import EmbeddedEngine
    from moerl.rollout.weight_staging import held_tensors
    from moerl.trainer.losses import TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    options = ModelOptions(dtype=dtype, expert_bias=expert_bias)
    trainer = MegatronTrainer(read_model(path), layout, options, tiny_moe.OPTIMIZER, 8)
    local = [cut_share(batch, trainer.layout) for batch in batches[layout.data_rank]]
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    engine, problems, before = None, [], {}
    if layout.rank == 0:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        engine = EmbeddedEngine(model, spec, engine_id="engine", max_running=1)
    plan = weight_sync.plan_for(trainer, path)
    for version in range(3):
        weight_sync.publish(trainer, plan, engine, version)
        expected = {name: tensor.clone() for name, tensor in trainer.export()}
        if engine is not None:
            held = dict(held_tensors(engine._model, engine._dtypes))
            cast = {name: tensor.to(held[name].dtype) for name, tensor in expected.items() if name in held}
            problems += [f"version {version}: {problem}" for problem in differences(held, cast, whole=True)]
            same = [name for name, tensor in expected.items() if name in before and torch.equal(tensor, before[name])]
            problems += [f"version {version} has not changed"] if version and len(same) > len(expected) // 2 else []
            assert engine.handshake().policy_version == version
            before = expected
        trainer.step(local, TextLoss(local, spec.vocab_size, denominator), enforce=True)
    return problems


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_holds_the_export_of_every_step(
    name: str, dtype: str, tmp_path: Path, processes: Callable[[int], Ranks]
):
    families.write_model(tmp_path, FAMILIES[name], seed=5)
    samples = families.make_samples(FAMILIES[name].spec(), 5, (5, 30, 17, 41))
    options = PackOptions(64, Padding.of(ParallelDims(tensor=2)))
    batches = pack_for_ranks(samples, 2, options, replay=True)
    ranks = processes(8)
    results = ranks.run(
        train_and_sync,
        tmp_path,
        FAMILIES[name].spec(),
        dtype,
        "frozen" if name == "qwen3_moe" else "update",
        batches,
        tensor=2,
        pipeline=2,
        expert=2,
    )
    assert [problem for result in results for problem in result] == []
