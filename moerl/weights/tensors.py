"""Megatron tensors of a model, their shards, and the rows of Hugging Face tensors that each is made of. Torch-free; any
process.

A Megatron tensor is named here by its place in the whole model, whatever stage, chunk or kind of module has it:

    embedding.word_embeddings.weight
    decoder.layers.<layer>.input_layernorm.weight
    decoder.layers.<layer>.self_attention.linear_qkv.weight
    decoder.layers.<layer>.mlp.router.weight, .mlp.router.expert_bias
    decoder.layers.<layer>.mlp.experts.<expert>.linear_fc1.weight
    decoder.final_layernorm.weight, output_layer.weight

`moerl.trainer.shards` finds them in the modules of a rank, grouped or sequential, fused with their norm or not.

Tensors are seen as rows and columns; a vector of n is n rows of one column. Rows come in blocks, each of which tensor
parallelism cuts on its own: a gated MLP's first matrix has a gate block and an up block; queries, keys and values
alternate in one block; the vocabulary's block may end in padding that no checkpoint has. Multi-token-prediction heads
are not built by the trainer and stand in no list: an engine keeps those it has loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from moerl.models.description import LatentAttention, ModelDescription

FLOAT32_BYTES = 4


class Split(StrEnum):
    """Way in which the ranks that share a Megatron tensor cut it."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a Hugging Face tensor."""

    name: str
    """Name of the Hugging Face tensor."""
    start: int
    """First row."""
    count: int
    """Number of rows."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are cut together."""

    num_rows: int
    """Number of rows; those at the end that no run covers are padding."""
    runs: tuple[Span, ...]
    """Rows of Hugging Face tensors, in the order of the block."""


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One Megatron tensor as a whole."""

    name: str
    """Name by its place in the whole model, see the module."""
    blocks: tuple[Block, ...]
    """Rows of the tensor."""
    num_columns: int
    """Columns of the whole tensor; 1 for a vector."""
    split: Split
    """How ranks cut it."""
    layer: int
    """Decoder layer, from 0; `FIRST_STAGE` or `LAST_STAGE` for tensors of the first or last pipeline stage outside of
    layers."""
    expert: int | None = None
    """Routed expert, from 0, whose tensors are cut by the expert_tensor size; None for other tensors, which are cut by
    the tensor size."""
    is_vector: bool = False
    """True if it is one-dimensional."""
    element: str = "parameter"
    """One of parameter, which has the trainer's dtype, or float32."""

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)


FIRST_STAGE, LAST_STAGE = -1, -2


def model_tensors(sizes: ModelDescription, *, tensor: int, split_latents: bool) -> Iterator[MegatronTensor]:
    """Yields the tensors of a model in the order of its layers.

    Args:
        tensor: tensor-parallel size, to whose multiple the vocabulary is padded.
        split_latents: True if the projections into latent spaces are cut over tensor-parallel ranks, as in Megatron's
            local layers; in Transformer Engine's every rank has them whole.
    """
    h, vocabulary = sizes.hidden_size, -(-sizes.vocab_size // tensor) * tensor
    yield _vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary, sizes, FIRST_STAGE)
    for layer in range(sizes.num_layers):
        yield from _layer_tensors(sizes, layer, split_latents)
    yield _norm("decoder.final_layernorm.weight", "model.norm.weight", h, LAST_STAGE)
    if not sizes.tie_word_embeddings:
        yield _vocabulary("output_layer.weight", "lm_head.weight", vocabulary, sizes, LAST_STAGE)


