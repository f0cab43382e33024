"""Log-probs of recorded tokens under a model of transformers, for `moerl.scorers.model`. Runs in a process of its own.

Shape legend: S = tokens of a trajectory, N = sampled ones, V = vocabulary, H = width.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from moerl.contract.array_codec import array_bytes, read_array
from moerl.errors import EngineError, MoerlError
from moerl.kernels.kept import segment_log_softmax
from moerl.machine.scoring_memory import CHUNK_NUMBERS
from moerl.processes.channel import receive, send
from moerl.processes.memory import keep_freed_memory
from moerl.rollout.loading import load_model
from moerl.scorers.messages import ScorerAnswer, ScoreTokens, StartScorer, decode_for_scorer, encode


def serve(connection: socket.socket) -> None:
    """Loads the model that the controller names, and scores tokens until the connection ends."""
    start = decode_for_scorer(receive(connection)[0])
    assert isinstance(start, StartScorer)
    try:
        keep_freed_memory()
        disable_progress_bar()
        torch.set_num_threads(start.num_threads)
        dtype = getattr(torch, start.dtype)
        model = load_model(Path(start.folder), dtype=dtype, attn_implementation="sdpa").eval()
        _check_head(model)
    except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
        send(connection, encode(_problem(error)))
        return
    send(connection, encode(ScorerAnswer()))
    while True:
        asked = decode_for_scorer(receive(connection)[0])
        assert isinstance(asked, ScoreTokens)
        try:
            scores = array_bytes(score_tokens(model, asked, start.support))
        except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
            send(connection, encode(_problem(error)))
        else:
            send(connection, encode(ScorerAnswer()), bytes(scores))


@torch.inference_mode()
def _check_head(model: Any) -> None:
    """Raises `EngineError` if the logits are not the product of hidden states and head, which scores are computed from:
    some models cap or scale them."""
    ids = torch.arange(4)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    head = model.get_output_embeddings()
    products = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    # Numbers that are not finite are an error of the score, which names the token.
    near = 1e-3 * float(products.nan_to_num().abs().max())
    if not torch.allclose(logits, products, rtol=1e-3, atol=near, equal_nan=True):
        raise EngineError(
            "the model changes the logits behind its head",
            seen=f"a difference of {float((logits - products).abs().max()):.2g}",
            expected="logits that are the head's products with the hidden states",
            remedy="take another model as teacher: those that cap or scale logits are not scored",
        )


def _problem(error: Exception) -> ScorerAnswer:
    return ScorerAnswer(str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}")


@torch.inference_mode()
def score_tokens(model: Any, asked: ScoreTokens, support: Literal["kept", "full"]) -> NDArray[np.float32]:
    """Returns the log-prob of each sampled token at its temperature, in nats: float32 [N], computed in float64 from the
    model's logits.

    Args:
        model: causal language model of transformers.
        support: ids that log-probs are normalised over; tokens without a kept set always over the vocabulary.
    """
    places = np.frombuffer(asked.sampled, "<i8")
    tokens = np.frombuffer(asked.token_ids, "<i4").astype(np.int64)
    temperatures_N = read_array(asked.temperatures, np.float32, len(places), "temperatures")
    sizes_N = read_array(asked.kept_sizes, np.int64, len(places), "kept_sizes")
    ids = read_array(asked.kept_ids, np.int32, int(sizes_N.sum()), "kept_ids").astype(np.int64)
    ends_N = np.cumsum(sizes_N)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and len(tokens) - 1 > longest:
        raise EngineError(
            "a rollout is longer than the model that scores can read",
            seen=f"{len(tokens) - 1} positions",
            expected=f"at most {longest}, its max_position_embeddings",
            remedy="lower rollout.max_new_tokens, or take a model that reads longer texts",
        )
    hidden_SH = model.base_model(input_ids=torch.from_numpy(tokens)[None, :-1], use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    count = max(1, CHUNK_NUMBERS // head.weight.shape[0])
    parts: list[Tensor] = []
    for first in range(0, len(places), count):
        chosen = slice(first, first + count)
        begin, end = int(ends_N[first] - sizes_N[first]), int(ends_N[chosen][-1])
        logits_NV = head(hidden_SH[places[chosen] - 1]).double() / torch.from_numpy(temperatures_N[chosen])[:, None]
        targets_N = torch.from_numpy(tokens[places[chosen]])
        parts.append(_logprobs(logits_NV, targets_N, sizes_N[chosen], ids[begin:end], support))
    return torch.cat(parts).float().numpy()


def _logprobs(
    logits_NV: Tensor, targets_N: Tensor, sizes_N: NDArray[np.int64], ids: NDArray[np.int64], support: str
) -> Tensor:
    """Returns float64 [N]. ids: kept ids of the tokens, one set behind the other."""
    full_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    if support == "full" or not len(ids):
        return full_N
    rows, listed = torch.from_numpy(np.repeat(np.arange(len(sizes_N)), sizes_N)), torch.from_numpy(ids)
    within = segment_log_softmax(logits_NV[rows, listed], rows, len(sizes_N))
    is_target = listed == targets_N[rows]
    # Every listed set holds its token once.
    return full_N.index_copy(0, rows[is_target], within[is_target])
