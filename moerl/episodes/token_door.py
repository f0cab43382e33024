"""Token ids of agents: each request goes on with a session of the episode, or opens one.

Clients that render messages themselves send ids, as `POST /inference/v1/generate` of vLLM takes them. The session is
found by its tokens. Ids that say the same as tokens of the episode in another way are refused: the policy would read
its own words as somebody else's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.contract.spans import num_equal
from moerl.contract.trajectory import FinishReason
from moerl.episodes.chat_request import (
    Limit,
    SamplingFields,
    StrictFields,
    Zero,
    read_fields,
    refused,
    require_sampling,
    token_usage,
)
from moerl.episodes.session import TokenSession
from moerl.errors import EpisodeError
from moerl.http.server import JsonReply

_WHAT = "generate"
Id = Annotated[int, Field(ge=0, lt=2**31)]


class TokenSampling(SamplingFields):
    """How tokens are sampled, as clients of vLLM say it."""

    max_tokens: Limit | None = None
    """Limit of the turn."""
    stop_token_ids: tuple[Id, ...] = ()
    """End tokens of the run, in any order, or nothing."""
    n: Literal[1] = 1
    """Answers of a request."""
    logprobs: Annotated[int, Field(ge=0, le=1)] = 1
    """The log-prob of the sampled token always comes, no others."""
    min_tokens: Zero = 0
    """None."""
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0
    """None."""
    skip_special_tokens: bool = False
    """No text is written."""
    spaces_between_special_tokens: bool = True
    """No text is written."""
    routed_experts_prompt_start: int = 0
    """Routes stay with the trainer, which has them of every token."""


class TokenRequest(StrictFields):
    """A request for tokens behind tokens."""

    token_ids: Annotated[list[Id], Field(min_length=1)]
    """All ids so far."""
    sampling_params: TokenSampling = TokenSampling()
    """Distribution and limits."""
    model: Any = None
    """Label."""
    request_id: str = ""
    """Id that the answer repeats."""
    cache_salt: Any = None
    """Label: caches are those of the engine."""
    priority: Annotated[int, Field(ge=0, le=0)] = 0
    """None."""
    stream: Literal[False] = False
    """The answer comes whole."""


class TokenDoor:
    """Sessions of one episode, by their tokens. Belongs to the event loop of the episodes."""

    def __init__(self, session: TokenSession, ignored: Collection[str]) -> None:
        self._root, self._ignored = session, ignored
        # Sessions of this door: the environment may have opened others, or have served them to somebody else.
        self._own = [session]

    async def generate(self, body: object) -> JsonReply:
        """Answers a request. Raises MoerlError if it cannot be carried out."""
        if isinstance(body, dict) and isinstance(body.get("sampling_params"), dict):
            known = {name: each for name, each in body["sampling_params"].items() if name not in self._ignored}
            body = {**body, "sampling_params": known}
        request = read_fields(TokenRequest, _WHAT, body, self._ignored)
        params, run = request.sampling_params, self._root.request
        require_sampling(_WHAT, params, run.sampling)
        if params.stop_token_ids and set(params.stop_token_ids) != set(run.stop_ids):
            expected = f"{sorted(run.stop_ids)}, as the run samples"
            raise refused(f"{_WHAT}: stop_token_ids", params.stop_token_ids, expected)
        session = self._session(request.token_ids)
        turn = await session.sample(params.max_tokens)
        rows = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
        ]
        ended = "stop" if turn.finish_reason is FinishReason.STOP else "length"
        choice = {"index": 0, "token_ids": list(turn.token_ids), "logprobs": {"content": rows}, "finish_reason": ended}
        usage = token_usage(len(request.token_ids), len(turn.token_ids))
        name = request.request_id or f"{session.rollout_id}-{len(session.turns)}"
        return JsonReply({"request_id": name, "choices": [choice], "usage": usage})

    def _session(self, ids: list[int]) -> TokenSession:
        """Returns a session with these ids, which samples nothing."""
        found, num_turns, place, is_free = None, -1, -1, False
        for session in self._own:
            shared = _turns_shared(session, ids)
            end = session.ends[shared] if shared >= 0 else -1
            # A turn can be sampled behind its latest one, and that is where the ids go on.
            free = shared == len(session.turns) and len(session.token_ids) == session.ends[-1] and not session.is_asking
            if (end, free) > (place, is_free):
                found, num_turns, place, is_free = session, shared, end, free
        self._require_answers(ids, max(place, 0))
        if found is None:
            found = self._root.begin(ids, f"agent-{len(self._own)}")
            self._own.append(found)
        elif not is_free:
            found = found.fork(num_turns=num_turns)
            self._own.append(found)
        found.extend(ids[len(found.token_ids) :])
        return found

    def _require_answers(self, ids: list[int], place: int) -> None:
        """Raises EpisodeError if ids hold something else in the place of a turn that a session has sampled, or say what
        it says from `place` on, to the end of its prompt or next turn, in other tokens."""
        for session in self._own:
            for turn in session.turns:
                start = turn.turns[-1].start
                if place <= start < len(ids) and session.token_ids[:start] == ids[:start]:
                    raise EpisodeError(
                        f"{_WHAT}: other ids in the place of an answer",
                        seen=f"another id at place {num_equal(session.token_ids, ids)}",
                        expected=f"the ids that were sampled from place {start} on, or none behind it",
                        remedy="append to the ids of the answers: they are not trimmed, cut or encoded again",
                    )
            end = next((each for each in session.ends if each > place), None)
            if end is None or session.token_ids[:place] != ids[:place]:
                continue
            text = self._root.voice.texts.decode(session.token_ids[place:end])
            if text and self._root.voice.texts.decode(ids[place:]).startswith(text):
                raise EpisodeError(
                    f"{_WHAT}: the tokens of earlier turns were encoded again",
                    seen=f"another id at place {num_equal(session.token_ids, ids)}, for the same text",
                    expected=f"the {end} ids so far, as they were sent and sampled",
                    remedy="append to the ids of the answers; do not encode a text that the policy has sampled",
                )


def _turns_shared(session: TokenSession, ids: list[int]) -> int:
    """Returns behind how many turns of a session ids go on; -1 if not even behind its prompt."""
    # Ids that break off before the end of a turn do so before the end of each later one.
    return bisect_left(session.ends, True, key=lambda end: session.token_ids[:end] != ids[:end]) - 1
