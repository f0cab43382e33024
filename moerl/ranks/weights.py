"""The trainer's weights into the engine: the plan of a run, its way of gathering, its transport.

Runs in every trainer rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from moerl.config.schema import RunConfig
from moerl.contract.ports import CheckedSink, WeightSink
from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.models.description import ModelDescription
from moerl.rollout.beside.shared import SharedMemory, Written, encode_written
from moerl.rollout.fleet.senders import Introduction
from moerl.rollout.fleet.shard_sender import ShardSender
from moerl.rollout.sglang.channel import open_channel
from moerl.trainer import platform
from moerl.trainer.collectives import all_gather_bytes
from moerl.trainer.hf_directory import checkpoint_shapes
from moerl.trainer.trainer import MegatronTrainer
from moerl.weights.allgather import AllGather
from moerl.weights.disk import DiskSink, read_version
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import encode_shards, merge_shards
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, make_plan
from moerl.weights.publish import Publisher
from moerl.weights.remote import RemoteSink, SinkAddress

FOLDER = "weights"
"""In the run directory: versions on disk."""
SENDER_SHARE = 0.75
"""Of `weights.step_seconds`: longer than a step of a server, shorter than one of the trainer's, whose errors name no
sender."""


class ThroughDisk:
    """A sink that writes versions to disk and has an engine read them from there, hashes checked.

    What the engine holds is compared with all that was read: other senders wrote a part of it.
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


class ThroughMemory:
    """A sink that writes tensors where an engine on this machine reads them; all else goes over a connection."""

    def __init__(self, engine: RemoteSink, memory: SharedMemory) -> None:
        self._engine, self._memory, self._is_free = engine, memory, True

    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        if not self._is_free:
            self._engine.wait()
        self._is_free = False
        places = self._memory.put(tensors)
        self._engine.receive_written(encode_written(Written(places, self._memory.num_bytes)))

    def end_update(self) -> None:
        self._engine.end_update()
        # Before the next update begins, the trainer waits for this one.
        self._is_free = True

    def abandon_update(self) -> None:
        self._engine.abandon_update()

    def held_dtypes(self) -> Mapping[str, str]:
        return self._engine.held_dtypes()

    def verify(self, sent: Mapping[str, int]) -> None:
        self._engine.verify(sent)


class EngineAndSender:
    """A `CheckedSink` of the rank whose process also holds the engine: it begins and ends the engine's updates around
    its own part.

    The trainer must end the updates of all other senders before this one's.
    """

    def __init__(self, engine: CheckedSink, sender: ShardSender) -> None:
        self._engine, self._sender = engine, sender

    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)
        self._sender.begin_update(version)

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._sender.receive(tensors)

    def end_update(self) -> None:
        self._sender.end_update()
        self._engine.end_update()

    def abandon_update(self) -> None:
        self._sender.abandon_update()
        self._engine.abandon_update()

    def held_dtypes(self) -> Mapping[str, str]:
        return self._engine.held_dtypes()

    def verify(self, sent: Mapping[str, int]) -> None:
        self._engine.verify(sent)


class WeightSync:
    """Publishes versions of one policy as `weights` of the configuration says. Built on all ranks together.

    Args:
        config: of the run.
        model: the policy's, of a Hugging Face directory.
        engine: takes the weights, in this process; None on other ranks.
        links: how senders in other processes reach the engine.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelDescription,
        trainer: MegatronTrainer,
        engine: CheckedSink | None,
        links: EngineLinks,
    ) -> None:
        self._trainer, self._sleeps = trainer, config.trainer.sleep
        rank = trainer.layout.rank
        peers = Peers(rank, platform.device(), config.weights.step_seconds)
        options = PlanOptions.of(config)
        published = all_gather_bytes(encode_shards(trainer.shards()))
        plan = make_plan(merge_shards(model, trainer.layout.dims, published), options)
        gatherer = (SenderGather if options.gather == "sender" else AllGather)(plan, peers)
        sink = None
        if rank in options.senders:
            sink = _sink(config, model, rank, options.senders, engine, links)
        name = f"folder '{FOLDER}'" if config.weights.transport == "disk" else "the engine"
        self._publisher = Publisher(plan, gatherer, peers, sink, name)

    def publish(self, version: int, *, verify: bool, reference: MegatronTrainer | None) -> dict[str, float]:
        """Brings the trainer's weights to the engine; returns metrics. A collective; raises as `Publisher.publish`.

        Args:
            reference: rests with the trainer from the end of sending on, if `trainer.sleep` is true.
        """
        resting = [each for each in (self._trainer, reference) if each is not None and self._sleeps]

        def left() -> None:
            for each in resting:
                each.rest()

        after = left if resting else None
        return self._publisher.publish(self._trainer.shards(), version, verify=verify, left=after).metrics()


class EngineLinks(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How senders in other processes reach the engine.

    engine: for the first of them, which begins and ends updates. memory: file that it writes tensors to, where the
    engine reads them there; empty where they go over the connection. servers: for all of them where the engine has
    servers of its own, to which they send side by side; None where weights go to the engine's process, or through the
    disk.
    """

    engine: SinkAddress | None = None
    memory: str = ""
    servers: Introduction | None = None


def _sink(
    config: RunConfig,
    model: ModelDescription,
    rank: int,
    senders: Sequence[int],
    engine: CheckedSink | None,
    links: EngineLinks,
) -> WeightSink:
    """Where the sender `rank` hands its part of the weights."""
    is_first = rank == senders[0]
    if is_first and links.engine is not None:
        engine = remote = RemoteSink(links.engine)
        if links.memory:
            engine = ThroughMemory(remote, _memory_of_engine(links.memory))
    if config.weights.transport == "disk":
        folder = config.run_dir / FOLDER
        disk = DiskSink(folder, rank=rank, senders=senders)
        return disk if not is_first or engine is None else ThroughDisk(folder, disk, engine)
    if links.servers is None:
        assert engine is not None
        return engine
    assert model.folder is not None
    shapes = checkpoint_shapes(model.folder, model.hf_config)
    seconds = SENDER_SHARE * config.weights.step_seconds
    sender = ShardSender(rank, links.servers, shapes, partial(open_channel, device=platform.device()), seconds)
    return EngineAndSender(engine, sender) if is_first and engine is not None else sender


def _memory_of_engine(path: str) -> SharedMemory:
    try:
        return SharedMemory.of(path)
    except OSError as error:
        raise WeightSyncError(
            "weights: this rank cannot open the memory of the engine beside it",
            seen=str(error),
            expected="a file under /proc that processes of one user can open",
            remedy="mount /proc, and let this user see its own processes there",
        ) from error
