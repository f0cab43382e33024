"""Scores of dumped rollouts by transformers, for `moerl diagnose`.

Runs in the process of `moerl diagnose`. Several rollouts are padded on the right to one pass, in which no rollout
attends to another; the recorded experts are enforced row by row. Shape legend: B = rollouts of a pass, W = its width,
R = B x W input rows, N = sampled tokens of a pass, V = vocabulary, F = temperature factors, L, K as in the data
contract.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.scoring import Question, Scored
from moerl.machine.scoring_memory import CHUNK_NUMBERS, PASS_ROWS
from moerl.models.description import ModelDescription
from moerl.rollout.enforce import EnforcedRouting
from moerl.rollout.lent_weights import lent_weights
from moerl.rollout.loading import load_model

_Chunk = tuple[NDArray[np.float64], ...]
"""The first five fields of `Scored`, for some of the tokens."""


@dataclass(slots=True, eq=False)
class LoadedModels:
    """Models of checkpoints, of which those that were used last are in memory."""

    dtype: torch.dtype
    """Dtype of the weights in memory."""
    rest: torch.device
    """Device of the weights while they are not used."""
    device: torch.device
    """Device that computes."""
    most: int = 1
    """Models in memory at once, at most."""
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None
    """Callback before the first and after each pass of a call: rollouts scored, rollouts in all, and tokens scored."""
    _models: dict[Path, tuple[Any, EnforcedRouting]] = field(default_factory=dict)

    def of(self, description: ModelDescription) -> tuple[Any, EnforcedRouting]:
        """Returns the model of this directory, and the hooks that enforce its routing. Loads it if it is not in memory,
        and before that drops the one that was not used for the longest time if there is no room.

        Raises:
            EngineError: the model's routers are unknown or do not match the spec.
        """
        assert description.folder is not None
        held = self._models.pop(description.folder, None)
        if held is None:
            while len(self._models) >= self.most:
                self._models.pop(next(iter(self._models)))
                gc.collect()  # hooks and their model refer to each other
            loaded = load_model(description.folder, dtype=self.dtype, attn_implementation="sdpa")
            loaded.set_experts_implementation("eager")
            model = loaded.to(self.rest).eval()
            held = model, EnforcedRouting(model, description.spec)
        self._models[description.folder] = held
        return held


class TransformersScorer:
    """`moerl.diagnostics.scoring.RolloutScorer` on a transformers model.

    Args:
        models: loads the model, and keeps it for other scorers.
        model: description of a Hugging Face directory.
        dtype: dtype of the arithmetic; weights of another dtype are converted layer by layer. Log-probs are computed in
            float64 from its logits.
        name, version: as in `RolloutScorer`.
    """

    offers_top_ps = True

    def __init__(
        self, models: LoadedModels, model: ModelDescription, *, dtype: torch.dtype, name: str, version: int | None
    ) -> None:
        self._models, self._description, self._dtype, self._device = models, model, dtype, models.device
        self.name, self.version, self.spec = name, version, model.spec

    @torch.inference_mode()
    def score(self, rollouts: Sequence[DumpedRollout], question: Question) -> list[Scored]:
        """Scores as `RolloutScorer` says.

        Raises:
            EngineError: the model's routers are unknown, or a layer did not use the recorded experts.
        """
        scored: dict[int, Scored] = {}
        tokens = 0
        self._models.progress(0, len(rollouts), tokens)
        model, routing = self._models.of(self._description)
        lends = (self._dtype, self._device) != (self._models.dtype, self._models.rest)
        # The model, in this scorer's arithmetic and on its device.
        with lent_weights(model, dtype=self._dtype, device=self._device) if lends else contextlib.nullcontext():
            for indices in _passes(rollouts):
                together = [rollouts[i] for i in indices]
                scored |= zip(indices, self._pass(model, routing, together, question), strict=True)
                tokens += sum(map(len, together))
                self._models.progress(len(scored), len(rollouts), tokens)
        return [scored[i] for i in range(len(rollouts))]

    def _pass(
        self, model: Any, routing: EnforcedRouting, rollouts: Sequence[DumpedRollout], question: Question
    ) -> Iterator[Scored]:
        width, spec = max(map(len, rollouts)) - 1, self.spec
        input_ids_BW = torch.zeros(len(rollouts), width, dtype=torch.int64)
        ids_BWLK = torch.zeros(len(rollouts), width, spec.num_moe_layers, spec.experts_per_token, dtype=torch.int64)
        ids_BWLK[:] = torch.arange(spec.experts_per_token)
        routed_BW = torch.zeros(len(rollouts), width, dtype=torch.bool)
        for row, rollout in enumerate(rollouts):
            count = len(rollout) - 1
            input_ids_BW[row, :count] = torch.from_numpy(rollout.token_ids[:-1].astype(np.int64))
            if rollout.expert_ids is not None:
                ids_BWLK[row, :count] = torch.from_numpy(rollout.expert_ids.astype(np.int64))
                routed_BW[row, :count] = torch.from_numpy(rollout.routed_rows.copy())
        routing.begin(ids_BWLK.flatten(0, 1).to(self._device), routed_BW.flatten().to(self._device))
        hidden_BWH = model.base_model(input_ids=input_ids_BW.to(self._device), use_cache=False).last_hidden_state
        own_BWLK = routing.end().to(torch.int16).cpu().unflatten(0, input_ids_BW.shape).numpy()
        margins_BWL = routing.margins().cpu().unflatten(0, input_ids_BW.shape).numpy()
        head = model.get_output_embeddings()
        for row, rollout in enumerate(rollouts):
            rows = slice(len(rollout) - 1)
            parts = self._chunks(head, rollout, hidden_BWH[row, rows], question)
            joined = map(np.concatenate, zip(*parts, strict=True))
            yield Scored(*joined, own_ids=own_BWLK[row, rows].copy(), margins=margins_BWL[row, rows].copy())

    def _chunks(self, head: Any, rollout: DumpedRollout, hidden_SH: Tensor, question: Question) -> list[_Chunk]:
        """Scores the sampled tokens, some at a time."""
        tokens, vocab_size = np.flatnonzero(rollout.sampled), self.spec.vocab_size
        count = max(1, CHUNK_NUMBERS // (vocab_size * len(question.factors)))
        parts: list[_Chunk] = []
        for start in range(0, len(tokens), count):
            chosen = tokens[start : start + count]
            logits_NV = head(hidden_SH[torch.from_numpy(chosen - 1).to(self._device)])
            parts.append(_score_chunk(logits_NV[:, :vocab_size], rollout, chosen, question))
        return parts


def _score_chunk(logits_NV: Tensor, rollout: DumpedRollout, tokens: NDArray[np.int64], question: Question) -> _Chunk:
    """Returns the first five fields of `Scored` for some tokens. tokens: int64 [N], indices of sampled ones; row n of
    the logits precedes `tokens[n]`."""
    device = logits_NV.device
    said_N = torch.from_numpy(rollout.temperatures[tokens].astype(np.float64)).to(device)
    said_N = said_N.masked_fill(said_N <= 0, 1e-4)  # greedy: as good as certain
    targets_N1 = torch.from_numpy(rollout.token_ids[tokens].astype(np.int64)).to(device)[:, None]
    listed_NV = _listed(rollout, tokens, logits_NV)
    # A token outside of its own set has no log-prob in the set, nor has a token without a set.
    in_set_N1 = listed_NV.gather(1, targets_N1)
    allowed_NV = listed_NV | ~in_set_N1
    raw_NV = logits_NV.double()
    kept, full = list[Tensor](), list[Tensor]()
    first_NV = torch.zeros(())
    for number, factor in enumerate(question.factors):
        logprobs_NV = (raw_NV / (said_N * factor)[:, None]).log_softmax(-1)
        own_N = logprobs_NV.gather(1, targets_N1)[:, 0]
        full.append(own_N)
        kept.append(own_N - logprobs_NV.masked_fill(~allowed_NV, -torch.inf).logsumexp(-1))
        if number == 0:
            first_NV = logprobs_NV
    mass_N = first_NV.exp().mul(allowed_NV).sum(-1).clamp(max=1.0)
    least_N = first_NV.exp().masked_fill(~listed_NV, torch.inf).amin(-1)
    least_N = least_N.masked_fill(~in_set_N1[:, 0], 0.0)
    rebuilt = [_nucleus(first_NV, targets_N1, top_p) for top_p in question.top_ps]
    count = len(tokens)
    return (
        torch.stack(kept, 1).cpu().numpy(),
        torch.stack(full, 1).cpu().numpy(),
        torch.stack(rebuilt, 1).cpu().numpy() if rebuilt else np.zeros((count, 0)),
        mass_N.cpu().numpy(),
        least_N.cpu().numpy(),
    )


def _listed(rollout: DumpedRollout, tokens: NDArray[np.int64], logits_NV: Tensor) -> Tensor:
    """Returns bool [N, V]: True for ids in the listed kept set of the token; ids outside of the vocabulary are left
    out."""
    listed_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
    if rollout.kept is None:
        return listed_NV
    sizes_N = rollout.kept.sizes[tokens]
    ids = np.concatenate([rollout.kept.ids[rollout.kept.offsets[t] : rollout.kept.offsets[t + 1]] for t in tokens])
    rows = np.repeat(np.arange(len(tokens)), sizes_N)
    known = (ids >= 0) & (ids < logits_NV.shape[1])
    listed_NV[torch.from_numpy(rows[known]), torch.from_numpy(ids[known].astype(np.int64))] = True
    return listed_NV


def _nucleus(logprobs_NV: Tensor, targets_N1: Tensor, top_p: float) -> Tensor:
    """Returns float64 [N]: log-prob of the token within the most likely tokens that have probability `top_p` together,
    or, if the token is not one of these, within the tokens up to it."""
    sorted_NV, order_NV = logprobs_NV.sort(-1, descending=True)
    mass_NV = sorted_NV.exp().cumsum(-1)
    place_N1 = (order_NV == targets_N1).to(torch.int64).argmax(-1, keepdim=True)
    last_N1 = (mass_NV < top_p).sum(-1, keepdim=True).clamp(max=mass_NV.shape[1] - 1).maximum(place_N1)
    return (logprobs_NV.gather(1, targets_N1) - mass_NV.gather(1, last_N1).log())[:, 0]


def _passes(rollouts: Sequence[DumpedRollout]) -> Iterator[list[int]]:
    """Yields the indices of rollouts of each pass: of about the same length, at most `PASS_ROWS` rows with pads, or a
    longer one alone."""
    together: list[int] = []
    for index in sorted(range(len(rollouts)), key=lambda i: len(rollouts[i])):
        if together and (len(together) + 1) * (len(rollouts[index]) - 1) > PASS_ROWS:
            yield together
            together = []
        together.append(index)
    if together:
        yield together
