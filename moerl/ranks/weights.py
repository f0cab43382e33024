"""A rank's part of weight updates: the plan of a run, its way of gathering, its way to the engine.

Runs in every trainer rank. The controller leads (`moerl.ranks.updates`): it begins the engine's update, has ranks
publish, and ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from moerl.config.ranks import RankConfig
from moerl.config.rollouts import ServedRolloutConfig
from moerl.contract.commands import KeepWeights, Publish, ReceiverAddress, Reply, Resend, SyncCommand
from moerl.contract.ports import PolicyEngine, WeightSink
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import WeightSyncError
from moerl.models.description import ModelDescription
from moerl.rollout.fleet.servers_sink import ServersSink
from moerl.rollout.pushed import PushingSink
from moerl.rollout.server_kinds import SERVER_KINDS
from moerl.trainer import platform
from moerl.trainer.collectives import all_gather_bytes
from moerl.trainer.trainer import MegatronTrainer
from moerl.weights.allgather import AllGather
from moerl.weights.disk import DiskSink
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import encode_shards, merge_shards
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, make_plan
from moerl.weights.publish import Publisher

FOLDER = "weights"
"""Folder in the run directory for versions on disk."""


class EngineHere:
    """A `WeightSink` for an engine in this process. The controller begins and ends the engine's update."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    def begin_update(self, update: WeightUpdate) -> None:
        """Does nothing: the controller has begun the engine's update."""

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._engine.receive(tensors)

    def end_update(self) -> None:
        """Does nothing: the controller ends the engine's update."""

    def abandon_update(self) -> None:
        """Does nothing: the controller abandons the engine's update."""


class WeightSync:
    """Publisher of versions of one policy, by the section `weights` of the configuration. Built on all ranks together.

    Args:
        config: of the run, as ranks read it.
        model: the policy's, of a Hugging Face directory.
        engine: gets the weights, in this process; None if the engine is in another one.
        receiver: of the engine's process, if senders push there.

    Attributes:
        version: the last one published; 0 before the first.
        tensors: shapes of all tensors that the ranks publish, by checkpoint name.
    """

    def __init__(
        self,
        config: RankConfig,
        model: ModelDescription,
        trainer: MegatronTrainer,
        engine: PolicyEngine | None,
        receiver: ReceiverAddress | None,
    ) -> None:
        self._trainer, self.version = trainer, 0
        rank = trainer.layout.rank
        peers = Peers(rank, platform.device(), config.weights.step_seconds)
        options = PlanOptions.of(config.weights, trainer.layout.dims, config.model.element_bytes)
        published = all_gather_bytes(encode_shards(trainer.shards()))
        plan = make_plan(merge_shards(model, trainer.layout.dims, published), options)
        gatherer = (SenderGather if options.gather == "sender" else AllGather)(plan, peers)
        self._sink: WeightSink | None = None
        if rank in options.senders:
            self._sink = _sink(config, rank, options.senders, engine, receiver)
        name = f"folder '{FOLDER}'" if config.weights.transport == "disk" else "the engine"
        self.tensors = plan.tensors()
        self._publisher = Publisher(plan, gatherer, peers, self._sink, name)

    def run(self, command: SyncCommand) -> Reply:
        """Runs one command; with `Publish` a collective, which raises as `Publisher.publish`.

        Raises:
            WeightSyncError: the buckets that are kept are not those to send, or a step takes too long.
        """
        servers = self._sink if isinstance(self._sink, ServersSink) else None
        match command:
            case Publish():
                self.version = command.version
                if servers is not None:
                    servers.targets = command.targets
                update = WeightUpdate(command.version, command.kind, self.tensors)
                report = self._publisher.publish(self._trainer.shards(), update, command.dtypes)
                failed = {} if servers is None else servers.failed()
                return Reply(metrics=report.metrics(), checksums=dict(report.checksums), failed=failed)
            case KeepWeights() if servers is not None:
                self._publisher.ask_sink("keep", partial(servers.keep, command.version))
            case Resend() if servers is not None:
                ask = self._publisher.ask_sink
                kept = ask("resend", partial(servers.kept, command.version, command.targets))
                for number, bucket in enumerate(kept):
                    ask(f"resend: bucket {number}", partial(servers.resend, bucket, command.targets))
                return Reply(failed=servers.failed())
            case _:
                pass
        return Reply()

    def close(self) -> None:
        """Leaves the engine's servers; ignores errors of servers that cannot be reached."""
        if isinstance(self._sink, ServersSink):
            with contextlib.suppress(WeightSyncError):
                self._publisher.ask_sink("close", self._sink.close)


def _sink(
    config: RankConfig, rank: int, senders: Sequence[int], engine: PolicyEngine | None, receiver: ReceiverAddress | None
) -> WeightSink:
    """Returns the sink to which the sender `rank` hands its part of the weights."""
    if config.weights.transport == "disk":
        return DiskSink(config.run_dir / FOLDER, rank=rank, senders=senders)
    rollout = config.rollout
    if isinstance(rollout, ServedRolloutConfig):
        kind = SERVER_KINDS[rollout.kind]
        # Asked here: channels are opened in the sink's thread, and a thread that has set no GPU has the first one.
        device = platform.device()
        return ServersSink(
            lambda target: kind.open_channel(target, device),
            config.weights.bucket_bytes,
            keeps_copy=rollout.keeps_weight_copy,
            together=len(senders) == 1,
        )
    if receiver is not None:
        return PushingSink(receiver)
    assert engine is not None, "a sender without an engine or a receiver"
    return EngineHere(engine)
