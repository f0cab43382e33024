"""A decoding step on a CPU without transformers' modules: the same numbers but for the order of sums, at a third of the
cost.

Runs inside the embedded rollout engine. Of a step of a few dozen rows modules, hooks and small operations were three
quarters (docs/decisions/decoding-in-numba.md). Prompts go through transformers as ever, and so do the steps of models
that this does not know. Shape legend: R = rows of a step, H = hidden size, D = head size, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock

from moerl.rollout.cache import SlotCache
from moerl.rollout.decode_kernels import BLOCK, dense_layer, last_norm, layer
from moerl.rollout.eight_bits import has_eight_bit_products


def knows_steps_of(model: PreTrainedModel, dtype: torch.dtype | None) -> bool:
    """Whether `DecodingStep` computes what the model does.

    Args:
        dtype: what the model's numbers are rounded to (`moerl.rollout.rounding`), None where they are not.
    """
    # A class that goes on from this one may compute anything.
    if type(model) is not Qwen3MoeForCausalLM or model.device.type != "cpu" or has_eight_bit_products(model):
        return False
    config, layers = cast(Any, model.config), cast(Any, model.base_model).layers
    return (
        model.dtype == torch.float32
        and dtype in (None, torch.bfloat16)
        and config.hidden_act == "silu"
        and not config.attention_bias
        and all(each.self_attn.sliding_window is None for each in layers)
    )


class DecodingStep:
    """One token per row through the layers of a model, whose weights it shares: it needs no word of their updates.

    Rows are independent of one another, so threads share them, and numbers do not depend on how many there are.

    Args:
        model: one that `knows_steps_of` knows. dtype: as there.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        config, self._base = cast(Any, model.config), cast(Any, model.base_model)
        self._has_experts = [isinstance(each.mlp, Qwen3MoeSparseMoeBlock) for each in self._base.layers]
        self._num_moe, self._num_chosen = sum(self._has_experts), config.num_experts_per_tok
        self._layers = [_weights(each) for each in self._base.layers]
        scale, eps = np.float32(self._base.layers[0].self_attn.scaling), np.float32(config.rms_norm_eps)
        self._settings = scale, eps, bool(config.norm_topk_prob), dtype is not None
        self._last = _shared(self._base.norm.weight)
        self._threads = ThreadPoolExecutor(torch.get_num_threads()) if torch.get_num_threads() > 1 else None

    def __call__(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache) -> tuple[Tensor, Any]:
        """Feeds tokens to the sequences in slots 0..R-1, whose keys and values it adds to the cache.

        Args:
            tokens, positions: [R], whole blocks of rows. cache: announced with `begin_decode`.

        Returns:
            Hidden states after the last norm, float32 [R, H]; expert ids, int64 [R, L, K].
        """
        at, (_, eps, _, halves) = torch.from_numpy(positions), self._settings
        stream = self._base.embed_tokens.weight[torch.from_numpy(tokens)].numpy()
        cos, sin = (each[0].numpy() for each in self._base.rotary_emb(self._base.norm.weight, at[None]))
        ids = np.empty((self._num_moe, len(tokens), self._num_chosen), np.int64)
        slots = np.arange(len(tokens))
        held = [tuple(each.numpy() for each in cache.of_layer(number)) for number in range(len(self._layers))]

        def run(rows: slice) -> None:
            places, moe = (slots[rows], positions[rows], cos[rows], sin[rows]), iter(ids)
            for weights, keys_values, has_experts in zip(self._layers, held, self._has_experts, strict=True):
                if has_experts:
                    layer(stream[rows], places, keys_values, weights, self._settings, next(moe)[rows])
                else:
                    dense_layer(stream[rows], places, keys_values, weights, self._settings)
            last_norm(stream[rows], self._last, eps, halves)

        self._each(run, len(tokens))
        return torch.from_numpy(stream), ids.transpose(1, 0, 2)

    def _each(self, run: Callable[[slice], None], num_rows: int) -> None:
        """Calls `run` for all rows, by as many threads as torch has."""
        if self._threads is None:
            return run(slice(0, num_rows))
        blocks = np.array_split(np.arange(num_rows // BLOCK), torch.get_num_threads())
        parts = [slice(BLOCK * int(each[0]), BLOCK * (int(each[-1]) + 1)) for each in blocks if len(each)]
        for _ in self._threads.map(run, parts):
            pass


def _shared(parameter: Tensor) -> NDArray[np.float32]:
    """The memory of a parameter, which an update writes over."""
    return parameter.detach().numpy()


def _weights(block: Any) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[np.float32], ...]]:
    """Of a decoder layer, as `moerl.rollout.decode_kernels.layer` takes them."""
    attention, mlp = block.self_attn, block.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm
    of_attention = (block.input_layernorm, *projections, attention.o_proj)
    if isinstance(block.mlp, Qwen3MoeSparseMoeBlock):
        of_mlp = mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj
    else:
        of_mlp = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    of_second = block.post_attention_layernorm.weight, *of_mlp
    return tuple(_shared(each.weight) for each in of_attention), tuple(map(_shared, of_second))
