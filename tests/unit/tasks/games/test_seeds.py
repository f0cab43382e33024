"""Prompts from seeds: disjoint splits, made when needed; and a package that is missing is named with its extra."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest

from moerl.config.load import load_config
from moerl.contract.episodes import EpisodeTask, Session
from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.games.seeds import SeedsSection, SeedsTask, require_package


class CountedSection(SeedsSection):
    def open(self) -> CountedTask:
        return CountedTask(self)


class CountedTask(SeedsTask[SeedsSection]):
    """Begins with the number of its seed; keeps the seeds that were begun."""

    def __init__(self, config: SeedsSection) -> None:
        super().__init__(config)
        self.begun: list[int] = []

    def openings(self, seeds: Sequence[int]) -> list[str]:
        self.begun += seeds
        return [f"game {seed}" for seed in seeds]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        return {"reward": 0.0}


def task(text_as: Literal["raw", "chat"] = "raw") -> CountedTask:
    sizes = {"num_train": 6, "num_dev": 3, "num_heldout": 4}
    return CountedSection(name="counted", text_as=text_as, turn_seconds=5.0, max_turn_tokens=None, **sizes).open()


def test_the_splits_have_different_seeds_and_the_first_prompts_are_the_same_for_every_count() -> None:
    game = task()
    assert isinstance(game, EpisodeTask)
    splits = {name: game.prompts(name, game.size(name)) for name in ("train", "dev", "heldout")}
    seeds = [prompt.facts["seed"] for prompts in splits.values() for prompt in prompts]
    assert len(set(seeds)) == len(seeds) == 6 + 3 + 4
    assert max(seeds) < 2**31
    assert len({prompt.prompt_id for prompts in splits.values() for prompt in prompts}) == 13
    assert task().prompts("train", 2) == splits["train"][:2]
    assert splits["train"][1].text == "game 1\n"


def test_a_game_is_begun_once_and_only_if_its_prompt_is_asked_for() -> None:
    game = task()
    game.prompts("train", 2)
    game.prompts("train", 3)
    game.prompts("train", 1)
    assert game.begun == [0, 1, 2]


def test_prompts_of_messages_are_written_once_and_left_out_if_the_template_leaves_them_out() -> None:
    game = task("chat")
    assert game.has_chats

    def write(prompt: Prompt) -> Prompt | None:
        assert prompt.chat is not None
        assert prompt.text == ""
        content = prompt.chat.messages[0]["content"]
        return None if content == "game 0" else replace(prompt, text=f"<u>{content}")

    game.write_prompts(write)
    assert game.size("train") == 5
    assert game.prompts("train", 1)[0].text == "<u>game 1"
    assert game.prompts("heldout", 4)[3].text == "<u>game 2000000003"


def test_more_prompts_than_seeds_and_other_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"raise task\.num_dev"):
        task().prompts("dev", 4)
    with pytest.raises(ConfigError, match="unknown split"):
        task().size("test")


def test_an_environment_that_begins_differently_than_its_prompt_is_refused() -> None:
    game, session = task(), cast("Session", None)
    (prompt,) = game.prompts("train", 1)
    assert game.talk(prompt, session, "game 0").num_turns == 0
    with pytest.raises(EpisodeError, match="begins differently with the same seed"):
        game.talk(prompt, session, "game 1")


@pytest.mark.parametrize(("name", "package"), [("textarena", "textarena"), ("gymnasium", "gymnasium")])
def test_a_task_whose_package_is_missing_names_the_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, cast("object", None))
    keys = ("recipe=tiny", "sft.steps=0", f"task={name}")
    more = ("task.environment=FrozenLake-v1",) if name == "gymnasium" else ()
    section = load_config([*keys, *more], command="train").task
    with pytest.raises(ConfigError, match=rf"{package} is not installed.*moerl\[environments\]"):
        section.open()


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_games").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="no_such_games is not installed"):
        require_package("no_such_games", "any")
    require_package("json", "any")
