"""Episodes with environments of other libraries, on a stream that answers with the texts that a test writes."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from chat_streams import decode, hermes, says
from chat_streams import encode as encode_printable
from episode_streams import check
from factories import FULL

from moerl.config.load import load_config
from moerl.contract.ports import Prompt, RolloutRequest
from moerl.contract.trajectory import TURN_REWARDS, Lineage
from moerl.episodes.play import Episode, PlayedEpisode, play
from moerl.episodes.session import Texts
from moerl.tasks.games.seeds import SeedsTask

_KNOWN = {*string.printable[:97]}


def encode(text: str) -> list[int]:
    """Tokens are characters; others than printable ones are question marks."""
    return encode_printable("".join(each if each in _KNOWN else "?" for each in text))


def opened(*overrides: str) -> SeedsTask[Any]:
    """Opens a task as a run does, with prompts that are written."""
    keys = ("recipe=tiny", "sft.steps=0", "task.num_train=4", "task.num_dev=2", "task.num_heldout=2")
    task = load_config([*keys, *overrides], command="train").task.open()
    assert isinstance(task, SeedsTask)
    if task.has_chats:
        task.write_prompts(_written)
    return task


def _written(prompt: Prompt) -> Prompt:
    assert prompt.chat is not None
    text = hermes(prompt.chat.messages, prompt.chat.tools, True)
    return Prompt(prompt.prompt_id, text, prompt.facts, prompt.chat)


def played(task: SeedsTask[Any], *answers: str, number: int = 0, max_tokens: int = 8000) -> PlayedEpisode:
    """Plays a training prompt; the policy says the answers, whichever player is asked."""
    prompt = task.prompts("train", number + 1)[number]
    request = RolloutRequest(Lineage("r0", prompt.prompt_id, "g"), tuple(encode(prompt.text)), FULL, max_tokens, (1,))
    episode = Episode(request, partial(task.play, prompt))
    texts = Texts(encode, decode, hermes)
    (ended,) = play([episode], says(*answers), check, texts, turn_seconds=task.turn_seconds)
    return ended


def earned(episode: PlayedEpisode) -> list[float]:
    """Returns what each turn of the one session of an episode earned of its reward."""
    (trajectory,) = map(check, episode.records)
    return trajectory.scores[TURN_REWARDS][[turn.end - 1 for turn in trajectory.sampled_turns]].tolist()


def rewards(episode: PlayedEpisode) -> list[Mapping[str, float]]:
    """Returns the rewards of each session of an episode that has no error."""
    assert episode.error is None, str(episode.error)
    return [record.values["rewards"] for record in episode.records]


def texts(episode: PlayedEpisode) -> list[str]:
    """Returns the whole text of each session of an episode that has no error."""
    assert episode.error is None, str(episode.error)
    return [decode(record.values["token_ids"].tolist()) for record in episode.records]


def agents(episode: PlayedEpisode) -> Sequence[Any]:
    """Returns agent id and episode id of each session."""
    return [(each.values["lineage"].agent_id, each.values["lineage"].episode) for each in episode.records]
