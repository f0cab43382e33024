"""A dump of an episode as agents play it: a tool, a fork, a sub-agent, and a turn that two versions sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from chat_streams import END, QUESTION, TEXTS, TOOL, message, played, says
from factories import make_trajectory

from moerl.contract.disk import write_parquet
from moerl.contract.episodes import AgentEndpoint, Session
from moerl.contract.spans import spans_of
from moerl.contract.trajectory import Trajectory

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ANSWERS = (f"I add.\n{CALL}", "It is 4.\nIs it?", "Sure: 4.", "maybe 5", "yes <b>4</b>")


def trajectories() -> list[Trajectory]:
    """Sessions of one episode: the first one; its fork behind the first turn; a sub-agent."""

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        history: list[Mapping[str, Any]] = [QUESTION]
        for other in ({"role": "tool", "content": "4"}, {"role": "user", "content": "sure?"}, None):
            answer = await message(endpoint, history, tools=[TOOL])
            history += [answer, other or {}]
        await message(endpoint, [*history[:2], {"role": "tool", "content": "5"}], tools=[TOOL])
        helper = session.open("Is it 4? ", "checker")
        helper.rewards["reward"] = 0.25
        await helper.sample()

    episode = played(agent, says(*ANSWERS), tools=[TOOL])
    assert episode.error is None, episode.error
    made = [Trajectory(**record.values) for record in episode.records]
    versions = [np.where(each.sampled, 3, -1).astype(np.int32) for each in made]
    # The second turn was going on when new weights came.
    second = [turn for turn in made[0].turns if turn.sampling is not None][1]
    versions[0][second.start + 6 :][made[0].sampled[second.start + 6 :]] = 4
    return [replace(each, policy_versions=new) for each, new in zip(made, versions, strict=True)]


def write_dump(path: Path) -> None:
    """Writes that episode, and one of a single turn with a lower reward."""
    plain = make_trajectory(np.random.default_rng(0), rollout_id="r1", rewards={"reward": 0.0}, num_sampled=4)
    plain = replace(plain, token_ids=plain.token_ids.clip(2, 90))
    written = [*trajectories(), plain]
    spans = [[*spans_of(each, TEXTS.decode, {END})] for each in written]
    texts = [TEXTS.decode(each.token_ids[each.sampled].tolist()) for each in written]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(path, written, texts=texts, prompts=["the prompt"] * len(written), spans=spans)
