"""``moerl plan memory``: memory that a run fills on GPUs and hosts, before it asks for a machine. Torch-free; a login
node.

The numbers are worked out in `moerl.machine.memory` and `moerl.config.run_memory`; this module prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from moerl.config.architecture import describe_model
from moerl.config.checks import layout_load
from moerl.config.run_memory import GIB, MemoryPlace, checkpoint_bytes, fits_with, places
from moerl.config.schema import ModelConfig
from moerl.config.training import TrainerConfig
from moerl.contract.parallel import ParallelDims
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.listed import look
from moerl.machine.layouts import as_overrides, nearest_layouts
from moerl.machine.memory import USABLE_SHARE, RankMemory, heaviest_rank, total_parameters
from moerl.machine.residence import MOMENTS_OF_A_RUN


def plan_memory(facts: Facts) -> int:
    """Prints what the fullest GPUs and the fullest host have in memory; returns 0 if all of it fits, 1 if not.

    Args:
        facts: of the door "plan", with a machine; for a run on CPUs it has no GPUs.
    """
    config, machine = facts.config, facts.machine
    assert machine is not None
    sizes, dims, needs = describe_model(config.model), config.parallel.dims, config.rank_needs()
    rank = heaviest_rank(sizes, dims, needs)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{total_parameters(sizes) / 1e9:.1f}B parameters on {dims.world_size} devices: {as_overrides(dims)}\n"
        f"{needs.microbatch_tokens} rows per microbatch, {config.model.dtype}, recompute {config.trainer.recompute},"
        f" distributed optimizer {config.trainer.distributed_optimizer},"
        f" {config.trainer.optimizer_offload:.0%} of its state in host memory"
    )
    console.print(_table(rank, dims))
    console.print(_places_table(places(config, machine)))
    num_bytes = checkpoint_bytes(config)
    console.print(f"a checkpoint: {num_bytes / 1e9:.1f} GB; {num_bytes / 1e9:,.0f} s at 1 GB/s of disk")
    found = look(facts)
    for check in found:
        if check.level == "yellow":
            console.print(f"note: {check.name}: {check.seen}; remedy: {check.remedy}", markup=False)
        elif check.level == "red":
            console.print(
                f"does not fit: {check.seen}; expected: {check.expected}; remedy: {check.remedy}", markup=False
            )
    if any(check.level == "red" and check.name == "memory of GPUs" for check in found):
        fits = partial(fits_with, config, machine)
        near = nearest_layouts(dims, sizes, layout_load(config), world_size=dims.world_size, accept=fits)
        for other in near:
            gib = heaviest_rank(sizes, other, needs).total_bytes / GIB
            console.print(f"  a rank of {gib:.1f} GiB fits: {as_overrides(other, dims)}")
        if not near:
            console.print(f"  no layout of {dims.world_size} devices fits: {_ways_out(config.model, config.trainer)}")
    return 1 if any(check.level == "red" for check in found) else 0


def _ways_out(model: ModelConfig, trainer: TrainerConfig) -> str:
    """Lists, for a message, settings that need less memory on a device and are not in force yet."""
    helps = {
        "take more of them": True,
        "model.dtype=bfloat16": model.dtype != "bfloat16",
        "trainer.recompute=full": trainer.recompute != "full",
        "trainer.distributed_optimizer=on": trainer.distributed_optimizer != "on",
        "trainer.optimizer_offload=1": trainer.optimizer_offload < 1,
    }
    return ", ".join(way for way in helps if helps[way]) + " or a smaller trainer.microbatch_tokens"


def _table(rank: RankMemory, dims: ParallelDims) -> Table:
    stage = f", pipeline stage {rank.stage} of {dims.pipeline}" if dims.pipeline > 1 else ""
    table = Table(title=f"heaviest rank{stage}", title_justify="left")
    table.add_column("what")
    table.add_column("parameters", justify="right")
    table.add_column("GiB", justify="right")
    for name, count in rank.parameters.items():
        if count:
            table.add_row(name, f"{count / 1e6:,.1f}M", "")
    table.add_section()
    for name, size in rank.bytes.items():
        if size:
            table.add_row(name, "", f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("total", f"{sum(rank.parameters.values()) / 1e6:,.1f}M", f"{rank.total_bytes / GIB:.2f}")
    return table


def _places_table(found: Sequence[MemoryPlace]) -> Table:
    """Makes the table of what the fullest GPUs and the fullest host have in memory at each moment of a run."""
    table = Table(title="the fullest GPU of each kind, and the fullest host, GiB", title_justify="left")
    for title in ("where", "what", *MOMENTS_OF_A_RUN, "may be filled"):
        table.add_column(title, justify="left" if title in ("where", "what") else "right")
    for place in found:
        table.add_section()
        for each in place.holdings:
            sizes = (f"{each.num_bytes / GIB:.2f}" if m in each.moments else "" for m in MOMENTS_OF_A_RUN)
            table.add_row(place.name, each.what, *sizes, "")
        room = "not known" if place.room_bytes is None else f"{USABLE_SHARE * place.room_bytes / GIB:.1f}"
        table.add_row(place.name, "total", *(f"{place.at(m) / GIB:.2f}" for m in MOMENTS_OF_A_RUN), room)
    return table
