"""Replay of recorded trajectories through transformers: log-probs by an implementation that trained nothing.

Runs in `moerl verify` and `moerl conformance`. One sequence at a time, without a cache, with transformers' own
attention and experts; nothing here shares code with the engine's decoding or the trainer's kernels, for it is to judge
both. Shape legend: S = tokens of a trajectory, R = rows of a chunk, V = vocabulary, L, K as in the data contract.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.trajectory import Trajectory
from moerl.models.description import ModelDescription
from moerl.rollout.enforce import EnforcedRouting
from moerl.rollout.loading import load_model

_CHUNK_ROWS = 128
"""Rows scored at a time; bounds the float64 logits, one row of which has the vocabulary's width."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """One trajectory by transformers."""

    logprobs: NDArray[np.float64]
    """float64 [S], nats; of each sampled token under the distribution it was drawn from (its temperature, its kept
    set), with the recorded experts; 0 if not sampled."""
    own_ids: NDArray[np.int64]
    """int64 [S-1, L, K]; experts that the routers would have chosen on the hidden states of this replay."""


class TransformersReplay:
    """A transformers model that uses the recorded experts.

    Args:
        model: of a Hugging Face directory.
        dtype: of the weights. device: that computes.

    Raises:
        EngineError: the model's routers are unknown or do not match the spec.
    """

    def __init__(self, model: ModelDescription, *, dtype: torch.dtype, device: torch.device) -> None:
        assert model.folder is not None
        loaded = load_model(model.folder, dtype=dtype, attn_implementation="sdpa")
        loaded.set_experts_implementation("eager")
        self._model = loaded.to(device).eval()
        self._device, self._spec = device, model.spec
        self._routing = EnforcedRouting(self._model, model.spec)

    @torch.inference_mode()
    def replay(self, trajectory: Trajectory) -> Replayed:
        """Scores every sampled token; rows without captured routing are left to the router.

        Raises:
            EngineError: the recorded experts were not those that the model used.
        """
        recorded = torch.from_numpy(trajectory.expert_ids.astype(np.int64)).to(self._device)
        self._routing.begin(recorded, torch.from_numpy(trajectory.routed.copy()).to(self._device))
        input_ids = torch.from_numpy(trajectory.token_ids[:-1].astype(np.int64)).to(self._device)[None]
        hidden = self._model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
        natural = self._routing.end()
        logprobs = np.zeros(len(trajectory))
        sampled = np.flatnonzero(trajectory.sampled)
        for start in range(0, len(sampled), _CHUNK_ROWS):
            tokens = sampled[start : start + _CHUNK_ROWS]
            logits_RV = self._model.get_output_embeddings()(hidden[torch.from_numpy(tokens - 1).to(self._device)])
            logprobs[tokens] = support_logprobs(logits_RV[:, : self._spec.vocab_size], trajectory, tokens)
        return Replayed(logprobs, natural.cpu().numpy())


def support_logprobs(logits_RV: Tensor, trajectory: Trajectory, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes log-probs of sampled tokens under the distributions they were drawn from.

    With z = logits / temperature: z_a - log(sum of exp z over the kept set), over the vocabulary if nothing was cut.
    A greedy token has log-prob 0, as in the contract.

    Args:
        logits_RV: any float dtype; row r precedes token `tokens[r]`.
        tokens: int64 [R]; indices of sampled tokens.

    Returns:
        float64 [R], nats.
    """
    temperatures_R = torch.from_numpy(trajectory.temperatures[tokens]).to(logits_RV.device, torch.float64)
    greedy_R = temperatures_R == 0
    z_RV = logits_RV.double() / temperatures_R.masked_fill(greedy_R, 1.0)[:, None]
    sizes = trajectory.kept.sizes[tokens]
    ids = [trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]] for t in tokens]
    rows = torch.from_numpy(np.repeat(np.arange(len(tokens)), sizes)).to(z_RV.device)
    columns = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(z_RV.device)
    outside_RV = torch.from_numpy(trajectory.truncated[tokens])[:, None].to(z_RV.device).expand_as(z_RV).clone()
    outside_RV[rows, columns] = False
    logprobs_RV = z_RV.masked_fill_(outside_RV, -torch.inf).log_softmax(-1)
    targets_R = torch.from_numpy(trajectory.token_ids[tokens].astype(np.int64)).to(z_RV.device)
    logprobs_R = logprobs_RV.gather(1, targets_R[:, None])[:, 0]
    return logprobs_R.masked_fill(greedy_R, 0.0).cpu().numpy()
