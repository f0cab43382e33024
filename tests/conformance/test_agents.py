"""Agents over HTTP while weights change: every token is what plain transformers computes with its version's weights."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from chat_streams import ask
from conformance_cases import TIED, Build, Engine, Subject, checkpoint, forward, log_softmax, make_requests
from episode_texts import TEXTS
from full_updates import send
from transformers import Qwen3MoeForCausalLM

from moerl.contract.episodes import AgentEndpoint, Session, in_thread
from moerl.contract.ports import Chat, Prompt
from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.episodes.play import Episode, play
from moerl.episodes.session import TokenSession
from moerl.rollout.fleet.engine import FleetEngine

QUESTION = {"role": "user", "content": "a question"}
PROMPT = Prompt("p", TEXTS.render([QUESTION], (), True), {}, Chat((QUESTION,)))
MAX_TOKENS = 90
HANG_SECONDS = 3600.0
"""Time after which a turn or an update hangs; two hundred agents on a busy machine may wait minutes for theirs."""
Models = Mapping[int, Qwen3MoeForCausalLM]
"""By the version of their weights."""


class Progress:
    """Count of answers that wakes an updating thread: updates come in the middle, however fast an engine is."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.num_answers, self._events = 0, {number: threading.Event() for number in wanted}

    def answered(self) -> None:
        self.num_answers += 1
        if self.num_answers in self._events:
            self._events[self.num_answers].set()

    def wait(self, number: int) -> bool:
        return self._events[number].wait(HANG_SECONDS)


