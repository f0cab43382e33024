"""Memory of one trainer rank, worked out from the model's sizes and the parallel layout. Any process.

Shape legend: T = rows of a microbatch, h = hidden size, k = experts per token, b = bytes of an element.

**Parameters** follow megatron-core 0.19.2 with Transformer Engine layers: `tensor` splits attention, dense and shared
MLPs, embedding and head (vocabulary padded to a multiple); `expert` deals out experts and `expert_tensor` splits each;
`pipeline` deals out layers. Norms, routers and the projections into latent spaces are whole on each rank.

**State** per parameter: b of weights, 4 of the fp32 gradient buffer, 8 of Adam's moments and, if weights are bf16, 4 of
the fp32 master weight. A distributed optimizer splits moments and master over data x context ranks, of experts over the
ranks that hold the same ones. The share `trainer.optimizer_offload` of moments and master lies in host memory; an
update fetches it into two pieces on the device, of at least `PIECE_ELEMENTS` parameters or one whole tensor's part.

**Activations** after Korthikanti et al. 2022 (arXiv:2205.05198), whose sum of what each layer keeps for its backward
pass is used here for GQA or latent attention, gated MLPs, no dropout, an attention kernel that keeps no scores (in
float32 a GPU has none: `moerl.ranks.devices`), and experts. With n = T / context and m = n / tensor rows, a layer
keeps, in elements:

    norms        4 m h                                      two norms, input and output
    attention    n (2 q + 2 k + v + o) / tensor             widths over all heads, q and k before and after RoPE
                 (+ 2 m latent width)
    dense MLP    3 n width / tensor                         up, gate and their product
    MoE          m k (expert_tensor h + 3 width)            rows sent to this rank's experts when they are evenly
                 + 3 n shared width / tensor + 2 m experts  loaded; router logits and probabilities (fp32)

**The head** never holds logits of the full vocabulary (`moerl.kernels`): hidden states of all n rows and their fp32
gradient, and, if tokens without a kept set are scored, slabs of logits. The head's gradient is added to the others of
the step by the kernels that compute it; if communication overlaps with the pass, it is a matrix of its own before. The
embedding's always is, at the end of a pass, when activations and scores of that microbatch are gone.

`selective` keeps only the input of an MoE block, `full` only the input of a layer (m h); either works one layer out
again at a time. A pipeline stage keeps as many microbatches as its schedule starts before the first backward pass.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from moerl.contract.parallel import ParallelDims
from moerl.models.description import ModelDescription

SLAB_ELEMENTS = 2**21
SLAB_MULTIPLE = 64
SLABS = 3
"""Slabs of logits alive at once: the logits, their exponentials, their gradient."""

USABLE_SHARE = 0.9
"""Share of a device that a plan may fill; the rest is for the CUDA context, communication and dispatch buffers, the
gradients of activations and fragmentation, which are not worked out."""
FP32 = 4
MOMENTS = 8
PIECES, PIECE_ELEMENTS = 2, 2**24
"""Pieces of an optimizer state in host memory that are on the device at once, and the least parameters of one."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Settings that decide, besides its part of the model, how much memory a rank needs."""

    microbatch_tokens: int
    """Most tokens of a forward pass."""
    element_bytes: int
    """Bytes of an element of weights and activations, 2 or 4."""
    recompute: str
    """`trainer.recompute`: none, selective or full."""
    distributed_optimizer: bool
    """True if optimizer state is split over replicas."""
    reference: bool
    """True if the rank has a frozen copy of the weights for the KL term."""
    offload: float = 0.0
    """Share of optimizer state in host memory, 0 to 1."""
    overlap: bool = False
    """True if the communication of gradients overlaps with the backward pass."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a rank of one pipeline stage."""

    stage: int
    """Pipeline stage, from 0."""
    parameters: dict[str, int]
    """By component, the number of parameters."""
    bytes: dict[str, int]
    """By purpose, the bytes on the rank's device."""
    offloaded_bytes: int = 0
    """Bytes of optimizer state in host memory."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def heaviest_rank(sizes: ModelDescription, dims: ParallelDims, needs: Needs) -> RankMemory:
    """Returns the memory of a rank of the stage that needs most; the ranks of a stage all need the same."""
    return max((rank_memory(sizes, dims, needs, s) for s in range(dims.pipeline)), key=lambda rank: rank.total_bytes)


def rank_memory(sizes: ModelDescription, dims: ParallelDims, needs: Needs, stage: int) -> RankMemory:
    """Returns the memory of a rank of pipeline stage `stage`, from 0. The model can be cut as `dims` say."""
    parameters = rank_parameters(sizes, dims, stage)
    experts, everything = parameters["experts"], sum(parameters.values())
    state = MOMENTS + (FP32 if needs.element_bytes < FP32 else 0)
    replicas = (dims.data * dims.context, dims.expert_data) if needs.distributed_optimizer else (1, 1)
    dense, expert = -(-(everything - experts) // replicas[0]), -(-experts // replicas[1])
    offloaded = math.ceil(needs.offload * (dense + expert))
    # The embedding or head may be one tensor of all dense parameters of a rank.
    piece = max(PIECE_ELEMENTS, min(dense, max(parameters["embedding"], parameters["head"])))
    activations, scoring = _activation_bytes(sizes, dims, needs, stage), _scoring_bytes(sizes, dims, needs, stage)
    freed = activations // _chunks_in_flight(dims, stage) + scoring
    if scoring and needs.overlap and sizes.tie_word_embeddings:
        # Autograd keeps the gradient of a tied head until it has that of the embedding.
        freed -= parameters["embedding"] * needs.element_bytes
    purposes = {
        "weights": everything * needs.element_bytes,
        "gradients": everything * FP32,
        "optimizer state": state * (dense + expert - offloaded),
        "pieces of optimizer state": PIECES * state * min(offloaded, piece),
        "reference weights": everything * needs.element_bytes if needs.reference else 0,
        "activations": activations,
        "scoring": scoring,
        "embedding's gradient": max(0, parameters["embedding"] * needs.element_bytes - freed),
    }
    return RankMemory(stage, parameters, purposes, state * offloaded)


# --- parameters ------------------------------------------------------------------------------------------------------


def total_parameters(sizes: ModelDescription) -> int:
    """Counts the parameters of the whole model, without multi-token-prediction layers."""
    return sum(rank_parameters(sizes, ParallelDims(), 0).values())


def rank_parameters(sizes: ModelDescription, dims: ParallelDims, stage: int) -> dict[str, int]:
    """Counts the parameters of a rank of pipeline stage `stage`, by component."""
    h, layers = sizes.hidden_size, dims.layers_of_stage(sizes.num_layers, stage)
    num_moe = len(set(layers) & set(sizes.moe_layers))
    expert = 3 * h * sizes.moe_intermediate_size // dims.expert_tensor
    vocabulary = h * math.ceil(sizes.vocab_size / dims.tensor)
    is_first, is_last = stage == 0, stage == dims.pipeline - 1
    # The stage of the head holds a copy of a tied embedding, unless it is the stage of the embedding.
    has_head = is_last and not (sizes.tie_word_embeddings and is_first)
    return {
        "embedding": vocabulary if is_first else 0,
        "attention": len(layers) * _attention_parameters(sizes, dims.tensor),
        "norms": len(layers) * 2 * h + (h if is_last else 0),
        "dense MLP": (len(layers) - num_moe) * 3 * h * sizes.intermediate_size // dims.tensor,
        "router": num_moe * sizes.num_experts * h,
        "experts": num_moe * sizes.num_experts // dims.expert * expert,
        "shared experts": num_moe * 3 * h * sizes.shared_size // dims.tensor,
        "head": vocabulary if has_head else 0,
    }


def _attention_parameters(sizes: ModelDescription, tensor: int) -> int:
    """Counts the attention's parameters of one layer on a rank, its inner norms included."""
    h, heads = sizes.hidden_size, sizes.num_attention_heads
    latent = sizes.latent
    if latent is not None:
        query_dim = latent.nope_dim + latent.rope_dim
        down = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        up = heads * (latent.kv_rank * (latent.nope_dim + latent.value_dim) + latent.value_dim * h)
        if latent.q_rank:
            down += h * latent.q_rank + latent.q_rank
        up += heads * query_dim * (latent.q_rank or h)
        return down + up // tensor
    packed = (heads + 2 * sizes.num_key_value_heads) * sizes.head_dim
    split = h * packed + heads * sizes.head_dim * h + (packed if "qkv" in sizes.attention_biases else 0)
    whole = sum(sizes.qk_norm_sizes) + (h if "output" in sizes.attention_biases else 0)
    return split // tensor + whole


