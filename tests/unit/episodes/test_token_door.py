"""Agents that send token ids: sessions are found by their tokens, and re-encoded answers are refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from chat_streams import END, END_TEXT, QUESTION, decode, encode, hermes, message, played, says, texts

from moerl.contract.episodes import AgentEndpoint, Session, in_thread
from moerl.contract.ports import Prompt

PROMPT = encode(hermes([QUESTION], [], True))
MORE = encode("\n<|im_start|>user\nand one?<|im_end|>\n<|im_start|>assistant\n")


async def generate(endpoint: AgentEndpoint, ids: Sequence[int], **fields: Any) -> httpx.Response:
    body = {"model": "any", "token_ids": list(ids), **fields}
    headers = {"Authorization": f"Bearer {endpoint.key}", "X-Session-ID": "a"}
    url = endpoint.url.removesuffix("/v1") + "/inference/v1/generate"
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        return await in_thread(lambda: client.post(url, json=body, headers=headers))


async def sampled(endpoint: AgentEndpoint, ids: Sequence[int], **fields: Any) -> list[int]:
    answer = await generate(endpoint, ids, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_ids_behind_an_answer_go_on_in_its_session_and_the_answer_has_what_clients_read():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        params = {"stop_token_ids": [END], "logprobs": 1, "skip_special_tokens": False, "temperature": 1.0}
        content = (await generate(endpoint, PROMPT, sampling_params=params, cache_salt="x")).json()
        choice = content["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([*encode("four"), END], "stop")
        rows = choice["logprobs"]["content"]
        assert [row["token"] for row in rows] == [f"token_id:{each}" for each in choice["token_ids"]]
        logprobs.extend(row["logprob"] for row in rows)
        cut = await generate(endpoint, [*PROMPT, *choice["token_ids"], *MORE], sampling_params={"max_tokens": 2})
        assert cut.json()["choices"][0]["finish_reason"] == "length"

    logprobs: list[float] = []
    episode = played(agent, says("four", "five"))
    start = hermes([QUESTION], [], True) + "four" + END_TEXT + decode(MORE)
    assert texts(episode) == [start + "fi"]
    kept = episode.records[0].values
    assert kept["rollout_logprobs"][len(PROMPT) : len(PROMPT) + 5].tolist() == logprobs


def test_another_continuation_is_a_fork_and_another_beginning_a_session():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = [*PROMPT, *await sampled(endpoint, PROMPT)]
        await sampled(endpoint, [*first, *MORE])
        await sampled(endpoint, [*first, *encode("other")])
        await asyncio.gather(*(sampled(endpoint, PROMPT) for _ in range(2)))
        await sampled(endpoint, encode("a sub-agent"))

    episode = played(agent, says("1", "2", "3", "4", "4", "5"))
    found = texts(episode)
    assert len(found) == 5
    lineages = [record.values["lineage"] for record in episode.records]
    assert [each.parent_rollout_id for each in lineages] == ["", "r0", "", "", ""]
    assert [int(record.values["sampled"].sum()) for record in episode.records] == [4, 2, 2, 2, 2]
    assert found[-1] == f"a sub-agent5{END_TEXT}"


def test_an_answer_that_was_encoded_again_is_refused_and_not_an_observation():
    """Tokenizer in which capitals are small letters: two lists of ids are one text."""

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = [*PROMPT, *await sampled(endpoint, PROMPT)]
        capital = [*PROMPT, *encode("FOUR"), END]
        answer = await generate(endpoint, [*capital, *MORE])
        assert answer.status_code == 400
        assert f"another id at place {len(PROMPT)}" in answer.json()["error"]["message"]
        assert len(await sampled(endpoint, [*first, *MORE])) == 5

    episode = played(agent, says("four", "five"), decode=lambda ids: decode(ids).lower())
    assert len(texts(episode)) == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling_params": {"temperature": 0.1}}, "temperature"),
        ({"sampling_params": {"stop_token_ids": [5]}}, "stop_token_ids"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"seed": 1}}, "sampling_params.seed"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty"),
        ({"features": {"x": 1}}, "features"),
        ({"stream": True}, "stream"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"token_ids": ["a"]}, "token_ids.0"),
    ],
)
def test_a_field_that_a_run_does_not_do_is_refused_by_name(fields: dict[str, Any], name: str):
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await generate(endpoint, **({"ids": PROMPT} | fields | _ids(fields)))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"generate: {name};")
        await sampled(endpoint, PROMPT)

    assert len(texts(played(agent, says("four")))) == 1


def _ids(fields: dict[str, Any]) -> dict[str, Any]:
    return {"ids": fields.pop("token_ids")} if "token_ids" in fields else {}


def test_fields_that_are_to_be_left_aside_are():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await sampled(endpoint, PROMPT, sampling_params={"temperature": 0.1, "seed": 3})

    assert len(texts(played(agent, says("four"), ignored=["temperature", "seed"]))) == 1


def test_messages_and_ids_do_not_mix_in_one_session():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        await sampled(endpoint, [*PROMPT, *encode("four"), END, *MORE])
        with pytest.raises(AssertionError, match="used without its door"):
            await message(endpoint, [QUESTION, first, {"role": "user", "content": "and two?"}])

    assert len(texts(played(agent, says("four", "five")))) == 1


def test_a_fork_goes_on_as_its_own_session():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        ids = list(PROMPT)
        for _ in range(3):
            ids += [*await sampled(endpoint, ids), *MORE]
        branch = [*PROMPT, *encode("1"), END, *encode("other")]
        for _ in range(3):
            branch += [*await sampled(endpoint, branch), *MORE]

    episode = played(agent, says("1", "2", "3", "a", "b", "c"))
    assert len(texts(episode)) == 2
    assert [int(record.values["sampled"].sum()) for record in episode.records] == [6, 6]


def test_two_answers_to_the_same_ids_can_both_be_gone_on_with():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        for answer in (await sampled(endpoint, PROMPT), await sampled(endpoint, PROMPT)):
            await sampled(endpoint, [*PROMPT, *answer, *MORE])

    assert len(texts(played(agent, says("1", "2", "3", "4")))) == 2


@pytest.mark.parametrize(
    "answer",
    [[*encode("four"), END], encode("four "), encode("FOUR "), [*encode("other"), END]],
    ids=["trimmed", "without its end", "encoded again", "another"],
)
def test_something_else_in_the_place_of_an_answer_is_refused_and_no_observation(answer: list[int]):
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await sampled(endpoint, PROMPT)
        refused = await generate(endpoint, [*PROMPT, *answer, *MORE])
        assert refused.status_code == 400
        assert "other ids in the place of an answer" in refused.json()["error"]["message"]

    assert len(texts(played(agent, says("four "), decode=lambda ids: decode(ids).lower()))) == 1


def test_each_door_has_its_own_texts():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        other = session.fork("b")
        session.rewards["reward"], other.rewards["reward"] = 1.0, -1.0
        async with other.serve(Prompt("p", "", {})) as second:
            await sampled(second, PROMPT)
            await sampled(endpoint, PROMPT)

    episode = played(agent, says("b", "a"))
    found = {
        record.values["rewards"]["reward"]: decode(record.values["token_ids"].tolist()) for record in episode.records
    }
    assert found[1.0].endswith(f"a{END_TEXT}")
    assert found[-1.0].endswith(f"b{END_TEXT}")


def test_ids_that_no_tokenizer_has_are_refused():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await sampled(endpoint, PROMPT)
        assert (await generate(endpoint, [2**32 + 1])).status_code == 400

    assert len(texts(played(agent, says("four")))) == 1
