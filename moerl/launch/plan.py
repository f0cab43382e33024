"""``moerl plan memory``: what a rank of a layout has to hold, before a machine is asked for. Torch-free; a login node.

The numbers are worked out in `moerl.config.memory`; this module prints them.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moerl.config.checks import describe_model, layout_load
from moerl.config.layouts import as_overrides, nearest_layouts
from moerl.config.memory import USABLE_SHARE, RankMemory, heaviest_rank, needs_of, total_parameters
from moerl.config.schema import RunConfig
from moerl.contract.parallel import ParallelDims

GIB = 2**30


def plan_memory(config: RunConfig, *, gpu_memory_gib: float) -> int:
    """Prints the memory of the heaviest rank; exit status 0 where it fits a device of `gpu_memory_gib`, 1 where not."""
    sizes, dims, needs = describe_model(config), config.parallel.dims, needs_of(config)
    rank = heaviest_rank(sizes, dims, needs)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{total_parameters(sizes) / 1e9:.1f}B parameters on {dims.world_size} devices: {as_overrides(dims)}\n"
        f"{needs.microbatch_tokens} rows per microbatch, {config.model.dtype}, recompute {config.trainer.recompute},"
        f" distributed optimizer {config.trainer.distributed_optimizer}"
    )
    console.print(_table(rank, dims))
    usable = USABLE_SHARE * gpu_memory_gib
    total = rank.total_bytes / GIB
    if rank.fits(gpu_memory_gib * GIB):
        console.print(f"fits: {total:.1f} GiB of the {usable:.1f} GiB that may be filled of {gpu_memory_gib:g} GiB")
        return 0
    console.print(f"does not fit: {total:.1f} GiB, and {usable:.1f} GiB may be filled of {gpu_memory_gib:g} GiB")
    near = nearest_layouts(
        dims,
        sizes,
        layout_load(config),
        world_size=dims.world_size,
        accept=lambda other: heaviest_rank(sizes, other, needs).fits(gpu_memory_gib * GIB),
    )
    for other in near:
        gib = heaviest_rank(sizes, other, needs).total_bytes / GIB
        console.print(f"  fits with {gib:.1f} GiB: {as_overrides(other, dims)}")
    if not near:
        console.print(f"  no layout of {dims.world_size} devices fits: {_ways_out(config)}")
    return 1


def _ways_out(config: RunConfig) -> str:
    """What takes less memory and is not in force yet."""
    trainer, ways = config.trainer, ["take more of them"]
    if config.model.dtype != "bfloat16":
        ways.append("model.dtype=bfloat16")
    if trainer.recompute != "full":
        ways.append("trainer.recompute=full")
    if trainer.distributed_optimizer == "off":
        ways.append("trainer.distributed_optimizer=overlap")
    return ", ".join(ways) + " or a smaller trainer.microbatch_tokens"


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