def _layer_tensors(sizes: ModelDescription, layer: int, split_latents: bool) -> Iterator[MegatronTensor]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    h = sizes.hidden_size
    yield _norm(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", h, layer)
    if sizes.latent is None:
        yield from _attention(sizes, layer)
    else:
        yield from _latent_attention(sizes, sizes.latent, layer, split_latents)
    yield _norm(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", h, layer)
    if layer not in sizes.moe_layers:
        yield from _gated_mlp(f"{ours}.mlp", f"{theirs}.mlp", h, sizes.intermediate_size, layer)
        return
    gate = f"{theirs}.mlp.gate"
    yield _plain(f"{ours}.mlp.router.weight", f"{gate}.weight", (sizes.num_experts, h), Split.WHOLE, layer)
    if sizes.family.has_expert_bias:
        bias = _norm(f"{ours}.mlp.router.expert_bias", f"{gate}.e_score_correction_bias", sizes.num_experts, layer)
        yield replace(bias, element="float32")
    if sizes.shared_size:
        shared = "mlp.shared_experts"
        yield from _gated_mlp(f"{ours}.{shared}", f"{theirs}.{shared}", h, sizes.shared_size, layer)
    for expert in range(sizes.num_experts):
        name = f"mlp.experts.{expert}"
        yield from _gated_mlp(f"{ours}.{name}", f"{theirs}.{name}", h, sizes.moe_intermediate_size, layer, expert)


def _attention(sizes: ModelDescription, layer: int) -> Iterator[MegatronTensor]:
    """Yields the tensors of attention. Megatron interleaves queries, keys and values by key-value head: its queries,
    its key, its value, the next."""
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    h, heads, groups, width = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    queries = heads // groups * width
    for kind in ("weight", "bias") if "qkv" in sizes.attention_biases else ("weight",):
        runs = tuple(
            Span(f"{theirs}.{projection}_proj.{kind}", group * count, count)
            for group in range(groups)
            for projection, count in (("q", queries), ("k", width), ("v", width))
        )
        block = Block(groups * (queries + 2 * width), runs)
        whole = MegatronTensor(f"{ours}.linear_qkv.{kind}", (block,), h, Split.ROWS, layer)
        yield replace(whole, num_columns=1, is_vector=True) if kind == "bias" else whole
    yield _plain(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (h, heads * width), Split.COLUMNS, layer)
    if "output" in sizes.attention_biases:
        yield _norm(f"{ours}.linear_proj.bias", f"{theirs}.o_proj.bias", h, layer)
    for kind, size in zip("qk", sizes.qk_norm_sizes, strict=True):
        if size:
            yield _norm(f"{ours}.{kind}_layernorm.weight", f"{theirs}.{kind}_norm.weight", size, layer)


def _latent_attention(
    sizes: ModelDescription, latent: LatentAttention, layer: int, split_latents: bool
) -> Iterator[MegatronTensor]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    h, heads = sizes.hidden_size, sizes.num_attention_heads
    down = Split.ROWS if split_latents else Split.WHOLE
    queries = heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield _plain(f"{ours}.linear_q_down_proj.weight", f"{theirs}.q_a_proj.weight", (latent.q_rank, h), down, layer)
        yield _norm(f"{ours}.q_layernorm.weight", f"{theirs}.q_a_layernorm.weight", latent.q_rank, layer)
        up = (queries, latent.q_rank)
        yield _plain(f"{ours}.linear_q_up_proj.weight", f"{theirs}.q_b_proj.weight", up, Split.ROWS, layer)
    else:
        yield _plain(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", (queries, h), Split.ROWS, layer)
    compressed = (latent.kv_rank + latent.rope_dim, h)
    yield _plain(f"{ours}.linear_kv_down_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight", compressed, down, layer)
    yield _norm(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight", latent.kv_rank, layer)
    up = (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield _plain(f"{ours}.linear_kv_up_proj.weight", f"{theirs}.kv_b_proj.weight", up, Split.ROWS, layer)
    output = (h, heads * latent.value_dim)
    yield _plain(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", output, Split.COLUMNS, layer)


def _gated_mlp(
    ours: str, theirs: str, hidden: int, width: int, layer: int, expert: int | None = None
) -> Iterator[MegatronTensor]:
    gate_up = (_block(f"{theirs}.gate_proj.weight", width), _block(f"{theirs}.up_proj.weight", width))
    yield MegatronTensor(f"{ours}.linear_fc1.weight", gate_up, hidden, Split.ROWS, layer, expert)
    down = (_block(f"{theirs}.down_proj.weight", hidden),)
    yield MegatronTensor(f"{ours}.linear_fc2.weight", down, width, Split.COLUMNS, layer, expert)


def _block(name: str, rows: int) -> Block:
    return Block(rows, (Span(name, 0, rows),))


def _plain(ours: str, theirs: str, shape: tuple[int, int], split: Split, layer: int) -> MegatronTensor:
    return MegatronTensor(ours, (_block(theirs, shape[0]),), shape[1], split, layer)


def _norm(ours: str, theirs: str, size: int, layer: int) -> MegatronTensor:
    """Returns a vector that every tensor-parallel rank has whole."""
    return MegatronTensor(ours, (_block(theirs, size),), 1, Split.WHOLE, layer, is_vector=True)


def _vocabulary(ours: str, theirs: str, padded: int, sizes: ModelDescription, layer: int) -> MegatronTensor:
    block = Block(padded, (Span(theirs, 0, sizes.vocab_size),))
    return MegatronTensor(ours, (block,), sizes.hidden_size, Split.ROWS, layer)


# --- shards ----------------------------------------------------------------------------------------------------------


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
