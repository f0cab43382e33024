"""The layers of a model on a CPU without transformers' modules: the same numbers but for the order of sums, at a third
of the cost.

Runs inside the embedded rollout engine. In a step of a few dozen rows modules, hooks and small operations were three
quarters (docs/decisions/compiled-layers-on-a-cpu.md). Models that `knows_layers_of` refuses go through transformers.
Shape legend: U = prompts, R = rows, whole blocks; H = hidden size, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock

from moerl.rollout.blocks import ROWS, whole_blocks
from moerl.rollout.cache import SlotCache
from moerl.rollout.eight_bits import has_eight_bit_products
from moerl.rollout.independent_rows import IndependentRows
from moerl.rollout.layer_kernels import gated_mlp, mixture, norm_rows, self_attention


def knows_layers_of(model: PreTrainedModel, dtype: torch.dtype | None) -> bool:
    """Returns whether `CompiledLayers` compute what the model does.

    Args:
        dtype: the type that the model's numbers are rounded to (`moerl.rollout.rounding`), None if they are not.
    """
    # A subclass may compute anything.
    if type(model) is not Qwen3MoeForCausalLM or model.device.type != "cpu" or has_eight_bit_products(model):
        return False
    config, layers = cast(Any, model.config), cast(Any, model.base_model).layers
    return (
        model.dtype == torch.float32
        and dtype in (None, torch.bfloat16)
        and config.hidden_act == "silu"
        and not config.attention_bias
        and all(each.self_attn.sliding_window is None for each in layers)
        # The angles of others depend on how long the longest sequence of a step is.
        and cast(Any, model.base_model).rotary_emb.rope_type in ("default", "linear", "yarn", "llama3")
    )


class CompiledLayers:
    """The layers of a model, compiled. They read the memory of the model's weights, so they need no call when it is
    updated.

    Sequences are independent of one another: threads work on them side by side, and numbers do not depend on how many
    threads there are.

    Args:
        model, dtype: for which `knows_layers_of` is True.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        config, self._base = cast(Any, model.config), cast(Any, model.base_model)
        attention = self._base.layers[0].self_attn
        self._shapes = [(config.num_key_value_heads, attention.head_dim)] * len(self._base.layers)
        self._has_experts = [isinstance(each.mlp, Qwen3MoeSparseMoeBlock) for each in self._base.layers]
        self._routing_shape = sum(self._has_experts), config.num_experts_per_tok
        self._layers = [_weights(each) for each in self._base.layers]
        scale, eps = np.float32(attention.scaling), np.float32(config.rms_norm_eps)
        self._settings = scale, eps, bool(config.norm_topk_prob), dtype is not None
        self._last = _shared(self._base.norm.weight)
        self._angles: list[NDArray[np.float32]] = []
        self._threads = ThreadPoolExecutor(torch.get_num_threads()) if torch.get_num_threads() > 1 else None

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Feeds one token each to the sequences in slots 0..R-1, at `positions` [R].

        Returns:
            Hidden states after the last norm, float32 [R, H]; expert ids, [R, L, K].
        """
        num_rows = len(tokens)
        blocks = np.array_split(np.arange(num_rows // ROWS), torch.get_num_threads())
        parts = [slice(ROWS * int(each[0]), ROWS * (int(each[-1]) + 1)) for each in blocks if len(each)]
        return self._run(tokens, np.arange(num_rows), positions, cache, parts)

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], slots: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Feeds prompts to empty slots, int64 [U].

        Returns:
            Hidden states of the last tokens after the last norm, float32 [U, H]; expert ids, [U, longest, L, K], 0 past
            the end of a prompt.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        # The last row of a prompt fills its last block up: it is computed, and written to its place, again.
        sizes = [whole_blocks(length) for length in lengths]
        positions = np.concatenate([np.minimum(np.arange(s), n - 1) for s, n in zip(sizes, lengths, strict=True)])
        owners, ends = np.repeat(np.arange(len(prompts)), sizes), np.cumsum(sizes)
        tokens = np.concatenate(prompts)[np.repeat(np.cumsum(lengths) - lengths, sizes) + positions]
        groups = np.array_split(np.arange(len(prompts)), torch.get_num_threads())
        parts = [slice(int(ends[each[0]] - sizes[each[0]]), int(ends[each[-1]])) for each in groups if len(each)]
        hidden, ids = self._run(tokens, slots[owners], positions, cache, parts)
        experts = np.zeros((len(prompts), int(lengths.max()), *self._routing_shape), np.int64)
        experts[owners, positions] = ids
        return hidden[torch.from_numpy(ends - 1)], experts

    def _run(
        self,
        tokens: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache: SlotCache,
        parts: Sequence[slice],
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Computes rows through all layers. A row sees the earlier ones of its slot, in the cache and in its part."""
        assert all(rows.start % ROWS == rows.stop % ROWS == 0 for rows in parts)
        _, eps, _, halves = self._settings
        stream = self._base.embed_tokens.weight[torch.from_numpy(tokens)].numpy()
        num_tokens = int(positions.max()) + 1
        cos, sin = (each[positions] for each in self._angles_of(num_tokens))
        num_moe, num_chosen = self._routing_shape
        ids = np.empty((num_moe, len(tokens), num_chosen), np.int64)
        held = [(k.numpy(), v.numpy()) for k, v in cache.layers_of(self._shapes, num_tokens)]

        def run(rows: slice) -> None:
            places, moe = (slots[rows], positions[rows], cos[rows], sin[rows]), iter(ids)
            own = stream[rows]
            for (of_attention, of_mlp), keys_values, is_moe in zip(self._layers, held, self._has_experts, strict=True):
                self_attention(own, places, keys_values, of_attention, self._settings)
                if is_moe:
                    mixture(own, of_mlp, self._settings, next(moe)[rows])
                else:
                    gated_mlp(own, of_mlp, self._settings)
            norm_rows(own, self._last, eps, own, halves)

        for _ in map(run, parts) if self._threads is None else self._threads.map(run, parts):
            pass
        return torch.from_numpy(stream), ids.transpose(1, 0, 2)

    def _angles_of(self, num_tokens: int) -> list[NDArray[np.float32]]:
        """Returns cosines and sines of RoPE at so many positions or more, [at least num_tokens, D] each."""
        if not self._angles or len(self._angles[0]) < num_tokens:
            # Doubled, so that a growing sequence does not ask for all of them at every step.
            positions = torch.arange(2 * num_tokens)[None]
            with IndependentRows():
                self._angles = [each[0].numpy() for each in self._base.rotary_emb(self._base.norm.weight, positions)]
        return self._angles


def _shared(parameter: Tensor) -> NDArray[np.float32]:
    """Returns the memory of a parameter, which an update writes over."""
    return parameter.detach().numpy()


def _weights(block: Any) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[np.float32], ...]]:
    """Returns the weights of both halves of a decoder layer, as `moerl.rollout.layer_kernels` takes them."""
    attention, mlp = block.self_attn, block.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm
    of_attention = (block.input_layernorm, *projections, attention.o_proj)
    if isinstance(block.mlp, Qwen3MoeSparseMoeBlock):
        of_mlp = mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj
    else:
        of_mlp = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    of_second = block.post_attention_layernorm.weight, *of_mlp
    return tuple(_shared(each.weight) for each in of_attention), tuple(map(_shared, of_second))
