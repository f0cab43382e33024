"""What a sequence costs to train on, as a function of its length. Plain numbers; any process.

Attention makes cost grow faster than length, so packs of equal length are not equally long to run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """``linear * rows + quadratic * rows^2``, in any unit: only ratios between sequences matter.

    The default counts rows alone.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, num_rows: int) -> float:
        return self.linear * num_rows + self.quadratic * num_rows**2


@dataclass(frozen=True, slots=True)
class FlopSizes:
    """The sizes of a transformer on which its operations depend.

    hidden, layers, heads, key_value_heads, head_dim, vocab: as in its config.
    ffn_width: inner width that one token passes in a layer: experts per token x expert width, shared experts added.
    """

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    ffn_width: int
    vocab: int


def sequence_flops(sizes: FlopSizes) -> SequenceCost:
    """Floating-point operations of the forward pass over one sequence, s = rows; the backward pass takes twice that.

        projections   layers * 2 * hidden * head_dim * (2 * heads + 2 * key_value_heads) * s
        gated FFN     layers * 6 * hidden * ffn_width * s
        head          2 * hidden * vocab * s
        attention     layers * 2 * heads * head_dim * s^2         (scores and values, causal: half of 4)

    Two operations per multiply-add, as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM" (SC 2021), which counts attention without the causal half. Norms, rotary embeddings,
    softmax and the router are left out.
    """
    projections = 4 * sizes.hidden * sizes.head_dim * (sizes.heads + sizes.key_value_heads)
    per_layer = projections + 6 * sizes.hidden * sizes.ffn_width
    return SequenceCost(
        linear=float(sizes.layers * per_layer + 2 * sizes.hidden * sizes.vocab),
        quadratic=float(sizes.layers * 2 * sizes.heads * sizes.head_dim),
    )
