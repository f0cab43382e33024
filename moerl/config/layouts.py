"""Which parallel layouts Megatron-Core can run, and which valid ones are near one that it cannot. Pure; any process.

The rules are those of megatron-core 0.19.2 (`initialize_model_parallel`, `TransformerConfig`, linear, attention and MoE
layers), said before anything starts and in the words of the configuration:

    world  = tensor x pipeline x context x data
    expert x expert_tensor  divides  tensor x context x data      (each pipeline stage is cut anew for its experts)
    tensor                  divides  heads, dense, shared and latent widths; key-value heads divide it or it them
    expert                  divides  experts;   expert_tensor  divides  the width of an expert
    pipeline  is at most  layers;   virtual_pipeline > 1 needs pipeline > 1
    pipeline x virtual_pipeline  divides  layers where virtual_pipeline > 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.config.model_sizes import ModelSizes

if TYPE_CHECKING:
    from moerl.config.schema import ParallelConfig

LARGEST_CONTEXT = 64
"""Context-parallel sizes looked at when shapes are proposed: powers of two up to this."""


def smallest_data(*, tensor: int, context: int, expert: int, expert_tensor: int) -> int:
    """The smallest data-parallel size with which expert groups fill a pipeline stage."""
    cell = expert * expert_tensor
    return cell // math.gcd(cell, tensor * context)


def stage_layers(num_layers: int, pipeline: int, virtual_pipeline: int = 1) -> list[int]:
    """Layers of each pipeline stage, all its chunks together.

    As even as can be: stages differ by one layer at most. The layers that are left over go to the stages just before
    the last one: that one has the head and its logits to work on, the first one the embedding and, in a 1F1B schedule,
    the activations of most microbatches.

    Args:
        num_layers: at least `pipeline`; a multiple of pipeline x virtual_pipeline where chunks are interleaved.
    """
    even = virtual_pipeline > 1
    if num_layers < pipeline or (even and num_layers % (pipeline * virtual_pipeline)):
        raise ValueError(f"{num_layers} layers for {pipeline} stages of {virtual_pipeline} chunks")
    fewest, left_over = divmod(num_layers, pipeline)
    return [fewest + (pipeline - 1 - left_over <= stage < pipeline - 1) for stage in range(pipeline)]


def layers_of_stage(num_layers: int, pipeline: int, virtual_pipeline: int, stage: int) -> list[int]:
    """Decoder layers of one pipeline stage, from 0, chunk after chunk: interleaving deals chunks out in turn."""
    counts = stage_layers(num_layers, pipeline, virtual_pipeline)
    if virtual_pipeline == 1:
        start = sum(counts[:stage])
        return list(range(start, start + counts[stage]))
    per_chunk = counts[stage] // virtual_pipeline
    starts = (per_chunk * (chunk * pipeline + stage) for chunk in range(virtual_pipeline))
    return [start + i for start in starts for i in range(per_chunk)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Parallel sizes, all of them decided; the words are those of `ParallelConfig`."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Shape:
        """The sizes of a configuration, the data-parallel size in force included."""
        return cls(
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual_pipeline,
            parallel.context,
            parallel.expert,
            parallel.expert_tensor,
            parallel.data_size,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def row_multiple(self) -> int:
        """Rows of a packed microbatch come in multiples of this: sequence parallelism cuts them, and zig-zag context
        parallelism cuts every sequence into two chunks per rank."""
        return self.tensor if self.context == 1 else 2 * self.context * self.tensor

    def overrides(self, asked: Shape | None = None) -> str:
        """The shape as overrides that can be pasted behind a command which asks for `asked`."""
        asked = asked or Shape()
        names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        parts = [
            f"parallel.{name}={getattr(self, name)}"
            for name in names
            if getattr(self, name) != 1 or getattr(asked, name) != 1
        ]
        smallest = smallest_data(
            tensor=self.tensor, context=self.context, expert=self.expert, expert_tensor=self.expert_tensor
        )
        if self.data != smallest or self.data != asked.data:
            parts.append(f"parallel.data={self.data}")
        return " ".join(parts) or "parallel=single"


@dataclass(frozen=True, slots=True)
class Load:
    """What a layout has to be fed with. microbatch_tokens: budget of a packed microbatch. samples: sequences of the
    smallest optimizer step."""

    microbatch_tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """One rule that a layout breaks. key: dotted path of the size to change. what: the rule, as the part of a message
    that follows the key. seen, expected: the value and what would have been right."""

    key: str
    what: str
    seen: str
    expected: str


def layout_problems(shape: Shape, sizes: ModelSizes | None = None, load: Load | None = None) -> list[BrokenRule]:
    """The rules that a layout breaks, none where Megatron can run it.

    Args:
        sizes: the model; without it only the rules between parallel sizes are looked at.
        load: microbatches and samples; without it they are not looked at.
    """
    problems = list(_between_sizes(shape))
    if sizes is not None:
        problems += _of_model(shape, sizes)
    if load is not None:
        problems += _of_load(shape, load)
    return problems


def _between_sizes(shape: Shape) -> Iterator[BrokenRule]:
    cell, ranks = shape.expert * shape.expert_tensor, shape.tensor * shape.context * shape.data
    if ranks % cell:
        yield BrokenRule(
            "parallel.data",
            "expert groups do not fill a pipeline stage",
            f"tensor x context x data = {ranks}",
            f"a multiple of expert x expert_tensor = {cell}",
        )
    if shape.virtual_pipeline > 1 and shape.pipeline == 1:
        yield BrokenRule(
            "parallel.virtual_pipeline",
            "there is no pipeline to interleave",
            f"virtual_pipeline = {shape.virtual_pipeline}, pipeline = 1",
            "virtual_pipeline = 1, or pipeline > 1",
        )


def _of_model(shape: Shape, sizes: ModelSizes) -> Iterator[BrokenRule]:
    for axis, name, value in _divided(sizes):
        size = getattr(shape, axis)
        if value % size:
            yield BrokenRule(
                f"parallel.{axis}",
                f"does not divide {sizes.where(name)}",
                f"parallel.{axis} = {size}, {name} = {value}",
                f"a divisor of {value}",
            )
    key_values = sizes.num_key_value_heads
    if sizes.latent is None and key_values % shape.tensor and shape.tensor % key_values:
        yield BrokenRule(
            "parallel.tensor",
            f"neither divides {sizes.where('num_key_value_heads')} nor is a multiple of it",
            f"parallel.tensor = {shape.tensor}, num_key_value_heads = {key_values}",
            f"a divisor or a multiple of {key_values}",
        )
    yield from _of_stages(shape, sizes)


def _of_stages(shape: Shape, sizes: ModelSizes) -> Iterator[BrokenRule]:
    if shape.pipeline > sizes.num_layers:
        yield BrokenRule(
            "parallel.pipeline",
            f"is more than {sizes.where('num_layers')}",
            f"pipeline = {shape.pipeline}, num_layers = {sizes.num_layers}",
            f"at most {sizes.num_layers}: every stage holds a layer",
        )
    elif shape.virtual_pipeline > 1 and sizes.num_layers % (shape.pipeline * shape.virtual_pipeline):
        yield BrokenRule(
            "parallel.virtual_pipeline",
            f"times pipeline does not divide {sizes.where('num_layers')}",
            f"pipeline = {shape.pipeline}, virtual_pipeline = {shape.virtual_pipeline}, "
            f"num_layers = {sizes.num_layers}",
            f"1, or pipeline x virtual_pipeline a divisor of {sizes.num_layers}: interleaved chunks hold equally many "
            "layers",
        )


def _divided(sizes: ModelSizes) -> Iterator[tuple[str, str, int]]:
    """(axis, name of the size it splits, that size)."""
    yield "tensor", "num_attention_heads", sizes.num_attention_heads
    if sizes.latent is None:
        packed = (sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * sizes.head_dim
        yield "tensor", "(num_attention_heads + 2 x num_key_value_heads) x head_dim", packed
    else:
        # Megatron's local layers split the projections to the latent spaces; Transformer Engine's repeat them.
        if sizes.latent.q_rank:
            yield "tensor", "q_lora_rank", sizes.latent.q_rank
        yield "tensor", "kv_lora_rank + qk_rope_head_dim", sizes.latent.kv_rank + sizes.latent.rope_dim
    if sizes.has_dense_layers:
        yield "tensor", "intermediate_size", sizes.intermediate_size
    if sizes.shared_size:
        yield "tensor", "n_shared_experts x moe_intermediate_size", sizes.shared_size
    yield "expert", "num_experts", sizes.num_experts
    yield "expert_tensor", "moe_intermediate_size", sizes.moe_intermediate_size


def _of_load(shape: Shape, load: Load) -> Iterator[BrokenRule]:
    if load.microbatch_tokens < shape.row_multiple:
        yield BrokenRule(
            "parallel.context" if shape.context > 1 else "parallel.tensor",
            "a microbatch does not hold one padded sequence",
            f"trainer.microbatch_tokens = {load.microbatch_tokens}",
            f">= {shape.row_multiple} = " + ("2 x context x tensor" if shape.context > 1 else "tensor"),
        )
    if load.samples < shape.data:
        yield BrokenRule(
            "parallel.data",
            "an optimizer step has fewer sequences than data-parallel ranks",
            f"data = {shape.data}, {load.samples} sequences",
            f"data <= {load.samples}",
        )


# --- near shapes -----------------------------------------------------------------------------------------------------


def nearest_layouts(
    asked: Shape,
    sizes: ModelSizes,
    load: Load | None = None,
    *,
    world_size: int | None = None,
    accept: Callable[[Shape], bool] = lambda shape: True,
    count: int = 3,
) -> list[Shape]:
    """Valid shapes near `asked`, the nearest first; `asked` itself where it is valid and accepted.

    Shapes of as many processes as `asked` has come first, in order of `distance`; then others, in order of distance
    with the change in the number of processes counted as one more axis.

    Args:
        world_size: only shapes of this many processes; None: any number.
        accept: a further condition, for example that a shape fits the memory; asked in order of distance.
    """
    wanted = world_size or asked.world_size
    found: list[Shape] = []
    worlds = (wanted,) if world_size is not None else (wanted, None)
    for world in worlds:
        shapes = sorted(_valid_shapes(asked, sizes, load, world), key=lambda shape: _order(asked, shape))
        fresh = (shape for shape in shapes if shape not in found and accept(shape))
        found += itertools.islice(fresh, count - len(found))
        if len(found) == count:
            break
    return found


def distance(left: Shape, right: Shape) -> float:
    """Sum over the axes of |log2(left / right)|."""
    names = Shape.__dataclass_fields__
    return sum(abs(math.log2(getattr(left, name) / getattr(right, name))) for name in names)


def _order(asked: Shape, shape: Shape) -> tuple[float, float, tuple[int, ...]]:
    """By distance; among equals fewer changed axes, then smaller sizes, so that the order is always the same."""
    sizes = tuple(getattr(shape, name) for name in Shape.__dataclass_fields__)
    changed = sum(getattr(shape, name) != getattr(asked, name) for name in Shape.__dataclass_fields__)
    processes = abs(math.log2(shape.world_size / asked.world_size))
    return round(distance(asked, shape) + processes, 6), changed, sizes


def _valid_shapes(asked: Shape, sizes: ModelSizes, load: Load | None, world_size: int | None) -> Iterator[Shape]:
    """Every valid shape of `world_size` processes; where that is None, with the asked data size, the smallest, or as
    many replicas as the asked processes hold."""
    divided = list(_divided(sizes))
    widths = {axis: math.gcd(*(value for a, _, value in divided if a == axis)) for axis, _, _ in divided}
    tensors = [size for size in _divisors(widths["tensor"]) if not any(_of_model(Shape(tensor=size), sizes))]
    experts = _divisors(widths["expert"])
    expert_tensors = [size for size in _divisors(widths["expert_tensor"]) if size <= max(8, asked.expert_tensor)]
    contexts = sorted({asked.context, *(2**i for i in range(LARGEST_CONTEXT.bit_length()))})
    pipelines = _pipelines(asked, sizes)
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        dense = tensor * pipeline * context
        if (world_size is not None and world_size % dense) or (world_size is None and dense > 2 * asked.world_size):
            continue
        interleaves = pipeline > 1 and sizes.num_layers % pipeline == 0
        chunks = _divisors(sizes.num_layers // pipeline) if interleaves else [1]
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
                shape = Shape(tensor, pipeline, virtual, context, expert, expert_tensor, data)
                # The sizes above divide the model; what is left are the rules between them and the load.
                if not layout_problems(shape, None, load):
                    yield shape


def _pipelines(asked: Shape, sizes: ModelSizes) -> list[int]:
    """Pipeline sizes looked at when shapes are proposed: even ones, powers of two, and the one asked for."""
    layers = sizes.num_layers
    powers = {2**i for i in range(layers.bit_length())}
    return sorted(size for size in {asked.pipeline, *powers, *_divisors(layers)} if size <= layers)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def propose(asked: Shape, sizes: ModelSizes, load: Load | None = None) -> str:
    """The remedy for a layout that cannot run: near shapes that can, as overrides; empty where there is none."""
    near = nearest_layouts(asked, sizes, load)
    return "; or ".join(f"{shape.overrides(asked)} ({shape.world_size} processes)" for shape in near)
