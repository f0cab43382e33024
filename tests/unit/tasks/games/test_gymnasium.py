"""`task=gymnasium` on real environments: texts, words for numbers, and what cannot be played."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from game_streams import earned, opened, played, rewards, texts

from moerl.errors import ConfigError
from moerl.user_function import load_function

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.environments

ENVIRONMENT = """
import gymnasium
from gymnasium import spaces

class Echo(gymnasium.Env):
    '''Says a word, and rewards whoever says it twice.'''
    observation_space = spaces.Text(40)
    action_space = spaces.Text(8)

    def __init__(self, words=("one", "two", "three"), drifts=False):
        self.words, self.drifts, self.num_resets = words, drifts, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.num_right = self.words[int(self.np_random.integers(len(self.words)))], 0
        self.num_resets += 1
        return f"say {self.word}" + (f" {id(self)}" if self.drifts else ""), {}

    def step(self, action):
        self.num_right += action == self.word
        return f"{self.num_right} of 2", 0.5 * (action == self.word), self.num_right == 2, False, {}

class Picture(Echo):
    def reset(self, **how):
        return 3, {}

def make(**options):
    return Echo(**options)

def silent():
    return Picture()

gymnasium.register("Echo-v0", entry_point=Echo)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"echo_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    load_function.cache_clear()


def word_of(text: str) -> str:
    return text.split("say ")[1].split()[0]


@pytest.mark.parametrize("place", ["id", "function"])
def test_an_environment_of_texts_is_found_by_its_id_or_by_a_function(place: str, module: str) -> None:
    name = f"{module}:Echo-v0" if place == "id" else f"{module}:make"
    task = opened("task=gymnasium", f"task.environment='{name}'", "task.instructions=Repeat it.", "task.text_as=raw")
    (prompt,) = task.prompts("train", 1)
    assert prompt.text.startswith("Repeat it.\n\nsay ")
    word = word_of(prompt.text)
    episode = played(task, word, "no", word)
    assert rewards(episode) == [{"reward": 1.0, "accuracy": 1.0, "turns": 3.0, "finished": 1.0}]
    assert "\n1 of 2\n" in texts(episode)[0]
    assert earned(episode) == [0.5, 0.0, 0.5]


def test_options_reach_the_environment_and_seeds_decide_what_it_does(module: str) -> None:
    task = opened("task=gymnasium", f"task.environment='{module}:make'", "task.options={words: [a, b, c, d, e]}")
    begun = [prompt.facts["opening"] for prompt in task.prompts("train", 4)]
    again = opened("task=gymnasium", f"task.environment='{module}:make'", "task.options={words: [a, b, c, d, e]}")
    assert [prompt.facts["opening"] for prompt in again.prompts("train", 4)] == begun
    assert len(set(begun)) > 1


def test_a_text_that_the_space_does_not_hold_uses_up_a_turn_and_is_said_to_be_none(module: str) -> None:
    task = opened("task=gymnasium", f"task.environment='{module}:make'", "task.max_turns=2")
    episode = played(task, "not a short word", "")
    assert rewards(episode) == [{"reward": 0.0, "accuracy": 0.0, "turns": 2.0, "finished": 0.0}]
    assert "no such action" in texts(episode)[0]


def test_words_stand_for_the_numbers_of_actions_and_what_stands_out_gets_brackets() -> None:
    keys = ("task.options={render_mode: ansi, is_slippery: false}", "task.actions=[left, down, right, up]")
    task = opened("task=gymnasium", "task.environment=FrozenLake-v1", *keys)
    episode = played(task, "fly", "down", "down", "right", "right", "down", " right\n")
    assert rewards(episode) == [{"reward": 1.0, "accuracy": 1.0, "turns": 7.0, "finished": 1.0}]
    (text,) = texts(episode)
    assert "[S]FFF" in text
    assert "no such action; one of: left, down, right, up" in text


def test_an_environment_that_does_not_obey_its_seed_is_refused(module: str) -> None:
    task = opened("task=gymnasium", f"task.environment='{module}:make'", "task.options={drifts: true}")
    error = played(task, "one").error
    assert error is not None
    assert "begins differently with the same seed" in str(error.seen)


def test_what_cannot_be_played_in_texts_is_refused_before_a_run(module: str) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        opened("task=gymnasium", "task.environment=NoSuchEnvironment-v0")
    with pytest.raises(ConfigError, match="its actions are no texts"):
        opened("task=gymnasium", "task.environment=FrozenLake-v1")
    with pytest.raises(ConfigError, match="not the actions of the environment"):
        opened("task=gymnasium", "task.environment=FrozenLake-v1", "task.actions=[left, right]")
    with pytest.raises(ConfigError, match="not one word for each action"):
        opened("task=gymnasium", "task.environment=FrozenLake-v1", "task.actions=[a, a, b, c]")
    with pytest.raises(ConfigError, match=r"the observation is no text.*render_mode=ansi"):
        opened("task=gymnasium", f"task.environment='{module}:silent'")
