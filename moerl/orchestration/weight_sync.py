"""The trainer's weights into the engine: the plan of a run, its way of gathering, its transport.

Runs in every trainer rank; the first one hosts the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.config.schema import RunConfig
from moerl.contract.ports import CheckedSink, InterruptCosts, PolicyEngine, WeightSink
from moerl.kernels.checksum import checksums
from moerl.models.description import ModelDescription
from moerl.orchestration.engines import several_roots
from moerl.trainer import platform
from moerl.trainer.shards import splits_latents
from moerl.trainer.trainer import MegatronTrainer
from moerl.weights.allgather import AllGather
from moerl.weights.disk import DiskSink, read_version
from moerl.weights.gather import RootGather
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, make_plan
from moerl.weights.publish import Publisher

FOLDER = "weights"
"""In the run directory: versions on disk."""


class ThroughDisk:
    """A sink that writes versions to disk and has an engine read them from there, hashes checked.

    What the engine holds is compared with all that was read: other roots wrote a part of it.
    """

    def __init__(self, folder: Path, disk: DiskSink, engine: CheckedSink) -> None:
        self._folder, self._disk, self._engine, self._version = folder, disk, engine, -1
        self._dtypes: Mapping[str, str] = {}
        self._read: dict[str, int] = {}

    def begin_update(self, version: int) -> None:
        self._version = version
        self._disk.begin_update(version)

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._disk.receive(tensors)

    def end_update(self) -> None:
        self._disk.end_update()
        self._engine.begin_update(self._version)
        self._engine.receive(self._tensors())
        self._engine.end_update()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_version(self._folder, self._version):
            if name in self._dtypes:
                self._read |= checksums([(name, tensor.to(getattr(torch, self._dtypes[name])))])
            yield name, tensor

    def abandon_update(self) -> None:
        self._disk.abandon_update()
        self._engine.abandon_update()

    def held_dtypes(self) -> Mapping[str, str]:
        self._dtypes, self._read = self._engine.held_dtypes(), {}
        return self._dtypes

    def verify(self, sent: Mapping[str, int]) -> None:
        self._dtypes = {}
        self._engine.verify(self._read | dict(sent))


class WeightSync:
    """Publishes versions of one policy as `weights` of the configuration says. Built on all ranks together.

    Args:
        config: of the run.
        model: the policy's, of a Hugging Face directory.
        engine: takes the weights; None on ranks that do not host it.
    """

    def __init__(
        self, config: RunConfig, model: ModelDescription, trainer: MegatronTrainer, engine: PolicyEngine | None
    ) -> None:
        self._trainer, self._verify = trainer, config.weights.verify
        rank = trainer.layout.rank
        peers = Peers(rank, platform.device(), config.weights.step_seconds)
        options = PlanOptions.of(config, split_latents=splits_latents(trainer.model.chunks))
        plan = make_plan(model, config.parallel.dims, options)
        gatherer = (RootGather if options.gather == "root" else AllGather)(plan, peers)
        sink: WeightSink | None = engine
        if config.weights.transport == "disk" and rank in options.roots:
            folder = config.run_dir / FOLDER
            disk = DiskSink(folder, rank=rank, roots=options.roots)
            sink = disk if engine is None else ThroughDisk(folder, disk, engine)
        elif len(options.roots) > 1:
            sink = several_roots(engine, rank, options.roots, model, config.weights.step_seconds)
        elsewhere = f"folder '{FOLDER}'" if config.weights.transport == "disk" else "the servers' sink"
        name = elsewhere if engine is None else f"engine '{engine.handshake().engine_id}'"
        self._costs = InterruptCosts() if engine is None else engine.costs
        self._publisher = Publisher(plan, gatherer, peers, sink, name)
        self._count = 0

    def publish(self, version: int) -> dict[str, float]:
        """Brings the trainer's weights to the engine; returns metrics. A collective; raises as `Publisher.publish`."""
        before = replace(self._costs)
        self._count += 1
        verify = self._verify == "every" or (isinstance(self._verify, int) and self._count % self._verify == 0)
        metrics = self._publisher.publish(self._trainer.shards(), version, verify=verify).metrics()
        return metrics | {
            f"weights/{field.name}": getattr(self._costs, field.name) - getattr(before, field.name)
            for field in fields(before)
        }