# --- activations -----------------------------------------------------------------------------------------------------


def _activation_bytes(sizes: ModelDescription, dims: ParallelDims, needs: Needs, stage: int) -> int:
    """Returns the bytes that a stage keeps between forward and backward, and those of the one block that it works out
    again at a time."""
    moe = set(sizes.moe_layers)
    are_moe = [layer in moe for layer in dims.layers_of_stage(sizes.num_layers, stage)]
    layer_input = _slice_rows(dims, needs) * sizes.hidden_size * needs.element_bytes
    norms_and_attention = 4 * layer_input + _attention_bytes(sizes, dims, needs)
    mlp = {is_moe: _mlp_bytes(sizes, dims, needs, is_moe=is_moe) for is_moe in set(are_moe)}
    kept, again = [norms_and_attention + mlp[is_moe] for is_moe in are_moe], 0
    if needs.recompute == "full":
        kept, again = [layer_input] * len(kept), max(kept)
    elif needs.recompute == "selective" and True in mlp:
        kept, again = [norms_and_attention + (0 if is_moe else mlp[is_moe]) for is_moe in are_moe], mlp[True]
    return math.ceil(sum(kept) * _chunks_in_flight(dims, stage) / dims.virtual_pipeline) + again


def _chunks_in_flight(dims: ParallelDims, stage: int) -> int:
    """Returns the most forward passes of a chunk that await their backward pass: Megatron's warm-up and one more."""
    behind = dims.pipeline - stage - 1
    if dims.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (dims.virtual_pipeline - 1) * dims.pipeline + 1