async def turns(endpoint: AgentEndpoint, rng: random.Random, progress: Progress) -> None:
    """Up to eight turns: observations of any length, forks from earlier turns, several answers, sub-agents."""
    history: list[Mapping[str, str]] = [QUESTION]
    for number in range(rng.randint(2, 8)):
        kind = rng.random()
        messages = history
        if kind < 0.15 and len(history) > 2:
            messages = [*history[: 2 * rng.randint(1, len(history) // 2)], {"role": "user", "content": f"or {number}"}]
        elif kind < 0.25:
            messages = [{"role": "system", "content": f"agent {number}"}, QUESTION]
        count = 2 if rng.random() < 0.15 else 1
        stop = [TEXTS.decode([rng.randint(4, 60)])] if rng.random() < 0.3 else []
        answer = await ask(endpoint, messages, max_tokens=rng.randint(1, 9), n=count, stop=stop)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
            return
        progress.answered()
        chosen = rng.choice(answer.json()["choices"])["message"]
        if messages[0] == QUESTION:
            history = [*messages, chosen, {"role": "user", "content": "more" * rng.randint(1, 3)}]


def played(engine: Engine, count: int, models: Models) -> list[Trajectory]:
    """Plays episodes while another thread sends the weights of all versions but the first, one after the other."""
    updates = {(number + 1) * count // 2: version for number, version in enumerate(list(models)[1:])}
    progress, requests = Progress(list(updates)), make_requests(count, MAX_TOKENS)

    async def agent(session: Session) -> Mapping[str, float]:
        assert isinstance(session, TokenSession)
        async with session.serve(PROMPT) as endpoint:
            await turns(endpoint, random.Random(session.rollout_id), progress)
        return {"reward": 1.0}

    def update() -> None:
        for number, version in updates.items():
            assert progress.wait(number)
            tensors = {name: tensor for name, tensor in checkpoint(models[version]) if name not in TIED}
            send(engine, version, tensors)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    episodes = [Episode(request, agent) for request in requests]
    check = lambda record: Trajectory(**record.values)  # noqa: E731 - an argument
    ends = list(play(episodes, engine.stream(), check, TEXTS, turn_seconds=HANG_SECONDS))
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    assert [str(each.error) for each in ends if each.error is not None] == []
    assert len({each.rollout_id for each in ends}) == len(ends) == count
    return [Trajectory(**record.values) for each in ends for record in each.records]


def test_a_turn_after_an_update_reads_all_that_is_new_to_it_with_the_new_weights(build: Build, subject: Subject):
    """A fork has left all tokens of the second turn's prompt, the observation too, in a prefix cache before."""
    engine, models = build(), {version: subject.model(version) for version in (0, 1)}
    ready, updated = Progress([6]), threading.Event()

    async def updated_between_turns(session: Session) -> Mapping[str, float]:
        await session.sample(5)
        session.observe("an observation of some length")
        await session.fork().sample(3)
        ready.answered()
        await in_thread(lambda: updated.wait(HANG_SECONDS))
        await session.sample(5)
        return {"reward": 1.0}

    def update() -> None:
        assert ready.wait(6)
        send(engine, 1, {name: tensor for name, tensor in checkpoint(models[1]) if name not in TIED})
        updated.set()

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    episodes = [Episode(request, updated_between_turns) for request in make_requests(6, MAX_TOKENS)]
    check = lambda record: Trajectory(**record.values)  # noqa: E731 - an argument
    ends = list(play(episodes, engine.stream(), check, TEXTS, turn_seconds=HANG_SECONDS))
    thread.join(HANG_SECONDS)
    for episode in ends:
        assert episode.error is None
        trajectory = Trajectory(**episode.records[0].values)
        first, second = (turn for turn in trajectory.turns if turn.kind is TurnKind.SAMPLED)
        assert set(trajectory.policy_versions[first.start : first.end].tolist()) == {0}
        assert set(trajectory.policy_versions[second.start : second.end].tolist()) == {1}
        require_versions(trajectory, models, computes_again=True)
        rows, split = np.sort(trajectory.expert_ids, -1), first.end - 1
        old, new = (forward(model, trajectory.token_ids)[1][:-1] for model in models.values())
        assert np.array_equal(rows[:split], old[:split])
        assert np.array_equal(rows[split:], new[split:]), "the last token of the first turn, and the observation"
        assert not np.array_equal(old[split : second.start], new[split : second.start]), "the weights tell apart"


def require_versions(trajectory: Trajectory, models: Models, *, computes_again: bool) -> Counter[int]:
    """Returns the sampled tokens by version; each has the log-prob, kept set and experts of its version's weights.

    computes_again: the engine does so with keys and values once weights change. Otherwise no model computes the tokens
    of a turn that come behind an update in it.
    """
    computed = {version: forward(model, trajectory.token_ids) for version, model in models.items()}
    for turn in trajectory.turns:
        if turn.kind is not TurnKind.SAMPLED or turn.sampling is None:
            continue
        for t in range(turn.start, turn.end):
            if trajectory.policy_versions[t] != trajectory.policy_versions[turn.start] and not computes_again:
                break
            logits, experts = computed[int(trajectory.policy_versions[t])]
            assert np.array_equal(np.sort(trajectory.expert_ids[t - 1], -1), experts[t - 1])
            if turn.sampling.is_greedy:
                continue
            full = log_softmax(logits[t - 1] / turn.sampling.temperature)
            both = trajectory.rollout_logprobs[t] + trajectory.kept_logmass[t]
            assert both == pytest.approx(full[trajectory.token_ids[t]], abs=1e-5)
            kept = trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]]
            if trajectory.truncated[t]:
                assert trajectory.kept_logmass[t] == pytest.approx(np.log(np.exp(full[kept]).sum()), abs=1e-5)
    return Counter(trajectory.policy_versions[trajectory.sampled].tolist())


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_agents_play_while_weights_change_and_every_token_is_that_of_its_version(
    count: int, build: Build, subject: Subject
):
    engine = build()
    models = {version: subject.model(version) for version in range(4)}
    found = played(engine, count, models)
    tokens = Counter[int]()
    for trajectory in found:
        assert trajectory.routed.all()
        tokens += require_versions(trajectory, models, computes_again=isinstance(engine, FleetEngine))
    assert len(tokens) > 2, "weights changed while agents played"
    trained = [(each.lineage.episode, each.lineage.rollout_id) for each in found]
    assert len(set(trained)) == len(trained)
