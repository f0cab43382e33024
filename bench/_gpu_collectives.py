"""One rank of NCCL (gloo on a CPU): collectives, and a weight update as far as one goes. A check of `gpu_check.py`.

A rank of the trainer starts its process group and Megatron's, as in a run, and calls the collectives that runs use. It
then publishes random weights by a plan: gathered into buckets on the device, loaded by an embedded engine there,
checksums of both sides compared; a sink gets the bits that a publication on the CPU gives. Last, the sender's end of
the process group that it shares with servers is formed and a bucket is broadcast in it: with NCCL alone, because gloo
passes buckets on from rank to rank. What several ranks send one another, and what a server receives, is not run.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _gpu_checks import Findings
from _gpu_models import read_checkpoint, write_checkpoint
from _ranks import as_only_rank
from _report import Result
from torch import Tensor

from moerl.contract.parallel import RankCoordinates
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.models.description import ModelDescription
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_model
from moerl.rollout.sglang.sender_group import GroupOptions, SenderGroup
from moerl.trainer import platform
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import model_manifest
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, SyncPlan, choose_senders, make_plan
from moerl.weights.publish import Publisher, PublishReport

NUM_VALUES = {"cuda": 1 << 24, "cpu": 1 << 10}
BUCKET_BYTES = {"cuda": 4 << 20, "cpu": 1 << 14}
STEP_SECONDS = 20.0
LOOPBACK = "127.0.0.1"


def check(device: str) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), device)
        results = as_only_rank(_rank, Path(folder), device)
    left_out = [] if device == "cuda" else ["a bucket broadcast in the group of a sender: gloo has none"]
    return Findings(results, left_out)


def _rank(layout: RankCoordinates, folder: Path, device: str) -> list[Result]:
    backend = dist.get_backend()
    wanted = {"cuda": "nccl", "cpu": "gloo"}[device]
    return [
        Result(f"backend {backend}, for {wanted}", int(backend == wanted), "== 1", backend == wanted),
        *_collectives(device),
        *_publication(layout, read_checkpoint(folder, device), device),
        *_sender_group(device),
    ]


def _collectives(device: str) -> list[Result]:
    """With one rank each gives back what it got; that it does so on the device is what is seen."""
    given = torch.randn(NUM_VALUES[device], generator=torch.Generator().manual_seed(1)).to(device)

    def broadcast(into: Tensor) -> None:
        into.copy_(given)
        dist.broadcast(into, src=0)

    def all_reduce(into: Tensor) -> None:
        into.copy_(given)
        dist.all_reduce(into)

    calls = {
        "broadcast": broadcast,
        "all_reduce": all_reduce,
        "all_gather_into_tensor": lambda into: dist.all_gather_into_tensor(into, given),
        "reduce_scatter_tensor": lambda into: dist.reduce_scatter_tensor(into, given),
        "all_to_all_single": lambda into: dist.all_to_all_single(into, given),
    }
    results = []
    for name, call in calls.items():
        into = torch.zeros_like(given)
        call(into)
        results.append(_equal(f"{name}: {given.nbytes >> 10} KiB", [(name, into)], [(name, given)]))
    dist.barrier()
    return results


# --- a weight update -------------------------------------------------------------------------------------------------


class KeepingSink:
    """Keeps copies on the CPU of what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def begin_update(self, update: WeightUpdate) -> None:
        self.tensors = {}

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.tensors |= {name: tensor.cpu().clone() for name, tensor in tensors}

    def abandon_update(self) -> None:
        self.tensors = {}

    def end_update(self) -> None:
        """Nothing to do: every tensor is here."""


def _publication(layout: RankCoordinates, model: ModelDescription, device: str) -> list[Result]:
    options = PlanOptions(choose_senders(layout.dims, 1), 2, BUCKET_BYTES[device])
    plan = make_plan(model_manifest(model, layout.dims), options)
    generator = torch.Generator().manual_seed(2)
    shards = {
        name: (0.1 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in plan.manifest.shard_shapes(layout.rank).items()
    }
    on_device = {name: shard.to(device) for name, shard in shards.items()}
    here, there = KeepingSink(), KeepingSink()
    _publish(plan, on_device, here, platform.device())
    _publish(plan, shards, there, torch.device("cpu"))
    assert model.folder is not None
    loaded = load_model(model.folder, dtype=torch.bfloat16).to(device)
    engine = EmbeddedEngine(loaded, model.spec, engine_id="engine", max_running=1)
    report = _publish(plan, on_device, engine, platform.device(), engine.held_dtypes())
    # Raises if the checksums of both sides differ.
    engine.verify({name: value for name, value in report.checksums.items() if value is not None})
    version = engine.handshake().policy_version
    return [
        _equal(f"published tensors, {len(plan.buckets)} buckets", here.tensors.items(), there.tensors.items()),
        Result("version that the engine holds after the comparison of checksums", version, "== 1", version == 1),
        Result("publication to an engine", report.seconds, unit="s"),
        Result("publication to an engine: bytes", report.total_bytes / 2**20, unit="MiB"),
    ]


def _publish(
    plan: SyncPlan,
    shards: Mapping[str, Tensor],
    sink: Any,
    device: torch.device,
    dtypes: Mapping[str, str] | None = None,
) -> PublishReport:
    peers = Peers(0, device, STEP_SECONDS)
    update = WeightUpdate(1, UpdateKind.FULL, plan.tensors())
    return Publisher(plan, SenderGather(plan, peers), peers, sink).publish(shards, update, dtypes)


def _sender_group(device: str) -> list[Result]:
    # A piece may take a quarter of the time.
    options = GroupOptions(LOOPBACK, dist.get_backend(), platform.device(), 4 * STEP_SECONDS)
    group = SenderGroup(options, [])
    group.form()
    results = [Result("group of a sender without receivers, formed", 1, "== 1")]
    if device == "cuda":
        bucket = torch.arange(BUCKET_BYTES[device], device=device).to(torch.uint8)
        kept = bucket.clone()
        asyncio.run(group.push(bucket))
        results.append(_equal("bucket broadcast in it", [("bucket", bucket)], [("bucket", kept)]))
    _leave(group)
    return results


def _leave(group: SenderGroup) -> None:
    """Waits for the thread that gives the group up: this rank leaves its own groups next."""
    before = set(threading.enumerate())
    group.leave()
    for thread in set(threading.enumerate()) - before:
        thread.join(STEP_SECONDS)


def _equal(name: str, found: Iterable[tuple[str, Tensor]], wanted: Iterable[tuple[str, Tensor]]) -> Result:
    """Tensors that are missing, unknown, or not the same bit for bit."""
    mine, other = dict(found), dict(wanted)
    wrong = len(mine.keys() ^ other.keys())
    wrong += sum(not torch.equal(mine[key], other[key]) for key in mine.keys() & other.keys())
    return Result(f"{name}: tensors that differ, of {len(other)}", wrong, "== 0", wrong == 0, "tensors")
