"""Outcomes of episodes: trained, left out or refused, as the configuration says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from episode_streams import FakeStream, request, response
from episode_texts import TEXTS
from factories import SPEC

from moerl.config.rollouts import EpisodeConfig
from moerl.contract.episodes import EpisodeTask, Session
from moerl.contract.layers import LayerSelection
from moerl.contract.ports import Prompt
from moerl.contract.quarantine import Quarantine
from moerl.orchestration.outcome import RolloutOutcome
from moerl.orchestration.played import EpisodeGate

PROMPT = Prompt("p", "2+2=")


class StreamingEngineFake:
    """An engine that answers every turn; with `breaks`, with tokens of another prompt."""

    def __init__(self, breaks: bool = False) -> None:
        self._breaks = breaks

    def stream(self) -> FakeStream:
        if not self._breaks:
            return FakeStream()
        return FakeStream(lambda r: [response(replace(r, prompt_ids=(9, 9, 9)), lineage=r.lineage)])

    def generate(self, *_: object) -> None:
        raise AssertionError("a turn was not asked of the stream")

    handshake = abort = close = generate


class Played(EpisodeTask):
    """Plays until no turn may begin; with `fails`, without looking."""

    turn_seconds = 60.0

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        for _ in range(4):
            if session.is_over and not self._fails:
                break
            await session.sample()
            session.observe("b")
        if self._fails:
            raise OSError("the environment is gone")
        return {"reward": 1.0}


def outcome(
    folder: Path, *, fails: bool = False, breaks: bool = False, **rules: Any
) -> tuple[RolloutOutcome, dict[str, int], Quarantine]:
    counts, quarantine = Counter[str](), Quarantine(folder, max_rate=1.0)
    layers = LayerSelection(SPEC.num_moe_layers, tuple(range(SPEC.num_moe_layers)))
    gate = EpisodeGate(
        cast(Any, StreamingEngineFake(breaks)),
        quarantine,
        layers,
        TEXTS,
        EpisodeConfig(**rules),
        lambda metric: counts.update([metric]),
    )
    asked = request()
    quarantine.expect([asked.lineage.rollout_id])
    (found,) = gate.outcomes(cast(Any, Played)(fails), {"p": PROMPT}, [asked], lambda: 9)
    return found, dict(counts), quarantine


@pytest.mark.parametrize(
    ("when", "trained", "filtered", "refused"),
    [("train", True, "", None), ("filter", True, "episode_limited", None), ("refuse", False, "", "episode_limited")],
)
def test_an_episode_that_reaches_a_limit_is_trained_left_out_or_refused(
    tmp_path: Path, when: str, trained: bool, filtered: str, refused: str | None
) -> None:
    found, counts, quarantine = outcome(tmp_path, max_turns=2, when_limited=when)
    assert (bool(found.trajectories), found.filtered) == (trained, filtered)
    assert (None if found.refusal is None else str(found.refusal.reason)) == refused
    assert counts == {"episode/limited": 1}
    assert quarantine.num_refused == (refused is not None)
    if found.refusal is not None:
        assert "another turn after episode.max_turns was reached" in found.refusal.text


@pytest.mark.parametrize(("when", "filtered"), [("filter", "episode_failed"), ("refuse", "")])
def test_an_environment_that_fails_is_left_out_or_refused(tmp_path: Path, when: str, filtered: str) -> None:
    found, counts, quarantine = outcome(tmp_path, fails=True, when_failed=when)
    assert (found.trajectories, found.filtered) == ((), filtered)
    assert counts == {"episode/failed": 1}
    assert (found.refusal is None, quarantine.num_refused) == ((True, 0) if filtered else (False, 1))
    assert bool([*tmp_path.glob("**/*.json")]) == (not filtered)


@pytest.mark.parametrize(
    ("when", "filtered", "refused"),
    [("train", "", "episode_failed"), ("filter", "episode_limited", None), ("refuse", "", "episode_limited")],
)
def test_an_environment_that_fails_at_a_limit_counts_as_limited_unless_limited_ones_are_trained(
    tmp_path: Path, when: str, filtered: str, refused: str | None
) -> None:
    found, counts, _ = outcome(tmp_path, fails=True, max_turns=2, when_limited=when)
    assert (found.trajectories, found.filtered) == ((), filtered)
    assert (None if found.refusal is None else str(found.refusal.reason)) == refused
    assert counts == {"episode/limited": 1, "episode/failed": 1}


@pytest.mark.parametrize(
    ("limited", "filtered", "refused"),
    [("train", "episode_failed", None), ("filter", "episode_limited", None), ("refuse", "", "episode_limited")],
)
def test_an_environment_that_fails_at_a_limit_that_is_refused_is_refused_if_failing_ones_are_left_out(
    tmp_path: Path, limited: str, filtered: str, refused: str | None
) -> None:
    found, counts, _ = outcome(tmp_path, fails=True, max_turns=2, when_limited=limited, when_failed="filter")
    assert (found.trajectories, found.filtered) == ((), filtered)
    assert (None if found.refusal is None else str(found.refusal.reason)) == refused
    assert counts == {"episode/limited": 1, "episode/failed": 1}


def test_an_answer_that_breaks_the_contract_is_refused_whatever_the_rules(tmp_path: Path) -> None:
    found, counts, quarantine = outcome(tmp_path, breaks=True, when_failed="filter", when_limited="filter", max_turns=1)
    assert found.refusal is not None
    assert str(found.refusal.reason) == "turn_breaks_off"
    assert (counts, quarantine.num_refused) == ({}, 1)


def test_nothing_is_said_of_episodes_that_end_by_themselves(tmp_path: Path) -> None:
    found, counts, _ = outcome(tmp_path, max_turns=5, when_limited="refuse")
    assert (len(found.trajectories), found.filtered, counts) == (1, "", {})
