"""Passes of the embedded engine on a device: transformers' layers, and a sampler that stays on the device.

Runs inside the embedded rollout engine. A decoding step is one copy to the device, one recorded step
(`moerl.rollout.recorded`), one copy back, and one wait. Its key is all that it depends on besides values: rows and
tokens of the cache that it reads, both rounded up so that there are few keys, and the kinds of its rows. The cache
keeps its memory from one run of the engine to the next. Shape legend as in `moerl.rollout.steps`; W as in
`moerl.rollout.device_sampler`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from moerl.contract.trajectory import ModelSpec
from moerl.rollout.attention import attend_without_cudnn
from moerl.rollout.cache import SlotCache
from moerl.rollout.capture import RoutingCapture
from moerl.rollout.device_sampler import Kinds, draw_rows
from moerl.rollout.experts import why_experts_wait
from moerl.rollout.recorded import Step, Unrecorded
from moerl.rollout.sampler import RowParams, require_finite
from moerl.rollout.sampler_kernel import Cuts, Draws, StepResult
from moerl.rollout.steps import Draw, Prompts
from moerl.rollout.transformers_layers import TransformersLayers

LEAST_ROWS = 8
"""Rows of the smallest step; others have a power of two, or all slots."""

LEAST_TOKENS = 128
"""Tokens of the cache that the smallest step reads; others read this times a power of two, or all of it."""

_WORDS = 5
"""32-bit numbers of a row in the output of a step: token, log-prob, kept mass, normaliser, size of its kept set."""

_FIXED_ANGLES = ("default", "linear", "yarn", "llama3")
"""RoPE whose angles depend on positions alone. Others look at the longest sequence, on the host."""

_Key = tuple[int, int, Kinds]


def why_not_recorded(model: PreTrainedModel) -> str:
    """Returns why the decoding steps of a model cannot be recorded; an empty text if they can."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", "default")
    if kind not in _FIXED_ANGLES:
        return f"RoPE of type {kind!r} looks at the longest sequence of every step"
    return why_experts_wait(model)


