"""Environments of verifiers, played by verifiers' own clients through the door of an episode."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_streams import END_TEXT, QUESTION, hermes, played, says, texts
from library_pythons import ROOT, python_with
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waiting import run_within

from moerl.contract.episodes import AgentEndpoint, Session, in_thread
from moerl.episodes.play import PlayedEpisode

pytestmark = pytest.mark.environments
ADDED = '<tool_call>\n{"name": "add", "arguments": {"of": [2, 2]}}\n</tool_call>'
MARKS = (
    *("<|endoftext|>", END_TEXT, "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)


async def verifiers(endpoint: AgentEndpoint, *words: str) -> dict[str, Any]:
    """Runs an environment of verifiers; returns what it says of its episode."""
    command = [python_with("verifiers"), str(ROOT / "tests" / "verifiers_agent.py"), *words]
    environment = {**os.environ, **endpoint.environment, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    done = await in_thread(lambda: run_within(command, 500, env=environment))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_game_in_turns_is_played_by_messages_and_its_score_comes_back() -> None:
    seen: dict[str, Any] = {}

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        seen.update(await verifiers(endpoint, "eval", "turns"))
        session.rewards["reward"] = seen["rewards"]["found"]

    episode = played(agent, says("four", "5", "7"))
    assert (seen["errors"], seen["rewards"], seen["turns"]) == ([], {"found": 1.0}, 3)
    (text,) = texts(episode)
    more = {"role": "user", "content": "more"}
    answers = [{"role": "assistant", "content": each} for each in ("four", "5", "7")]
    whole = hermes([QUESTION, answers[0], more, answers[1], more, answers[2]], [], False)
    assert text == whole.removesuffix("\n"), "one session, as it was sampled"
    assert episode.records[0].values["rewards"]["reward"] == 1.0


def test_a_tool_is_called_by_messages_in_an_episode_of_one_session() -> None:
    seen: dict[str, Any] = {}

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        seen.update(await verifiers(endpoint, "eval", "tool"))

    (text,) = texts(played(agent, says(ADDED, "4")))
    assert (seen["errors"], seen["rewards"], seen["turns"]) == ([], {"found": 1.0}, 2)
    assert f"{ADDED}{END_TEXT}\n<|im_start|>tool\n4{END_TEXT}\n" in text


class ByteTokenizer:
    """Tokenizer of bytes, with the marks that Qwen3 has; the end of a turn is 1, as in the streams of tests."""

    def __init__(self, folder: Path) -> None:
        # The models of recorded streams have 100 ids. Spaces and newlines are written in the alphabet of bytes.
        alphabet = [each for each in string.printable[:94] if each not in "`~^@$%|\\"] + ["\u0120", "\u010a"]
        vocabulary = {text: number for number, text in enumerate([*MARKS, *alphabet])}
        assert len(vocabulary) < 100
        tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(MARKS))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TEXT).save_pretrained(folder)
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def played_by_ids(folder: Path, kind: str, *answers: str) -> tuple[dict[str, Any], PlayedEpisode, list[str]]:
    """Plays an environment whose client sends token ids; returns what it says, the episode and its texts."""
    tokenizer, seen = ByteTokenizer(folder), dict[str, Any]()

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        seen.update(await verifiers(endpoint, "train", kind, str(folder)))

    stream = says(*answers, encode=tokenizer.encode)
    # The end tokens of Qwen3, as its model directories name them and its renderer sends them.
    episode = played(agent, stream, encode=tokenizer.encode, decode=tokenizer.decode, stop_ids=(0, 1))
    assert episode.error is None, str(episode.error)
    return seen, episode, [tokenizer.decode(each.values["token_ids"].tolist()) for each in episode.records]


def test_a_game_in_turns_is_played_by_token_ids_in_the_session_of_the_prompt(tmp_path: Path) -> None:
    seen, episode, (text,) = played_by_ids(tmp_path, "turns", "four", "5", "7")
    assert (seen["errors"], seen["rewards"], seen["turns"]) == ([], {"found": 1.0}, 3)
    assert text.endswith(f"more{END_TEXT}\n<|im_start|>assistant\n7{END_TEXT}")
    assert sum(seen["tokens"]) == len(episode.records[0].values["token_ids"]), "verifiers has the same tokens"


def test_a_tool_is_called_by_token_ids(tmp_path: Path) -> None:
    seen, _, found = played_by_ids(tmp_path, "tool", ADDED, "4")
    assert (seen["errors"], seen["rewards"], seen["turns"]) == ([], {"found": 1.0}, 2)
    assert f"{ADDED}{END_TEXT}\n<|im_start|>user\n<tool_response>\n4\n</tool_response>" in found[0]
