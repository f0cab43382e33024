"""The layers of any model that transformers and moerl know, by transformers' own modules.

Runs inside the embedded rollout engine: on a CPU if `moerl.rollout.compiled_layers` does not know the model, and on a
device. Shape legend: U = prompts, P = tokens of the longest one, R = rows of a decoding step; H = hidden size, L, K as
in the data contract.
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


class TransformersLayers:
    """The layers of a model, as transformers computes them; `capture` reads what its routers choose."""

    def __init__(self, model: PreTrainedModel, capture: RoutingCapture) -> None:
        self._model, self._capture = model, capture

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Does the same as `moerl.rollout.compiled_layers.CompiledLayers.decode`."""
        tokens_R, positions_R = (torch.from_numpy(each).to(self._model.device) for each in (tokens, positions))
        hidden_RH, experts = self.feed_newest(tokens_R, positions_R, int(positions.max()) + 1, cache)
        return hidden_RH, experts.cpu().numpy()

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], slots: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Does the same as `moerl.rollout.compiled_layers.CompiledLayers.prefill`; expert ids past the end of a prompt
        can be any."""
        hidden_UPH, experts = self.feed_prompts(prompts, slots, cache)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=hidden_UPH.device)
        rows = torch.arange(len(prompts), device=hidden_UPH.device)
        return hidden_UPH[rows, last], experts.unflatten(0, hidden_UPH.shape[:2]).cpu().numpy()

    def feed_newest(
        self, tokens_R: Tensor, positions_R: Tensor, num_seen: int, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Feeds one token each to the sequences in slots 0..R-1; nothing in it waits for a device.

        Args:
            num_seen: tokens of the cache that are read, above all positions.

        Returns:
            Hidden states after the last norm, [R, H]; expert ids, int64 [R, L, K].
        """
        cache.begin_decode(positions_R, num_seen)
        mask = decode_mask(positions_R, num_seen)
        hidden = self._forward(tokens_R[:, None], positions_R[:, None], mask, cache)
        return hidden[:, 0], self._capture.take(len(positions_R))

    def feed_prompts(
        self, prompts: Sequence[NDArray[np.int64]], slots: NDArray[np.int64], cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Feeds prompts to empty slots, padded on the right.

        Returns:
            Hidden states after the last norm, [U, P, H]; expert ids, int64 [U * P, L, K].
        """
        device, longest = self._model.device, max(map(len, prompts))
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        cache.begin_prefill(torch.from_numpy(slots).to(device), longest)
        hidden = self._forward(torch.from_numpy(tokens).to(device), positions, prefill_mask(longest, device), cache)
        return hidden, self._capture.take(len(prompts) * longest)

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """Returns hidden states after the last norm, [rows, tokens, hidden]; only sampled rows need the head."""
        self._capture.begin()
        output = self._model.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state
