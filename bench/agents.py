"""Cost of the door for agents, and of a thousand episodes at once whose tools take 100 ms.

`python bench/agents.py [--json FILE]`. The engine is a stand-in that computes nothing: it answers at once, or as if it
had 64 slots and needed 250 ms for a turn. So all that is measured is ours: sessions, templates, checks, HTTP.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import numpy as np
from _report import Result, command_line, json_argument, report

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import Message, Session
from moerl.contract.ports import Chat, Prompt, RolloutRecord, RolloutRequest
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.episodes.play import Episode, play
from moerl.episodes.session import Texts
from moerl.http.client import HttpClient, Request
from moerl.http.keys import Key

SPEC = ModelSpec(num_moe_layers=4, experts_per_token=2, num_experts=8, vocab_size=256, fingerprint="bench")
QUESTION = {"role": "user", "content": "What is the answer?"}
END, SAMPLED_TOKENS = 0, 16
EPISODES, TURNS = 50, 8
MANY, MANY_TURNS, TOOL_SECONDS = 1_000, 4, 0.1
SLOTS, TURN_SECONDS = 64, 0.25
MAX_OVERHEAD_MS, MAX_OVER = 2.0, 1.15


def _render(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    return "".join(f"<{each['role']}>{each['content']}\0" for each in messages) + ("<assistant>" if ask else "")


TEXTS = Texts(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), _render)
PROMPT = Prompt("p", _render([QUESTION], (), True), {}, Chat((QUESTION,)))


def answered(request: RolloutRequest) -> RolloutRecord:
    """The answer of an engine: letters, and the end of a turn."""
    num_prompt = len(request.prompt_ids)
    num_tokens, rows = num_prompt + SAMPLED_TOKENS, num_prompt + SAMPLED_TOKENS - 1
    sampled = np.zeros(num_tokens, np.bool_)
    sampled[num_prompt:] = True
    routed = np.arange(rows) >= request.known_rows
    values = {
        "spec": SPEC,
        "lineage": request.lineage,
        "token_ids": np.array([*request.prompt_ids, *[ord("a")] * (SAMPLED_TOKENS - 1), END], np.int32),
        "sampled": sampled,
        "rollout_logprobs": np.where(sampled, -1.0, 0.0).astype(np.float32),
        "kept_logmass": np.zeros(num_tokens, np.float32),
        "policy_versions": np.where(sampled, 0, -1).astype(np.int32),
        "truncated": np.zeros(num_tokens, np.bool_),
        "expert_ids": np.tile(np.array([0, 1], np.uint8), (rows, SPEC.num_moe_layers, 1)) * routed[:, None, None],
        "routed": routed,
        "kept": KeptSets(np.zeros(num_tokens + 1, np.int64), np.zeros(0, np.int32)),
        "turns": (
            Turn(0, num_prompt, TurnKind.PROMPT),
            Turn(num_prompt, num_tokens, TurnKind.SAMPLED, request.sampling),
        ),
        "finish_reason": FinishReason.STOP,
        "engine_id": "stand-in",
    }
    return RolloutRecord(request.lineage.rollout_id, "stand-in", 0, values)


class StandIn:
    """A stream that answers at once, or after `seconds` in one of `slots`."""

    def __init__(self, slots: int = 0, seconds: float = 0.0) -> None:
        self._seconds, self._asked = seconds, queue.SimpleQueue[RolloutRequest | None]()
        self._records = queue.SimpleQueue[list[RolloutRecord] | None]()
        self._slots = [threading.Thread(target=self._serve, daemon=True) for _ in range(slots)]
        for slot in self._slots:
            slot.start()

    def _serve(self) -> None:
        while (request := self._asked.get()) is not None:
            time.sleep(self._seconds)
            self._records.put([answered(request)])

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            if self._slots:
                self._asked.put(request)
            else:
                self._records.put([answered(request)])
        if not requests:
            self._records.put([])

    def end(self) -> None:
        self._records.put(None)

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        while (records := self._records.get()) is not None:
            yield records

    def close(self) -> None:
        for _ in self._slots:
            self._asked.put(None)


def played(
    environment: Callable[[Session], Awaitable[Mapping[str, float]]], count: int, stream: StandIn
) -> tuple[float, float]:
    """Returns wall and CPU seconds of that many episodes at once."""
    sampling = SamplingParams()
    episodes = [
        Episode(
            RolloutRequest(Lineage(f"r{i}", "p", "g"), tuple(TEXTS.encode(PROMPT.text)), sampling, 4096, (END,)),
            environment,
        )
        for i in range(count)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    check = lambda record: Trajectory(**record.values)  # noqa: E731 - an argument
    ends = list(play(episodes, stream, check, TEXTS, turn_seconds=60.0))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    wrong = [str(each.error) for each in ends if each.error is not None]
    assert not wrong, wrong[0]
    return wall, cpu


def direct(turns: int, tool_seconds: float) -> Callable[[Session], Awaitable[Mapping[str, float]]]:
    """An environment on a conversation."""

    async def environment(session: Session) -> Mapping[str, float]:
        chat = Conversation.of(PROMPT, session)
        for turn in range(turns):
            await chat.answer([*chat.messages, *([QUESTION] if turn else [])])
            await asyncio.sleep(tool_seconds)
        return {"reward": 1.0}

    return environment


def through_the_door(turns: int, tool_seconds: float) -> Callable[[Session], Awaitable[Mapping[str, float]]]:
    """The same by an agent that speaks HTTP, in the same loop: its client's time counts, too."""

    async def environment(session: Session) -> Mapping[str, float]:
        client = HttpClient(max_connections=1)
        async with session.serve(PROMPT) as endpoint:
            messages: list[Message] = []
            for _ in range(turns):
                messages.append(QUESTION)
                body = json.dumps({"model": "policy", "messages": messages}).encode()
                request = Request("POST", f"{endpoint.url}/chat/completions", body, Key(endpoint.key))
                async with client.ask(request, 60.0) as answer:
                    messages.append(json.loads(await answer.read(1 << 20))["choices"][0]["message"])
                await asyncio.sleep(tool_seconds)
        await client.close()
        return {"reward": 1.0}

    return environment