def _attention_bytes(sizes: ModelDescription, dims: ParallelDims, needs: Needs) -> int:
    heads, latent, compressed = sizes.num_attention_heads, sizes.latent, 0
    if latent is not None:
        query = key = heads * (latent.nope_dim + latent.rope_dim)
        value = output = heads * latent.value_dim
        compressed = 2 * _slice_rows(dims, needs) * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    else:
        query = output = heads * sizes.head_dim
        key = value = max(sizes.num_key_value_heads, dims.tensor) * sizes.head_dim
    widths = (2 * query + 2 * key + value + output) // dims.tensor
    return (_rows(dims, needs) * widths + compressed) * needs.element_bytes


def _mlp_bytes(sizes: ModelDescription, dims: ParallelDims, needs: Needs, *, is_moe: bool) -> int:
    n, m = _rows(dims, needs), _slice_rows(dims, needs)
    if not is_moe:
        return 3 * n * sizes.intermediate_size // dims.tensor * needs.element_bytes
    width = dims.expert_tensor * sizes.hidden_size + 3 * sizes.moe_intermediate_size
    elements = m * sizes.experts_per_token * width + 3 * n * sizes.shared_size // dims.tensor
    return elements * needs.element_bytes + 2 * m * sizes.num_experts * FP32


def _scoring_bytes(sizes: ModelDescription, dims: ParallelDims, needs: Needs, stage: int) -> int:
    """Returns the bytes of log-probs and their gradients on the last stage, for tokens without a kept set, too; 0 for
    other stages."""
    if stage != dims.pipeline - 1:
        return 0
    n, h, columns = _rows(dims, needs), sizes.hidden_size, math.ceil(sizes.vocab_size / dims.tensor)
    hidden = n * h * (needs.element_bytes + FP32)
    slab = n * min(slab_columns(n, h), columns) * FP32
    head = h * columns * needs.element_bytes if needs.overlap else 0
    return hidden + head + SLABS * slab


def slab_columns(num_rows: int, width: int) -> int:
    """Returns the columns of the vocabulary worked on at a time: as `moerl.kernels.products.slab_columns`."""
    columns = max(SLAB_ELEMENTS // max(num_rows, width), min(num_rows, width))
    return columns - columns % SLAB_MULTIPLE if columns > SLAB_MULTIPLE else columns


def _rows(dims: ParallelDims, needs: Needs) -> int:
    return needs.microbatch_tokens // dims.context


def _slice_rows(dims: ParallelDims, needs: Needs) -> int:
    return needs.microbatch_tokens // (dims.context * dims.tensor)


def host_bytes() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