class DeviceSteps:
    """Passes of a model on a device.

    Args:
        model: with the attention and experts functions of the engine. capture: of its routers.
        max_running: slots.
        recorder: of decoding steps.
        slot_tokens: as in `DeviceOptions`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capture: RoutingCapture,
        spec: ModelSpec,
        max_running: int,
        recorder: Unrecorded,
        slot_tokens: int,
    ) -> None:
        attend_without_cudnn()
        self._model, self._spec, self._recorder = model, spec, recorder
        self._layers = TransformersLayers(model, capture)
        self._head = cast(nn.Module, model.get_output_embeddings())
        self._num_slots = max_running
        self._cache = SlotCache(self.num_rows(max_running), 0)
        # Inputs of a step on the host and on the device, int64 [len(_ROWS), R], by R.
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._recorded: dict[_Key, tuple[Step, Tensor]] = {}
        self._slot_tokens = slot_tokens

    def num_rows(self, num_running: int) -> int:
        """Returns the rows of a step: a power of two, at most the slots in whole eights."""
        return min(_power(num_running, LEAST_ROWS), -(-self._num_slots // LEAST_ROWS) * LEAST_ROWS)

    def wait(self) -> None:
        """Does the same as `HostSteps.wait`."""
        self._recorder.wait()

    def cache(self, num_slots: int, max_tokens: int) -> SlotCache:
        """Returns the cache of all runs, whose room for tokens only grows (`HostSteps.cache`)."""
        self._cache.max_tokens = max(self._cache.max_tokens, max_tokens)
        return self._cache

    @torch.inference_mode()
    def prefill(self, prompts: Prompts, draw: Draw, cache: SlotCache) -> tuple[StepResult, NDArray[Any]]:
        """Does the same as `HostSteps.prefill`."""
        self._reserve(cache)
        hidden, experts = self._layers.feed_prompts(prompts.tokens, prompts.slots, cache)
        lengths, device = np.array([len(each) for each in prompts.tokens]), self._model.device
        rows = torch.from_numpy(np.stack([prompts.which, lengths[prompts.which] - 1])).to(device)
        num_rows = len(prompts.which)
        inputs = torch.zeros(len(_ROWS), num_rows, dtype=torch.int64)
        _write_asked(inputs.numpy(), draw)
        kinds = Kinds.of(draw.params, self._spec.vocab_size)
        drawn = draw_rows(self._logits(hidden[rows[0], rows[1]]), *_asked(inputs.to(device)), kinds)
        output = _packed(drawn, experts, self._spec).cpu().numpy()
        step, ids = self._unpack(output, num_rows, num_rows * kinds.width, draw.params)
        return step, ids.reshape(*hidden.shape[:2], *ids.shape[1:])

    @torch.inference_mode()
    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], draw: Draw, cache: SlotCache
    ) -> tuple[StepResult, NDArray[Any]]:
        """Does the same as `HostSteps.decode`."""
        self._reserve(cache)
        num_rows, kinds = len(tokens), Kinds.of(draw.params, self._spec.vocab_size)
        seen = min(_power(int(positions.max()) + 1, LEAST_TOKENS), cache.capacity)
        if num_rows not in self._inputs:
            zeros = self._recorder.host_buffer(len(_ROWS), num_rows, dtype=torch.int64)
            self._inputs[num_rows] = zeros, torch.zeros_like(zeros, device=self._model.device)
        on_host, inputs = self._inputs[num_rows]
        numbers = on_host.numpy()
        numbers[0], numbers[1] = tokens, positions
        _write_asked(numbers, draw)
        inputs.copy_(on_host, non_blocking=True)
        key = num_rows, seen, kinds
        if key not in self._recorded:
            step = self._recorder.record(partial(self._step, inputs, seen, kinds, cache))
            routing = self._spec.num_moe_layers * self._spec.experts_per_token
            size = num_rows * (4 * (_WORDS + kinds.width) + routing * np.dtype(self._spec.expert_dtype).itemsize)
            self._recorded[key] = step, self._recorder.host_buffer(size, dtype=torch.uint8)
        step, output = self._recorded[key]
        output.copy_(step(), non_blocking=True)
        self._recorder.wait()
        result, experts = self._unpack(output.numpy(), num_rows, num_rows * kinds.width, draw.params)
        return result, experts[: len(draw.uniforms)]

    def _step(self, inputs: Tensor, seen: int, kinds: Kinds, cache: SlotCache) -> Tensor:
        """Computes a decoding step: uint8, as `_packed`. Nothing in it waits for the device."""
        hidden_RH, experts = self._layers.feed_newest(inputs[0], inputs[1], seen, cache)
        return _packed(draw_rows(self._logits(hidden_RH), *_asked(inputs), kinds), experts, self._spec)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)[:, : self._spec.vocab_size]

    def _reserve(self, cache: SlotCache) -> None:
        """Gives the cache all of its room. Steps that were recorded with less of it are forgotten; so it has room as
        planned, and beyond that of powers of two."""
        assert cache is self._cache
        if cache.max_tokens <= cache.capacity:
            return
        self._recorded.clear()
        self._recorder.forget()
        if cache.max_tokens <= self._slot_tokens:
            cache.max_tokens = self._slot_tokens
        else:
            rounded = min(_power(cache.max_tokens, LEAST_TOKENS), int(self._model.config.max_position_embeddings))
            cache.max_tokens = max(cache.max_tokens, rounded)
        cache.reserve(cache.max_tokens)

    def _unpack(
        self, output: NDArray[np.uint8], num_rows: int, num_listed: int, params: RowParams
    ) -> tuple[StepResult, NDArray[Any]]:
        """Reads what `_packed` wrote; raises `EngineError` if the logits of a row are broken."""
        end = 4 * (_WORDS * num_rows + num_listed)
        words, num_asked = output[:end].view(np.int32), len(params.cuts.greedy)
        rows = words[: _WORDS * num_rows].reshape(_WORDS, num_rows)[:, :num_asked]
        logprobs, logmass, log_z = rows[1:4].view(np.float32)
        require_finite(log_z)
        sizes = rows[4].astype(np.int64)
        kept_ids = words[_WORDS * num_rows :][: int(sizes.sum())]
        step = StepResult(rows[0].astype(np.int64), logprobs, logmass, log_z, sizes, kept_ids)
        shape = self._spec.num_moe_layers, self._spec.experts_per_token
        return step, output[end:].view(self._spec.expert_dtype).reshape(-1, *shape)


_ROWS = ("token", "position", "uniform", "temperature", "top_p", "min_p", "top_k", "greedy")
"""Rows of the inputs of a step, int64; the middle four hold the bits of float64 numbers."""


def _power(count: int, least: int) -> int:
    """Returns the smallest of least, 2 * least, 4 * least, ... that is not below `count`."""
    return least << max(-(-count // least) - 1, 0).bit_length()


def _write_asked(numbers: NDArray[np.int64], draw: Draw) -> None:
    """Writes sampling parameters into the inputs of a step, [len(_ROWS), R], and makes the rest of the rows greedy."""
    cuts, n = draw.params.cuts, len(draw.uniforms)
    floats = numbers[2:6].view(np.float64)
    floats[:, n:] = np.array([[0.0], [1.0], [1.0], [0.0]])
    numbers[6:, n:] = 1
    given = (draw.uniforms, cuts.temperature, cuts.top_p, cuts.min_p)
    for row, values in zip(floats, given, strict=True):
        row[:n] = values
    numbers[6, :n], numbers[7, :n] = cuts.top_k, cuts.greedy


def _asked(inputs: Tensor) -> tuple[Cuts[Tensor], Tensor]:
    """Reads what `_write_asked` wrote: sampling parameters, and the uniform numbers."""
    uniforms, temperature, top_p, min_p = inputs[2:6].view(torch.float64)
    return Cuts(temperature.float(), top_p, min_p, inputs[6], inputs[7].bool()), uniforms


def _packed(drawn: Draws[Tensor], experts: Tensor, spec: ModelSpec) -> Tensor:
    """Puts all results of a step one after the other, so that one copy takes them: uint8.

    32-bit words first: `_WORDS` rows of R, then the kept ids, R * W. Then the expert ids, [R, L, K], in the dtype of
    the spec.
    """
    words = (
        drawn.token_ids.int(),
        drawn.rollout_logprobs.view(torch.int32),
        drawn.kept_logmass.view(torch.int32),
        drawn.log_z.view(torch.int32),
        drawn.kept_sizes.int(),
        drawn.kept_ids,
    )
    # torch has few operations on uint16; an int16 has the same bits.
    narrow = torch.uint8 if np.dtype(spec.expert_dtype).itemsize == 1 else torch.int16
    return torch.cat([torch.cat(words).view(torch.uint8), experts.to(narrow).flatten().view(torch.uint8)])
