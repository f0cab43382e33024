"""``moerl plan weights``: bytes that each process moves in a weight update, and how long that takes. Torch-free.

The schedule is that of `moerl.weights.plan`, the time that of `moerl.weights.estimate`; this module prints them.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from moerl.config.checks import describe_model
from moerl.config.rollout_checks import require_engine
from moerl.config.rollouts import EmbeddedRolloutConfig
from moerl.config.schema import RunConfig
from moerl.machine.layouts import as_overrides
from moerl.rollout.sglang.invitation import PIECE_BYTES
from moerl.weights.estimate import Bandwidths, SenderLoad, Servers, sender_loads, sent_bytes
from moerl.weights.manifest import model_manifest
from moerl.weights.plan import PlanOptions, SyncPlan, make_plan

GB = 10**9
_SHOWN = 16
"""Senders in the table; of more than that the slowest ones."""


def plan_weights(config: RunConfig, bandwidths: Bandwidths) -> int:
    """Prints the plan; returns exit status 0. Raises `ConfigError` if the run has no engine."""
    require_engine(config, "moerl plan weights")
    dims = config.parallel.dims
    plan = make_plan(model_manifest(describe_model(config), dims), PlanOptions.of(config))
    num_servers = _num_servers(config)
    loads = sender_loads(plan, bandwidths, Servers(max(1, num_servers), PIECE_BYTES))
    console = Console(soft_wrap=True, highlight=False)
    total = sum(load.num_bytes for load in loads)
    num_tensors = sum(len(bucket.entries) for bucket in plan.buckets)
    console.print(
        f"{num_tensors} tensors of {total / GB:.1f} GB ({config.model.dtype}) on {dims.world_size} devices:"
        f" {as_overrides(dims)}"
    )
    console.print(_buckets_table(plan))
    console.print(_senders_table(loads))
    sent = sent_bytes(plan)
    if sent:
        rank, most = max(sent.items(), key=lambda item: item[1])
        console.print(f"{len(sent)} ranks hand parts to senders, at most {most / GB:.2f} GB (rank {rank})")
    slowest = max(loads, key=lambda load: load.seconds)
    taking_seconds = total / bandwidths.engine if num_servers else 0.0
    console.print(
        f"{max(slowest.seconds, taking_seconds):.2f} s at {bandwidths.gather / GB:g} GB/s into a sender and"
        f" {bandwidths.engine / GB:g} GB/s to engines; {slowest.send_seconds:.2f} s of sending,"
        f" {slowest.gather_seconds:.2f} s of gathering beside it"
    )
    if num_servers:
        console.print(
            f"{num_servers} server{'s' * (num_servers > 1)}: each takes {total / GB:.1f} GB over its own link, one"
            f" bucket at a time, {taking_seconds:.2f} s"
        )
    memory = 2 * max(config.weights.bucket_bytes, plan.largest_bucket_bytes)
    console.print(f"extra memory of a sender: at most {memory / GB:.2f} GB (two buckets)")
    console.print(_host_copy(config, loads))
    return 0


def update_seconds(config: RunConfig, bandwidths: Bandwidths) -> float:
    """Returns how many seconds a weight update takes, by the same plan."""
    plan = make_plan(model_manifest(describe_model(config), config.parallel.dims), PlanOptions.of(config))
    num_servers = _num_servers(config)
    loads = sender_loads(plan, bandwidths, Servers(max(1, num_servers), PIECE_BYTES))
    taking = sum(load.num_bytes for load in loads) / bandwidths.engine if num_servers else 0.0
    return max(taking, *(load.seconds for load in loads))


def _num_servers(config: RunConfig) -> int:
    """Returns how many servers weights are sent to; 0 if they go through a disk, or to the embedded engine."""
    return 0 if config.weights.transport == "disk" else config.rollout.num_servers


def _host_copy(config: RunConfig, loads: list[SenderLoad]) -> str:
    """Says how much host memory the copies of the weights for late servers need: in the sender that sends most, or in
    the engine's process if weights go through a disk."""
    if isinstance(config.rollout, EmbeddedRolloutConfig):
        return "host copies of the weights: none (no servers)"
    if not config.rollout.keeps_weight_copy:
        return "host copies of the weights: none (one server that the run cannot start again)"
    through_disk = config.weights.transport == "disk"
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
    counts: Counter[str] = Counter()
    for bucket in plan.buckets:
        counts[bucket.kind] += 1
    for kind in counts:
        buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        largest = max(bucket.num_bytes for bucket in buckets)
        num_tensors = sum(len(bucket.entries) for bucket in buckets)
        table.add_row(kind, str(counts[kind]), str(num_tensors), f"{num_bytes / GB:.2f}", f"{largest / 1e6:.1f}")
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
