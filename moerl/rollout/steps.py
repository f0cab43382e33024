"""One pass of the embedded engine: prompts or newest tokens in, one sampled token per row and its routing out.

Runs inside the embedded rollout engine. `HostSteps` is for a model on a CPU, `moerl.rollout.device_steps` for one on a
device. Shape legend: U = prompts that differ, m = rows that ask for them, n = running rows, R = rows of a pass, of
which those above n are of no use; P = tokens of the longest prompt, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moerl.rollout.blocks import whole_blocks
from moerl.rollout.cache import SlotCache
from moerl.rollout.compiled_layers import CompiledLayers
from moerl.rollout.independent_rows import IndependentRows
from moerl.rollout.sampler import RowParams, sample
from moerl.rollout.sampler_kernel import StepResult
from moerl.rollout.transformers_layers import TransformersLayers


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to feed to empty slots."""

    tokens: Sequence[NDArray[np.int64]]
    """int64, one array for each of U."""
    slots: NDArray[np.int64]
    """int64 [U]."""
    which: NDArray[np.int64]
    """int64 [m], the prompt that each row asks for."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling of rows (`moerl.rollout.sampler`)."""

    params: RowParams
    """Parameters, on the host."""
    uniforms: NDArray[np.float64]
    """float64 in [0, 1), one per row."""


class HostSteps:
    """Passes of a model on a CPU. `moerl.rollout.device_steps.DeviceSteps` has the same methods.

    Args:
        layers: of the model. head: its language-model head. vocab_size: ids that may be drawn.
    """

    def __init__(self, layers: CompiledLayers | TransformersLayers, head: nn.Module, vocab_size: int) -> None:
        self.layers, self._head, self._vocab_size = layers, head, vocab_size

    def num_rows(self, num_running: int) -> int:
        """Returns how many rows a pass over so many running rows has, R."""
        return whole_blocks(num_running)

    def wait(self) -> None:
        """Waits until what was given to a device is done; a CPU does everything at once."""

    def cache(self, num_slots: int, max_tokens: int) -> SlotCache:
        """Returns an empty cache for a run of the engine."""
        return SlotCache(whole_blocks(num_slots), max_tokens)

    def prefill(self, prompts: Prompts, draw: Draw, cache: SlotCache) -> tuple[StepResult, NDArray[Any]]:
        """Feeds prompts, each once, and samples the first token of every row.

        Returns:
            What was sampled, of m rows; expert ids, [U, P, L, K], anything past the end of a prompt.
        """
        with IndependentRows():
            hidden, experts = self.layers.prefill(prompts.tokens, prompts.slots, cache)
        return self._sample(hidden[torch.from_numpy(prompts.which)], draw), experts

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], draw: Draw, cache: SlotCache
    ) -> tuple[StepResult, NDArray[Any]]:
        """Feeds one token each to the sequences in slots 0..R-1, at `positions` [R], and samples the next one.

        Returns:
            What was sampled, and expert ids [n, L, K], of the n rows of `draw`. Both may share memory with the next
            step.
        """
        with IndependentRows():
            hidden, experts = self.layers.decode(tokens, positions, cache)
        return self._sample(hidden, draw), experts[: len(draw.uniforms)]

    def _sample(self, hidden: Tensor, draw: Draw) -> StepResult:
        """Samples the rows of `draw`. hidden: of these, and of others that fill the last block up if there are any."""
        with IndependentRows():
            logits = self._head(hidden)[: len(draw.uniforms), : self._vocab_size]
        return sample(logits, draw.params, draw.uniforms)
