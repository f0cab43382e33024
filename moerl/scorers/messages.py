"""Messages between the controller and the process of a model that scores. MessagePack, no pickle.

    controller -> process    StartScorer once; then ScoreTokens, one after the other, until the connection ends
    process -> controller    ScorerAnswer to each; in the frame, float32 scores of the sampled tokens

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind"):
    pass


class StartScorer(_Message, tag="start"):
    """The first message: the model that the process loads."""

    folder: str
    """Hugging Face directory."""
    dtype: str
    """Precision of weights and activations: float32 or bfloat16."""
    support: Literal["kept", "full"]
    """Ids that log-probs are normalised over: the kept set of each token, or the vocabulary."""
    num_threads: int
    """Threads of torch in the process."""


class ScoreTokens(_Message, tag="score"):
    """Tokens of one trajectory, S of them, N sampled; arrays as little-endian bytes."""

    token_ids: bytes
    """int32 [S]."""
    sampled: bytes
    """int64 [N], ascending: places of the sampled tokens."""
    temperatures: bytes
    """float32 [N]: temperature of each sampled token, above 0."""
    kept_sizes: bytes
    """int64 [N]: ids in the kept set of each sampled token; 0 = nothing was cut."""
    kept_ids: bytes
    """int32 [sum of `kept_sizes`]."""


class ScorerAnswer(_Message, tag="answer"):
    """The answer to a message."""

    problem: str = ""
    """Text of the error that was raised; empty if there was none."""


ToScorer = StartScorer | ScoreTokens

encode = msgspec.msgpack.Encoder().encode
decode_for_scorer: Callable[[bytes], ToScorer] = msgspec.msgpack.Decoder(ToScorer).decode
decode_answer = msgspec.msgpack.Decoder(ScorerAnswer).decode
