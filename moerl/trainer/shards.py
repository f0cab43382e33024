"""This rank's weights as they lie in memory, under names that depend neither on layout nor on kinds of modules.

Runs in every trainer rank. The names are those of `moerl.weights.tensors`: layers and experts are counted over the
whole model; experts are named one by one, whether a module holds them grouped or in sequence; a norm that Transformer
Engine fuses into the linear behind it has the name of a norm of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from moerl.contract.parallel import RankCoordinates
from moerl.errors import WeightSyncError
from moerl.trainer.model import bare

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_IN_SEQUENCE = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


def local_shards(chunks: Sequence[nn.Module], layout: RankCoordinates) -> dict[str, Tensor]:
    """Returns the parameters and expert biases of this rank by name: the live tensors, not copies.

    Args:
        chunks: this rank's parts of the model, first to last.
        layout: this rank's coordinates.

    Raises:
        WeightSyncError: two tensors have one name.
    """
    shards: dict[str, Tensor] = {}
    for chunk in chunks:
        model = bare(chunk)
        numbers = [layer.layer_number - 1 for layer in getattr(model.decoder, "layers", ())]
        first_expert = model.config.num_moe_experts // layout.dims.expert * layout.expert_rank
        for name, tensor in _weights(model):
            whole = whole_name(name, numbers, first_expert=first_expert)
            if whole in shards:
                raise WeightSyncError(
                    f"two weights of this rank are '{whole}'",
                    seen=f"the second is {name}",
                    expected="one of each",
                    remedy="this is a bug in the naming of weights; report it with the model and layout",
                )
            shards[whole] = tensor.detach()
    return shards


def whole_name(name: str, layer_numbers: Sequence[int], *, first_expert: int = 0) -> str:
    """Returns the name in the whole model of a parameter of one chunk.

    Args:
        layer_numbers: of the chunk's layers, from 0.
        first_expert: number of the rank's first expert in that layer.
    """
    found = _LAYER.match(name)
    if found is None:
        return name
    rest = _FUSED_NORMS.get(found[2], found[2])
    if expert := _IN_SEQUENCE.match(rest):
        rest = f"mlp.experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif expert := _GROUPED.match(rest):
        rest = f"mlp.experts.{first_expert + int(expert[2])}.{expert[1]}"
    return f"decoder.layers.{layer_numbers[int(found[1])]}.{rest}"


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of the published weights. A head tied to the embedding is left out, also on ranks that
    have a copy of the embedding for it."""
    tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        if not (tied and name == "output_layer.weight"):
            yield name, parameter
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias") and buffer is not None:
            yield name, buffer
