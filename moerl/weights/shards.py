"""The ranks that have each shard of a Megatron tensor, and the place of its parts in Hugging Face tensors. Torch-free.

Ranks are numbered as Megatron numbers them, pipeline stages outermost. With i the number of a rank within its stage,

    dense    i = tensor + TP x (context and data)
    experts  i = expert_tensor + ETP x (expert + EP x replica)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moerl.contract.parallel import ParallelDims
from moerl.weights.tensors import FIRST_STAGE, MegatronTensor, Split


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole rows of a shard, as wide as the shard, and their place in a Hugging Face tensor."""

    source: str
    """Name of the Megatron tensor."""
    source_row: int
    """First row in the shard."""
    target: str
    """Name of the Hugging Face tensor."""
    target_row: int
    """First row in the Hugging Face tensor."""
    target_column: int
    """First column in the Hugging Face tensor."""
    num_rows: int
    """Rows, at least 1."""
    num_columns: int
    """Columns of the shard."""
    num_bytes: int
    """Bytes of all rows."""

    def cut(self, most_bytes: int) -> Iterator[Piece]:
        """Yields the piece in parts of at most `most_bytes`, or of one row if that is more."""
        row_bytes = self.num_bytes // self.num_rows
        step = max(1, most_bytes // row_bytes)
        if step >= self.num_rows:
            yield self
            return
        for first in range(0, self.num_rows, step):
            rows = min(step, self.num_rows - first)
            yield Piece(
                self.source,
                self.source_row + first,
                self.target,
                self.target_row + first,
                self.target_column,
                rows,
                self.num_columns,
                rows * row_bytes,
            )


@dataclass(frozen=True, slots=True)
class Ownership:
    """Rules for which ranks of a layout have which tensors of a model."""

    dims: ParallelDims
    """Parallel layout."""
    num_layers: int
    """Decoder layers of the model."""
    num_experts: int
    """Routed experts per layer."""

    def stage_of_layers(self) -> dict[int, int]:
        """Returns the pipeline stage of each layer."""
        return {
            layer: stage
            for stage in range(self.dims.pipeline)
            for layer in self.dims.layers_of_stage(self.num_layers, stage)
        }

    def stage(self, tensor: MegatronTensor, stages: dict[int, int]) -> int:
        """Returns the pipeline stage that has a tensor; a tied embedding is published by the first stage."""
        if tensor.layer < 0:
            return 0 if tensor.layer == FIRST_STAGE else self.dims.pipeline - 1
        return stages[tensor.layer]

    def ways(self, tensor: MegatronTensor) -> int:
        """Returns the number of shards of a tensor."""
        if tensor.split is Split.WHOLE:
            return 1
        return self.dims.tensor if tensor.expert is None else self.dims.expert_tensor

    def expert_group(self, tensor: MegatronTensor) -> int:
        """Returns the expert-parallel rank that has a routed expert."""
        assert tensor.expert is not None
        return tensor.expert // (self.num_experts // self.dims.expert)

    def holders(self, tensor: MegatronTensor, stage: int, shard: int) -> Sequence[int]:
        """Returns the ranks that have shard `shard` of a tensor, each the same."""
        first, count, ways = stage * self.dims.ranks_per_stage, self.dims.ranks_per_stage, self.ways(tensor)
        if tensor.expert is None:
            return range(first + shard, first + count, ways)
        cell = self.dims.expert_tensor * self.dims.expert
        start = shard + self.dims.expert_tensor * self.expert_group(tensor)
        return range(first + start, first + count, cell)


def shard_shape(tensor: MegatronTensor, ways: int) -> tuple[int, ...]:
    """Returns the shape of each of `ways` shards of a tensor, as it is in a rank."""
    rows = tensor.num_rows // ways if tensor.split is Split.ROWS else tensor.num_rows
    if tensor.is_vector:
        return (rows,)
    return (rows, tensor.num_columns // ways if tensor.split is Split.COLUMNS else tensor.num_columns)


def shard_pieces(tensor: MegatronTensor, shard: int, ways: int, item_bytes: int) -> Iterator[Piece]:
    """Yields the pieces of shard `shard` of `ways`, in the order of its rows; padding is left out."""
    cuts_rows = tensor.split is Split.ROWS
    columns = tensor.num_columns // ways if tensor.split is Split.COLUMNS else tensor.num_columns
    column = shard * columns if tensor.split is Split.COLUMNS else 0
    local_row = 0
    for block in tensor.blocks:
        size = block.num_rows // ways if cuts_rows else block.num_rows
        low = shard * size if cuts_rows else 0
        position = 0
        for run in block.runs:
            begin, end = max(low, position), min(low + size, position + run.count)
            if begin < end:
                yield Piece(
                    tensor.name,
                    local_row + begin - low,
                    run.name,
                    run.start + begin - position,
                    column,
                    end - begin,
                    columns,
                    (end - begin) * columns * item_bytes,
                )
            position += run.count
        local_row += size
