"""Fault injection: an engine under test whose answers are damaged on the way, in the ways in which engines go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moerl.rollout.conformance.subject import AcrossUpdate, Answer, Ask, Subject, SubjectFacts

Damage = Callable[[Ask, Answer], Answer]
Change = Callable[[Ask], Ask]


def unchanged(ask: Ask) -> Ask:
    return ask


@dataclass
class FaultInjection:
    """damage: of each answer. change: of each request before the engine sees it. pool_tokens: that the engine
    claims."""

    subject: Subject
    damage: Damage = lambda ask, answer: answer
    change: Change = unchanged
    pool_tokens: int | None = None
    calls: list[Sequence[Ask]] = field(default_factory=list)

    @property
    def facts(self) -> SubjectFacts:
        facts = self.subject.facts
        return facts if self.pool_tokens is None else replace(facts, pool_tokens=self.pool_tokens)

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        self.calls.append(asks)
        answers = self.subject.ask([self.change(ask) for ask in asks])
        return [self.damage(ask, answer) for ask, answer in zip(asks, answers, strict=True)]

    def abort_midway(self, asks: Sequence[Ask]) -> list[Answer | None]:
        answers = self.subject.abort_midway(asks)
        return [a if a is None else self.damage(ask, a) for ask, a in zip(asks, answers, strict=True)]

    def across_update(self, asks: Sequence[Ask]) -> AcrossUpdate:
        across = self.subject.across_update(asks)
        answers = tuple(self.damage(ask, a) for ask, a in zip(asks, across.answers, strict=True))
        return replace(across, answers=answers)

    def close(self) -> None:
        self.subject.close()


def rows(edit: Callable[[Any], Any]) -> Damage:
    """Damages the routes, a copy of int64 [R, L, K]."""
    return lambda ask, answer: replace(answer, expert_ids=edit(np.array(answer.expert_ids, np.int64)))


def kept(edit: Callable[[int, Any], Any]) -> Damage:
    """Damages the kept set of each token that has one."""

    def damage(ask: Ask, answer: Answer) -> Answer:
        assert answer.kept_sets is not None
        pairs = zip(answer.token_ids.tolist(), answer.kept_sets, strict=True)
        return replace(answer, kept_sets=tuple(edit(token, ids) if len(ids) else ids for token, ids in pairs))

    return damage


def logprobs(edit: Callable[[Any, Any], Any]) -> Damage:
    """Damages the log-probs, given them and the masses of kept sets."""
    return lambda ask, answer: replace(
        answer, logprobs=edit(np.array(answer.logprobs, np.float64), np.array(answer.kept_logmass, np.float64))
    )


def where(applies: Callable[[Ask, Answer], bool], damage: Damage) -> Damage:
    return lambda ask, answer: damage(ask, answer) if applies(ask, answer) else answer


def zero_layer(expert_ids: Any) -> Any:
    expert_ids[:, 1] = 0
    return expert_ids


def next_experts(num_experts: int, first: int = 0, last: int | None = None) -> Callable[[Any], Any]:
    """Other experts than the right ones, in rows [first, last)."""

    def edit(expert_ids: Any) -> Any:
        expert_ids[first:last] = (expert_ids[first:last] + 1) % num_experts
        return expert_ids

    return edit


def swapped(values: Any, masses: Any) -> Any:
    values[[0, -1]] = values[[-1, 0]]
    return values