def main() -> None:
    """Measures, prints and, with ``--json``, writes."""
    path = json_argument(__doc__)
    played(through_the_door(2, 0.0), 2, StandIn())  # imports, caches
    turns = EPISODES * TURNS
    pairs = [
        (
            played(direct(TURNS, 0.0), EPISODES, StandIn())[0],
            played(through_the_door(TURNS, 0.0), EPISODES, StandIn())[0],
        )
        for _ in range(5)
    ]
    over = sorted((door - without) / turns * 1e3 for without, door in pairs)
    alone = sorted(without / turns * 1e3 for without, _ in pairs)
    least = MANY * MANY_TURNS * TURN_SECONDS / SLOTS
    results = [
        Result("a turn of a conversation, without a door", alone[2], unit="ms", spread=alone[-1] - alone[0]),
        Result(
            "a turn through the door, over one without, client and server",
            over[2],
            f"<= {MAX_OVERHEAD_MS}",
            over[2] <= MAX_OVERHEAD_MS,
            "ms",
            over[-1] - over[0],
        ),
    ]
    for name, environment in (("sessions", direct), ("agents over HTTP", through_the_door)):
        wall, cpu = played(environment(MANY_TURNS, TOOL_SECONDS), MANY, StandIn(SLOTS, TURN_SECONDS))
        results += [
            Result(
                f"{MANY} {name} at once, tools of 100 ms: time over that of the slots",
                wall / least,
                f"<= {MAX_OVER}",
                wall <= MAX_OVER * least,
                "x",
            ),
            Result(f"{MANY} {name} at once: CPU of a turn", cpu / MANY / MANY_TURNS * 1e3, unit="ms"),
        ]
    report([command_line(), *results], path)


if __name__ == "__main__":
    main()
