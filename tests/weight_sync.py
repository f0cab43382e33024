"""Weight updates in ranks: gathered by our plans, against Megatron-Bridge's own export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.contract.weight_update import UpdateKind, WeightUpdate

BUCKET_BYTES = 1 << 15


class KeepingSink:
    """Keeps copies of what it is given; `problem` is raised at the named tensor."""

    def __init__(self, problem: Exception | None = None, at: str = "") -> None:
        self.problem, self.at = problem, at
        self.tensors: dict[str, Tensor] = {}
        self.calls: list[str] = []

    def begin_update(self, update: WeightUpdate) -> None:
        self.calls.append(f"begin {update.version}")
        self.tensors = {}

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.calls.append("bucket")
        for name, tensor in tensors:
            if name == self.at and self.problem is not None:
                raise self.problem
            assert name not in self.tensors
            self.tensors[name] = tensor.clone()

    def abandon_update(self) -> None:
        """Keeps the received tensors for the test to look at."""

    def end_update(self) -> None:
        self.calls.append("end")


def plan_for(
    trainer: Any, path: Path, *, senders: int = 1, gather: str = "sender", bucket_bytes: int = BUCKET_BYTES
) -> Any:
    """The plan of a trainer's layout and model, from its config.json as it is on disk."""
    from moerl.models.description import read_model
    from moerl.trainer.collectives import all_gather_bytes
    from moerl.weights.manifest import encode_shards, merge_shards
    from moerl.weights.plan import PlanOptions, choose_senders, make_plan

    dims = trainer.layout.dims
    item_bytes = {"float32": 4, "bfloat16": 2}[trainer.options.dtype]
    options = PlanOptions(
        choose_senders(dims, senders),
        item_bytes,
        bucket_bytes,
        gather,  # pyright: ignore[reportArgumentType]
    )
    published = all_gather_bytes(encode_shards(trainer.shards()))
    return make_plan(merge_shards(read_model(path), dims, published), options)


def peers_of(rank: int, step_seconds: float = 60.0) -> Any:
    from moerl.weights.peers import Peers

    return Peers(rank, torch.device("cpu"), step_seconds)


def publisher_of(plan: Any, rank: int, sink: Any, gatherer: Any = None, step_seconds: float = 60.0) -> Any:
    """gatherer: a class in place of the one that the plan is for."""
    from moerl.weights.allgather import AllGather
    from moerl.weights.gather import SenderGather
    from moerl.weights.publish import Publisher

    peers = peers_of(rank, step_seconds)
    kind = gatherer or (SenderGather if plan.options.gather == "sender" else AllGather)
    return Publisher(plan, kind(plan, peers), peers, sink)


def publish(trainer: Any, plan: Any, sink: Any, version: int = 0) -> Any:
    """Publishes to a sink, an engine's or another, as `publish_checked`."""
    publisher = publisher_of(plan, trainer.layout.rank, sink)
    return publish_checked(publisher, trainer.shards(), update_of(plan, version), sink)


def update_of(plan: Any, version: int) -> WeightUpdate:
    """The update that brings the tensors of a plan."""
    return WeightUpdate(version, UpdateKind.FULL, plan.tensors())


def publish_checked(publisher: Any, shards: Any, update: WeightUpdate, sink: Any, *, verify: bool = True) -> Any:
    """Publishes to a sink and has it compare what it then holds with the checksums of what was sent, if it can."""
    from moerl.contract.ports import CheckedSink

    dtypes = sink.held_dtypes() if verify and isinstance(sink, CheckedSink) else None
    report = publisher.publish(shards, update, dtypes)
    if dtypes is not None:
        sink.verify(report.checksums)
    return report
