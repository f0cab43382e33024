"""Cost of training on a sequence, as a function of its length. Plain numbers; any process.

Attention makes cost grow faster than length, so packs of equal length differ in run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from moerl.models.description import ModelDescription


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """``linear * rows + quadratic * rows^2``, in any unit: only ratios between sequences matter.

    The default counts rows alone.
    """

    linear: float = 1.0
    """Cost per row."""
    quadratic: float = 0.0
    """Cost per squared row."""

    def __call__(self, num_rows: int) -> float:
        return self.linear * num_rows + self.quadratic * num_rows**2


def sequence_flops(model: ModelDescription) -> SequenceCost:
    """Returns the floating-point operations of the forward pass over one sequence, s = rows; the backward pass takes
    twice that.

        projections   layers * 2 * hidden * head_dim * (2 * heads + 2 * key_value_heads) * s
        gated FFN     layers * 6 * hidden * ffn_width * s
        head          2 * hidden * vocab * s
        attention     layers * 2 * heads * head_dim * s^2         (scores and values, causal: half of 4)

    Two operations per multiply-add, as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM" (SC 2021), which counts attention without the causal half. Norms, rotary embeddings,
    softmax and the router are left out; dense layers count like the others, latent attention as if queries and keys
    were not compressed. ffn_width: experts per token x expert width, shared experts added.
    """
    latent, heads = model.latent, model.num_attention_heads
    head_dim = model.head_dim if latent is None else latent.nope_dim + latent.rope_dim
    ffn_width = model.experts_per_token * model.moe_intermediate_size + model.shared_size
    projections = 4 * model.hidden_size * head_dim * (heads + model.num_key_value_heads)
    per_layer = projections + 6 * model.hidden_size * ffn_width
    return SequenceCost(
        linear=float(model.num_layers * per_layer + 2 * model.hidden_size * model.vocab_size),
        quadratic=float(model.num_layers * 2 * heads * head_dim),
    )
