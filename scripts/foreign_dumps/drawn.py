"""Contents of the dumps: a few conversations with everything that a system can record of them, drawn once.

A model of three layers, the first of them dense, with two of eight experts. The dense layer's routes are zeros, as
SGLang reports them.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NUM_LAYERS, NUM_EXPERTS, EXPERTS_PER_TOKEN, VOCABULARY = 3, 8, 2, 100
STEP = 4

_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
    ((5, 6), (3,), "stop"),
    ((4, 3, 2, 4), (3, 4), "stop"),
    ((3, 7), (4,), "length"),
)
"""For each conversation: lengths of what is given and sampled in turn, a version for each answer, how it ended."""


@dataclass(frozen=True)
class Answer:
    """Answer of an engine: tokens, log-probs and kept sets of R tokens, and the version that sampled them."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[list[int]]
    version: int
    finish: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """S tokens: a prompt, an answer, and for further answers the tokens of a tool before each.

    expert_ids: [S-1, NUM_LAYERS, EXPERTS_PER_TOKEN]. trainer_logprobs: S, zeros if not sampled.
    """

    prompt: list[int]
    prompt_text: str
    answers: list[Answer]
    tools: list[list[int]]
    expert_ids: list[list[list[int]]]
    trainer_logprobs: list[float]

    @property
    def tokens(self) -> list[int]:
        """All S of them."""
        return [token for _, tokens in self.spans() for token in tokens]

    def spans(self) -> list[tuple[Answer | None, list[int]]]:
        """Returns the parts of the conversation in order: tokens, with the answer that sampled them or None."""
        spans: list[tuple[Answer | None, list[int]]] = [(None, self.prompt)]
        for number, answer in enumerate(self.answers):
            spans += [(None, self.tools[number - 1])] if number else []
            spans += [(answer, answer.tokens)]
        return spans


def conversations() -> list[Conversation]:
    """The same ones every time."""
    rng = np.random.default_rng(20260821)
    return [_conversation(rng, number, *shape) for number, shape in enumerate(_SHAPES)]


def meta_info(conversation: Conversation, number: int, top_p_names: tuple[str, str] | None = None) -> dict[str, Any]:
    """Builds the meta_info of SGLang's answer `number`, whose prompt was all that came before it.

    top_p_names: of kept ids and of their offsets, in the layout of slime's patch; None leaves them out.
    """
    answer, before = conversation.answers[number], _num_before(conversation, number)
    rows = np.asarray(conversation.expert_ids[: before + len(answer.tokens) - 1], np.int32)
    meta: dict[str, Any] = {
        "finish_reason": {"type": answer.finish},
        "weight_version": str(answer.version),
        "prompt_tokens": before,
        "completion_tokens": len(answer.tokens),
        "cached_tokens": 0,
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(answer.logprobs, answer.tokens, strict=True)
        ],
        "routed_experts": _base64(rows),
    }
    if top_p_names is not None:
        ids, offsets = top_p_names
        meta[ids] = _base64(np.concatenate([np.asarray(each, np.int32) for each in answer.kept]))
        meta[offsets] = _base64(np.cumsum([0, *map(len, answer.kept)]).astype(np.int32))
    return meta


def stored() -> dict[str, Any]:
    """Returns the drawn conversations as JSON, for tests that read the dumps."""
    return {
        "num_layers": NUM_LAYERS,
        "experts_per_token": EXPERTS_PER_TOKEN,
        "step": STEP,
        "conversations": [asdict(each) for each in conversations()],
    }


def _num_before(conversation: Conversation, number: int) -> int:
    return len(conversation.prompt) + sum(
        len(conversation.answers[earlier].tokens) + len(conversation.tools[earlier]) for earlier in range(number)
    )


def _conversation(
    rng: np.random.Generator, number: int, lengths: tuple[int, ...], versions: tuple[int, ...], finish: str
) -> Conversation:
    given, sampled = lengths[::2], lengths[1::2]
    answers = [
        _answer(rng, length, version, finish if turn == len(versions) - 1 else "stop", f"answer {number}.{turn}")
        for turn, (length, version) in enumerate(zip(sampled, versions, strict=True))
    ]
    tokens = [rng.integers(0, VOCABULARY, length).tolist() for length in given]
    chosen = rng.random((sum(lengths) - 1, NUM_LAYERS, NUM_EXPERTS)).argsort(axis=2)[:, :, :EXPERTS_PER_TOKEN]
    chosen[:, 0] = 0
    whole = Conversation(tokens[0], f"question {number}?", answers, tokens[1:], chosen.tolist(), [])
    trainer = [
        value for answer, span in whole.spans() for value in (_nearby(rng, answer) if answer else [0.0] * len(span))
    ]
    return Conversation(**{**vars(whole), "trainer_logprobs": trainer})


def _answer(rng: np.random.Generator, length: int, version: int, finish: str, text: str) -> Answer:
    tokens = rng.integers(0, VOCABULARY, length)
    kept = [np.union1d(rng.integers(0, VOCABULARY, rng.integers(0, 4)), token).tolist() for token in tokens]
    return Answer(tokens.tolist(), _floats(-rng.exponential(1.0, length)), kept, version, finish, text)


def _nearby(rng: np.random.Generator, answer: Answer) -> list[float]:
    return _floats(np.asarray(answer.logprobs) + rng.normal(0.0, 0.01, len(answer.logprobs)))


def _floats(values: np.ndarray) -> list[float]:
    """Rounds values to float32, so that all systems store the same numbers."""
    return values.astype(np.float32).tolist()


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()
