"""Parallel sizes and the coordinates of one rank in them, in one description for every process. Pure; any process.

Ranks are numbered as Megatron-Core 0.19.2 numbers them. With i the number of a rank within its pipeline stage,

    rank     = i + (ranks per stage) x pipeline
    dense    i = tensor + TP x (context + CP x data)
    experts  i = expert_tensor + ETP x (expert + EP x replica)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def smallest_data(*, tensor: int, context: int, expert: int, expert_tensor: int) -> int:
    """Returns the smallest data-parallel size with which expert groups fill a pipeline stage."""
    cell = expert * expert_tensor
    return cell // math.gcd(cell, tensor * context)


def stage_layers(num_layers: int, pipeline: int, virtual_pipeline: int = 1) -> list[int]:
    """Returns the number of layers of each pipeline stage, all its chunks together.

    As even as can be: stages differ by one layer at most. The layers that are left over go to the stages just before
    the last one: that one has the head and its logits to work on, the first one the embedding and, in a 1F1B schedule,
    the activations of most microbatches.

    Args:
        num_layers: at least `pipeline`; a multiple of pipeline x virtual_pipeline if chunks are interleaved.
    """
    even = virtual_pipeline > 1
    if num_layers < pipeline or (even and num_layers % (pipeline * virtual_pipeline)):
        raise ValueError(f"{num_layers} layers for {pipeline} stages of {virtual_pipeline} chunks")
    fewest, left_over = divmod(num_layers, pipeline)
    return [fewest + (pipeline - 1 - left_over <= stage < pipeline - 1) for stage in range(pipeline)]


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Parallel sizes of the trainer, all of them decided; the words are those of `ParallelConfig`."""

    tensor: int = 1
    """TP; ranks that share each dense layer."""
    pipeline: int = 1
    """Stages."""
    virtual_pipeline: int = 1
    """Model chunks per pipeline stage."""
    context: int = 1
    """CP; ranks that share each sequence."""
    expert: int = 1
    """EP; ranks among which experts are divided."""
    expert_tensor: int = 1
    """ETP; ranks that share each expert."""
    data: int = 1
    """Groups of ranks, each with microbatches of its own."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pipeline

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return self.ranks_per_stage // (self.expert * self.expert_tensor)

    @property
    def sequence_multiple(self) -> int:
        """Rows of a packed sequence come in multiples of this: zig-zag context parallelism cuts every sequence into two
        chunks per rank, and sequence parallelism cuts these."""
        return 1 if self.context == 1 else 2 * self.context * self.tensor

    @property
    def row_multiple(self) -> int:
        """Rows of a packed microbatch come in multiples of this; sequence parallelism cuts them."""
        return max(self.tensor, self.sequence_multiple)

    @property
    def microbatch_multiple(self) -> int:
        """The interleaved schedule runs microbatches in rounds of as many as there are stages."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def layers_of_stage(self, num_layers: int, stage: int) -> list[int]:
        """Returns the decoder layers of a pipeline stage, from 0, chunk after chunk: interleaving deals chunks out in
        turn."""
        counts = stage_layers(num_layers, self.pipeline, self.virtual_pipeline)
        if self.virtual_pipeline == 1:
            start = sum(counts[:stage])
            return list(range(start, start + counts[stage]))
        per_chunk = counts[stage] // self.virtual_pipeline
        starts = (per_chunk * (chunk * self.pipeline + stage) for chunk in range(self.virtual_pipeline))
        return [start + i for start in starts for i in range(per_chunk)]

    def ranks(self) -> list[RankCoordinates]:
        """Returns the coordinates of every rank, in rank order."""
        return [RankCoordinates(self, rank) for rank in range(self.world_size)]


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """One trainer rank: its number, its coordinates in `dims`, and the MoE layers of its pipeline stage."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    """The layout of all ranks."""
    rank: int = 0
    """Number among all trainer ranks, from 0."""
    moe_layers: tuple[int, ...] | None = None
    """Indices among the model's MoE layers, from 0, in the order of the layers; None for all."""

    @property
    def _in_stage(self) -> int:
        return self.rank % self.dims.ranks_per_stage

    @property
    def tensor_rank(self) -> int:
        return self._in_stage % self.dims.tensor

    @property
    def context_rank(self) -> int:
        return self._in_stage // self.dims.tensor % self.dims.context

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: its microbatches are those that this rank runs."""
        return self._in_stage // (self.dims.tensor * self.dims.context)

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.dims.ranks_per_stage

    @property
    def expert_tensor_rank(self) -> int:
        return self._in_stage % self.dims.expert_tensor

    @property
    def expert_rank(self) -> int:
        return self._in_stage // self.dims.expert_tensor % self.dims.expert

    @property
    def is_last_stage(self) -> bool:
        """True on ranks of the stage with the language-model head, which computes the loss."""
        return self.pipeline_rank == self.dims.pipeline - 1

    @property
    def routing_slice(self) -> tuple[int, int]:
        """Number of slices into which sequence parallelism cuts rows, and index of this rank's slice."""
        return self.dims.tensor, self.tensor_rank
