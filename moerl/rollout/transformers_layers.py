"""The layers of any model that transformers and moerl know, on a CPU, by transformers' own modules.

Runs inside the embedded rollout engine. Shape legend: U = prompts, P = tokens of the longest one, R = rows of a
decoding step, whole blocks; H = hidden size, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from moerl.rollout.attention import decode_mask, prefill_mask
from moerl.rollout.cache import SlotCache
from moerl.rollout.capture import RoutingCapture
from moerl.rollout.independent_rows import IndependentRows


class TransformersLayers:
    """The layers of a model, as transformers computes them; `capture` reads what its routers choose."""

    def __init__(self, model: PreTrainedModel, capture: RoutingCapture) -> None:
        self._model, self._capture = model, capture

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Does the same as `moerl.rollout.compiled_layers.CompiledLayers.decode`."""
        at = torch.from_numpy(positions).to(self._model.device)
        num_tokens = int(positions.max()) + 1
        cache.begin_decode(at, num_tokens)
        hidden = self._forward(tokens[:, None], at[:, None], decode_mask(at, num_tokens), cache)
        return hidden[:, 0], self._capture.take(len(tokens)).cpu().numpy()

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], slots: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Does the same as `moerl.rollout.compiled_layers.CompiledLayers.prefill`; expert ids past the end of a prompt
        can be any.

        Prompts are padded on the right.
        """
        device, lengths = self._model.device, np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        cache.begin_prefill(torch.from_numpy(slots).to(device), longest)
        hidden = self._forward(tokens, positions, prefill_mask(longest, device), cache)
        experts = self._capture.take(len(prompts) * longest).unflatten(0, (len(prompts), longest)).cpu().numpy()
        last = torch.from_numpy(lengths - 1).to(device)
        return hidden[torch.arange(len(prompts), device=device), last], experts

    def _forward(self, tokens: NDArray[np.int64], positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """Returns hidden states after the last norm, [rows, tokens, hidden]; only sampled rows need the head."""
        self._capture.begin()
        with IndependentRows():
            output = self._model.base_model(
                input_ids=torch.from_numpy(tokens).to(self._model.device),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return output.last_hidden_state
