"""``moerl plan weights``: bytes that each process moves in a weight update, and how long that takes. Torch-free.

The schedule is that of `moerl.weights.plan`, the time that of `moerl.weights.estimate`; this module prints them.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moerl.config.architecture import describe_model
from moerl.config.rollout_checks import require_engine
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig
from moerl.config.schema import ModelConfig, ParallelConfig, WeightsConfig
from moerl.machine.layouts import as_overrides
from moerl.rollout.sglang.invitation import PIECE_BYTES
from moerl.weights.estimate import Bandwidths, SenderLoad, sender_loads, sent_bytes
from moerl.weights.manifest import model_manifest
from moerl.weights.plan import PlanOptions, SyncPlan, make_plan

GB = 10**9
_SHOWN = 16
"""Senders in the table; of more than that the slowest ones."""


class PlannedUpdate:
    """A weight update of a run, worked out from sections of its configuration.

    Attributes:
        seconds: time that the update takes.

    Raises:
        ConfigError: the run has no engine.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        weights: WeightsConfig,
        rollout: RolloutConfig,
        bandwidths: Bandwidths,
    ) -> None:
        require_engine(rollout, "moerl plan weights")
        self._model, self._dims, self._weights, self._rollout = model, parallel.dims, weights, rollout
        self._bandwidths = bandwidths
        options = PlanOptions.of(weights, parallel.dims, model.element_bytes)
        self._plan = make_plan(model_manifest(describe_model(model), parallel.dims), options)
        # None are sent to if weights go through a disk, or to the embedded engine.
        self._num_servers = 0 if weights.transport == "disk" else rollout.num_servers
        self._loads = sender_loads(self._plan, bandwidths, max(1, self._num_servers), PIECE_BYTES)
        self._total = sum(load.num_bytes for load in self._loads)
        self._taking = self._total / bandwidths.engine if self._num_servers else 0.0
        self.seconds = max(self._taking, *(load.seconds for load in self._loads))

    def show(self) -> int:
        """Prints the plan; returns exit status 0."""
        plan, loads, total, bandwidths = self._plan, self._loads, self._total, self._bandwidths
        num_servers = self._num_servers
        console = Console(soft_wrap=True, highlight=False)
        num_tensors = sum(len(bucket.entries) for bucket in plan.buckets)
        console.print(
            f"{num_tensors} tensors of {total / GB:.1f} GB ({self._model.dtype}) on {self._dims.world_size} devices:"
            f" {as_overrides(self._dims)}"
        )
        console.print(_buckets_table(plan))
        console.print(_senders_table(loads))
        sent = sent_bytes(plan)
        if sent:
            rank, most = max(sent.items(), key=lambda item: item[1])
            console.print(f"{len(sent)} ranks hand parts to senders, at most {most / GB:.2f} GB (rank {rank})")
        slowest = max(loads, key=lambda load: load.seconds)
        console.print(
            f"{self.seconds:.2f} s at {bandwidths.gather / GB:g} GB/s into a sender and"
            f" {bandwidths.engine / GB:g} GB/s to engines; {slowest.send_seconds:.2f} s of sending,"
            f" {slowest.gather_seconds:.2f} s of gathering at the same time"
        )
        if num_servers:
            console.print(
                f"{num_servers} server{'s' * (num_servers > 1)}: each takes {total / GB:.1f} GB over its own link, one"
                f" bucket at a time, {self._taking:.2f} s"
            )
        memory = 2 * max(self._weights.bucket_bytes, plan.largest_bucket_bytes)
        console.print(f"extra memory of a sender: at most {memory / GB:.2f} GB (two buckets)")
        console.print(_host_copy(self._rollout, loads, through_disk=self._weights.transport == "disk"))
        return 0


def _host_copy(rollout: RolloutConfig, loads: list[SenderLoad], *, through_disk: bool) -> str:
    """Says how much host memory the copies of the weights for late servers need: in the sender that sends most, or in
    the engine's process if weights go through a disk."""
    if isinstance(rollout, EmbeddedRolloutConfig):
        return "host copies of the weights: none (no servers)"
    if not rollout.keeps_weight_copy:
        return "host copies of the weights: none (one server that the run cannot start again)"
    largest = sum(load.num_bytes for load in loads) if through_disk else max(load.num_bytes for load in loads)
    rank = "the engine's process" if through_disk else "the sender that sends most"
    return (
        f"host copies of the weights for servers that come late: {largest / GB:.2f} GB in {rank}, twice that while an"
        " update is sent"
    )


def _buckets_table(plan: SyncPlan) -> Table:
    table = Table(title="buckets", title_justify="left")
    for heading in ("kind", "buckets", "tensors", "GB", "largest, MB"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in dict.fromkeys(bucket.kind for bucket in plan.buckets):
        buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        largest = max(bucket.num_bytes for bucket in buckets)
        num_tensors = sum(len(bucket.entries) for bucket in buckets)
        table.add_row(kind, str(len(buckets)), str(num_tensors), f"{num_bytes / GB:.2f}", f"{largest / 1e6:.1f}")
    return table


def _senders_table(loads: list[SenderLoad]) -> Table:
    shown = sorted(loads, key=lambda load: -load.seconds)[:_SHOWN]
    more = f", the slowest {_SHOWN} of {len(loads)}" if len(loads) > _SHOWN else ""
    table = Table(title=f"senders{more}", title_justify="left")
    for heading in ("rank", "buckets", "to engines, GB", "received, GB", "seconds"):
        table.add_column(heading, justify="right")
    for load in sorted(shown, key=lambda load: load.rank):
        table.add_row(
            str(load.rank),
            str(load.num_buckets),
            f"{load.num_bytes / GB:.2f}",
            f"{load.received_bytes / GB:.2f}",
            f"{load.seconds:.3f}",
        )
    return table
