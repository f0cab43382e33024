"""`task=openenv` against a real server of OpenEnv."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from game_streams import earned, opened, played, rewards, texts
from library_pythons import python_with

from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.open_env import connect

pytestmark = pytest.mark.environments
SERVER = Path(__file__).parents[3] / "openenv_server.py"


@contextmanager
def serving(num_sessions: int) -> Iterator[str]:
    words = [python_with("openenv"), str(SERVER), str(num_sessions)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(8) as address:
        yield address


def test_a_turn_is_the_json_of_an_action_and_rewards_are_summed(url: str) -> None:
    task = opened("task=openenv", f"task.url='{url}'", "task.observation=text", "task.instructions=Count.")
    (prompt,) = task.prompts("train", 1)
    number = int(prompt.facts["opening"].split()[-1])
    assert prompt.facts["opening"] == f"Count.\n\ngo on behind {number}"
    episode = played(task, f'{{"said": {number + 1}}}', '{"said": 0}', f'{{"said": {number + 2}}}')
    assert rewards(episode) == [{"reward": 1.0, "accuracy": 1.0, "turns": 3.0, "finished": 1.0}]
    assert earned(episode) == [0.5, 0.0, 0.5]
    assert texts(episode)[0].count("yes") == 1


def test_the_text_of_a_turn_can_be_a_field_of_the_action(url: str) -> None:
    task = opened("task=openenv", f"task.url='{url}'", "task.action=said", "task.text_as=raw", "task.max_turns=2")
    (prompt,) = task.prompts("train", 1)
    assert prompt.text.startswith('{"text": "go on behind ')
    number = int(prompt.text.split()[-1].rstrip('"}'))
    assert rewards(played(task, str(number + 1), "0")) == [
        {"reward": 0.5, "accuracy": 0.0, "turns": 2.0, "finished": 0.0}
    ]


def test_what_is_no_action_uses_up_a_turn_and_the_policy_reads_why(url: str) -> None:
    task = opened("task=openenv", f"task.url='{url}'", "task.observation=text", "task.max_turns=3")
    episode = played(task, "seven", '{"said": "seven"}', f'{{"said": {"9" * 400}}}')
    assert rewards(episode)[0]["turns"] == 3.0
    (text,) = texts(episode)
    assert "not the JSON of an action" in text
    assert "no such action: said: " in text


def test_seeds_and_options_reach_the_reset(url: str) -> None:
    keys = ("task=openenv", f"task.url='{url}'", "task.observation=text")
    begun = [prompt.text for prompt in opened(*keys).prompts("train", 4)]
    assert len(set(begun)) > 1
    assert [prompt.text for prompt in opened(*keys).prompts("train", 4)] == begun
    assert "go on behind 10" in opened(*keys, "task.options={start: 1000}").prompts("train", 1)[0].text


def test_an_environment_that_fails_refuses_the_episode(url: str) -> None:
    error = played(opened("task=openenv", f"task.url='{url}'"), '{"said": -1}').error
    assert error is not None
    assert "OpenEnv: step failed; seen: EXECUTION_ERROR negative" in str(error.seen)


def test_a_server_without_a_free_session_is_named_with_what_to_do() -> None:
    with serving(1) as address:
        task = opened("task=openenv", f"task.url='{address}'", "task.observation=text")
        task.prompts("train", 1)

        async def both() -> None:
            async with connect(address, 60.0) as first:
                await first.ask("reset", {"seed": 0})
                async with connect(address, 60.0) as second:
                    await second.ask("reset", {"seed": 0})

        with pytest.raises(EpisodeError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
            asyncio.run(both())


def test_an_address_without_a_server_and_a_field_that_is_not_there_are_refused_before_a_run(url: str) -> None:
    with pytest.raises(ConfigError, match=r"does not begin.*the connection failed"):
        opened("task=openenv", "task.url=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no text in the observation.*fields metadata, text"):
        opened("task=openenv", f"task.url='{url}'", "task.observation=board")
