"""Parallel layouts that Megatron-Core can run, and valid ones near one that it cannot. Pure; any process.

The rules are those of megatron-core 0.19.2 (`initialize_model_parallel`, `TransformerConfig`, linear, attention and MoE
layers), checked before anything starts and named in the words of the configuration:

    world  = tensor x pipeline x context x data
    expert x expert_tensor  divides  tensor x context x data      (each pipeline stage is cut anew for its experts)
    tensor                  divides  heads, dense, shared and latent widths; key-value heads divide it or it them
    expert                  divides  experts;   expert_tensor  divides  the width of an expert
    pipeline  is at most  layers;   virtual_pipeline > 1 needs pipeline > 1
    pipeline x virtual_pipeline  divides  layers if virtual_pipeline > 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moerl.contract.parallel import ParallelDims, smallest_data
from moerl.models.description import ModelDescription

LARGEST_CONTEXT = 64
"""Context-parallel sizes looked at when layouts are proposed: powers of two up to this."""


@dataclass(frozen=True, slots=True)
class LayoutLoad:
    """Work for a layout."""

    microbatch_tokens: int
    """Token budget of a packed microbatch."""
    samples: int
    """Sequences of the smallest optimizer step."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """One rule that a layout breaks."""

    key: str
    """Dotted path of the size to change."""
    what: str
    """The rule, as the part of a message that follows the key."""
    seen: str
    """Sizes of the layout that break the rule."""
    expected: str
    """A value that would be right."""


def as_overrides(dims: ParallelDims, asked: ParallelDims | None = None) -> str:
    """Returns the sizes as overrides that can be pasted behind a command which asks for `asked`."""
    asked = asked or ParallelDims()
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    parts = [
        f"parallel.{name}={getattr(dims, name)}"
        for name in names
        if getattr(dims, name) != 1 or getattr(asked, name) != 1
    ]
    smallest = smallest_data(
        tensor=dims.tensor, context=dims.context, expert=dims.expert, expert_tensor=dims.expert_tensor
    )
    if dims.data != smallest or dims.data != asked.data:
        parts.append(f"parallel.data={dims.data}")
    return " ".join(parts) or "parallel=single"


def layout_problems(
    dims: ParallelDims, sizes: ModelDescription | None = None, load: LayoutLoad | None = None
) -> list[BrokenRule]:
    """Returns the rules that a layout breaks; none if Megatron can run it.

    Args:
        sizes: the model; without it only the rules between parallel sizes are looked at.
        load: microbatches and samples; without it they are not looked at.
    """
    problems = list(_between_sizes(dims))
    if sizes is not None:
        problems += _of_model(dims, sizes)
    if load is not None:
        problems += _of_load(dims, load)
    return problems


def _between_sizes(dims: ParallelDims) -> Iterator[BrokenRule]:
    cell, ranks = dims.expert * dims.expert_tensor, dims.tensor * dims.context * dims.data
    if ranks % cell:
        yield BrokenRule(
            "parallel.data",
            "expert groups do not fill a pipeline stage",
            f"tensor x context x data = {ranks}",
            f"a multiple of expert x expert_tensor = {cell}",
        )
    if dims.virtual_pipeline > 1 and dims.pipeline == 1:
        yield BrokenRule(
            "parallel.virtual_pipeline",
            "there is no pipeline to interleave",
            f"virtual_pipeline = {dims.virtual_pipeline}, pipeline = 1",
            "virtual_pipeline = 1, or pipeline > 1",
        )


def _of_model(dims: ParallelDims, sizes: ModelDescription) -> Iterator[BrokenRule]:
    for axis, name, value in _divided(sizes):
        size = getattr(dims, axis)
        if value % size:
            yield BrokenRule(
                f"parallel.{axis}",
                f"does not divide {sizes.where(name)}",
                f"parallel.{axis} = {size}, {name} = {value}",
                f"a divisor of {value}",
            )
    key_values = sizes.num_key_value_heads
    if sizes.latent is None and key_values % dims.tensor and dims.tensor % key_values:
        yield BrokenRule(
            "parallel.tensor",
            f"neither divides {sizes.where('num_key_value_heads')} nor is a multiple of it",
            f"parallel.tensor = {dims.tensor}, num_key_value_heads = {key_values}",
            f"a divisor or a multiple of {key_values}",
        )
    if dims.pipeline > sizes.num_layers:
        yield BrokenRule(
            "parallel.pipeline",
            f"is more than {sizes.where('num_layers')}",
            f"pipeline = {dims.pipeline}, num_layers = {sizes.num_layers}",
            f"at most {sizes.num_layers}: every stage holds a layer",
        )
    elif dims.virtual_pipeline > 1 and sizes.num_layers % (dims.pipeline * dims.virtual_pipeline):
        yield BrokenRule(
            "parallel.virtual_pipeline",
            f"times pipeline does not divide {sizes.where('num_layers')}",
            f"pipeline = {dims.pipeline}, virtual_pipeline = {dims.virtual_pipeline}, num_layers = {sizes.num_layers}",
            f"1, or pipeline x virtual_pipeline a divisor of {sizes.num_layers}: interleaved chunks hold equally many "
            "layers",
        )


def _divided(sizes: ModelDescription) -> Iterator[tuple[str, str, int]]:
    """Yields (axis, name of the size it splits, that size)."""
    yield "tensor", "num_attention_heads", sizes.num_attention_heads
    if sizes.latent is None:
        packed = (sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * sizes.head_dim
        yield "tensor", "(num_attention_heads + 2 x num_key_value_heads) x head_dim", packed
    else:
        # Megatron's local layers split the projections to the latent spaces; Transformer Engine's repeat them.
        if sizes.latent.q_rank:
            yield "tensor", "q_lora_rank", sizes.latent.q_rank
        yield "tensor", "kv_lora_rank + qk_rope_head_dim", sizes.latent.kv_rank + sizes.latent.rope_dim
    if sizes.intermediate_size:
        yield "tensor", "intermediate_size", sizes.intermediate_size
    if sizes.shared_size:
        yield "tensor", "n_shared_experts x moe_intermediate_size", sizes.shared_size
    yield "expert", "num_experts", sizes.num_experts
    yield "expert_tensor", "moe_intermediate_size", sizes.moe_intermediate_size


def _of_load(dims: ParallelDims, load: LayoutLoad) -> Iterator[BrokenRule]:
    if load.microbatch_tokens < dims.row_multiple:
        yield BrokenRule(
            "parallel.context" if dims.context > 1 else "parallel.tensor",
            "a microbatch does not hold one padded sequence",
            f"trainer.microbatch_tokens = {load.microbatch_tokens}",
            f">= {dims.row_multiple} = " + ("2 x context x tensor" if dims.context > 1 else "tensor"),
        )
    if load.samples < dims.data:
        yield BrokenRule(
            "parallel.data",
            "an optimizer step has fewer sequences than data-parallel ranks",
            f"data = {dims.data}, {load.samples} sequences",
            f"data <= {load.samples}",
        )


# --- near layouts ----------------------------------------------------------------------------------------------------


def nearest_layouts(
    asked: ParallelDims,
    sizes: ModelDescription,
    load: LayoutLoad | None = None,
    *,
    world_size: int | None = None,
    accept: Callable[[ParallelDims], bool] = lambda dims: True,
    count: int = 3,
) -> list[ParallelDims]:
    """Returns valid layouts near `asked`, the nearest first; `asked` itself if it is valid and accepted.

    Layouts of as many processes as `asked` has come first, in order of `distance`; then others, in order of distance
    with the change in the number of processes counted as one more axis.

    Args:
        world_size: only layouts of this many processes; None: any number.
        accept: a further condition, for example that a layout fits the memory; asked in order of distance.
    """
    wanted = world_size or asked.world_size
    found: list[ParallelDims] = []
    worlds = (wanted,) if world_size is not None else (wanted, None)
    for world in worlds:
        layouts = sorted(_valid_dims(asked, sizes, load, world), key=lambda dims: _order(asked, dims))
        fresh = (dims for dims in layouts if dims not in found and accept(dims))
        found += itertools.islice(fresh, count - len(found))
        if len(found) == count:
            break
    return found


def distance(left: ParallelDims, right: ParallelDims) -> float:
    """Returns the sum over the axes of |log2(left / right)|."""
    names = ParallelDims.__dataclass_fields__
    return sum(abs(math.log2(getattr(left, name) / getattr(right, name))) for name in names)


def _order(asked: ParallelDims, dims: ParallelDims) -> tuple[float, float, tuple[int, ...]]:
    """Sorts by distance; among equals fewer changed axes, then smaller sizes, so that the order is always the same."""
    sizes = tuple(getattr(dims, name) for name in ParallelDims.__dataclass_fields__)
    changed = sum(getattr(dims, name) != getattr(asked, name) for name in ParallelDims.__dataclass_fields__)
    processes = abs(math.log2(dims.world_size / asked.world_size))
    return round(distance(asked, dims) + processes, 6), changed, sizes


def _valid_dims(
    asked: ParallelDims, sizes: ModelDescription, load: LayoutLoad | None, world_size: int | None
) -> Iterator[ParallelDims]:
    """Yields every valid layout of `world_size` processes; if that is None, of the asked data size, the smallest one,
    or as many replicas as the asked processes hold."""
    divided = list(_divided(sizes))
    widths = {axis: math.gcd(*(value for a, _, value in divided if a == axis)) for axis, _, _ in divided}
    tensors = [size for size in _divisors(widths["tensor"]) if not any(_of_model(ParallelDims(tensor=size), sizes))]
    experts = _divisors(widths["expert"])
    expert_tensors = [size for size in _divisors(widths["expert_tensor"]) if size <= max(8, asked.expert_tensor)]
    contexts = sorted({asked.context, *(2**i for i in range(LARGEST_CONTEXT.bit_length()))})
    layers = sizes.num_layers
    powers = {2**i for i in range(layers.bit_length())}
    pipelines = sorted(size for size in {asked.pipeline, *powers, *_divisors(layers)} if size <= layers)
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        dense = tensor * pipeline * context
        if (world_size is not None and world_size % dense) or (world_size is None and dense > 2 * asked.world_size):
            continue
        interleaves = pipeline > 1 and layers % pipeline == 0
        chunks = _divisors(layers // pipeline) if interleaves else [1]
        for expert, expert_tensor in itertools.product(experts, expert_tensors):
            if world_size is not None:
                datas = {world_size // dense}
            else:
                datas = {
                    asked.data,
                    max(1, asked.world_size // dense),
                    smallest_data(tensor=tensor, context=context, expert=expert, expert_tensor=expert_tensor),
                }
            for data, virtual in itertools.product(sorted(datas), chunks):
                dims = ParallelDims(tensor, pipeline, virtual, context, expert, expert_tensor, data)
                # The sizes above divide the model; what is left are the rules between them and the load.
                if not layout_problems(dims, None, load):
                    yield dims


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def propose(asked: ParallelDims, sizes: ModelDescription, load: LayoutLoad | None = None) -> str:
    """Returns the remedy for a layout that cannot run: near layouts that can, as overrides; empty if there is none."""
    near = nearest_layouts(asked, sizes, load)
    return "; or ".join(f"{as_overrides(dims, asked)} ({dims.world_size} processes)" for dims in near)
