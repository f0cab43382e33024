"""The shards of a Megatron tensor, and the place of their parts in Hugging Face tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moerl.weights.tensors import MegatronTensor, Split


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
            yield replace(
                self,
                source_row=self.source_row + first,
                target_row=self.target_row + first,
                num_rows=rows,
                num_bytes=rows * row_bytes,
            )


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
