"""Turns in the journal: each comes back as it was sampled, and answers the same request alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import FULL, SPEC, make_trajectory, same_trajectory
from journals import group

from moerl.buffer.journal import Journal
from moerl.buffer.ledger import Ledger
from moerl.buffer.turns import KeptTurn, KeptTurns
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams, Trajectory

CUT = SamplingParams(top_p=0.9)


def asked(name: str = "g/0#1", num_prompt: int = 9, num_known: int = 5) -> RolloutRequest:
    ids = tuple(range(2, 2 + num_prompt))
    return RolloutRequest(Lineage(name, "p", "g"), ids, FULL, 40, known_rows=num_known)


def answered(request: RolloutRequest, sampling: SamplingParams = CUT, version: int = 3) -> Trajectory:
    """An answer with kept sets and routes, whose known rows are not captured."""
    made = make_trajectory(
        np.random.default_rng(1), num_prompt=len(request.prompt_ids), num_sampled=4, sampling=sampling
    )
    ids, routed, experts = made.token_ids.copy(), made.routed.copy(), made.expert_ids.copy()
    ids[: len(request.prompt_ids)] = request.prompt_ids
    routed[: request.known_rows], experts[: request.known_rows] = False, 0
    versions = np.where(made.sampled, np.int32(version), np.int32(-1))
    changes = {"token_ids": ids, "routed": routed, "expert_ids": experts, "policy_versions": versions}
    return replace(made, lineage=request.lineage, **changes)


@pytest.mark.parametrize("num_known", [0, 5])
@pytest.mark.parametrize("sampling", [FULL, CUT])
def test_a_turn_comes_back_from_the_disk_as_it_was_sampled(
    tmp_path: Path, num_known: int, sampling: SamplingParams
) -> None:
    request = asked(num_known=num_known)
    answer = answered(request, sampling)
    journal = Journal(tmp_path, SPEC)
    journal.append_turn(KeptTurn.of(answer, request, 7))
    journal.close()
    assert Journal(tmp_path, SPEC).read() == {}
    back = Journal(tmp_path, SPEC)
    back.read()
    (turn,) = back.turns
    assert (turn.number, turn.newest_version) == (7, 3)
    assert turn.answers(request)
    assert same_trajectory(Trajectory(**turn.values(request)), answer)


def test_only_new_rows_are_kept() -> None:
    request = asked(num_known=5)
    assert len(KeptTurn.of(answered(request), request, 0).tokens) == len(answered(request)) - 5


@pytest.mark.parametrize("other", [asked(num_prompt=10), asked(num_known=4), replace(asked(), prompt_ids=(1,) * 9)])
def test_a_turn_answers_no_other_request(other: RolloutRequest) -> None:
    request = asked()
    assert not KeptTurn.of(answered(request), request, 0).answers(other)


def test_a_turn_answers_under_no_limit_that_would_have_made_another_one() -> None:
    whole, cut = (
        KeptTurn.of(replace(answered(asked()), finish_reason=reason), asked(), 0)
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    )
    limits = (3, 4, 5)
    assert [whole.answers(replace(asked(), max_new_tokens=limit)) for limit in limits] == [False, True, True]
    assert [cut.answers(replace(asked(), max_new_tokens=limit)) for limit in limits] == [False, True, False]


def test_turns_of_finished_groups_and_of_lost_steps_are_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SPEC)
    for number, name, version in ((1, "g/0#0", 2), (2, "h/0#0", 2), (2, "h/0~1#0", 2), (2, "h/1#0", 4)):
        request = asked(name)
        journal.append_turn(KeptTurn.of(answered(request, version=version), request, number))
    journal.append(group(1))
    journal.close()
    back = Journal(tmp_path, SPEC)
    assert list(back.read()) == [1]
    assert [turn.tokens.lineage.rollout_id for turn in back.turns] == ["h/0#0", "h/0~1#0", "h/1#0"]
    turns = KeptTurns(back.turns, newest_version=3)
    assert (turns.num_episodes(1), turns.num_episodes(2)) == (0, 1)


def test_segments_of_turns_go_with_their_groups(tmp_path: Path) -> None:
    request, journal = asked(), Journal(tmp_path, SPEC)
    journal.append_turn(KeptTurn.of(answered(request), request, 4))
    journal.begin(1)
    journal.forget([4], 9)
    assert len(list(tmp_path.iterdir())) == 1
    journal.forget([5], 9)
    assert list(tmp_path.iterdir()) == []


def test_the_ledger_says_which_rollouts_went_on_and_which_began_anew() -> None:
    ledger = Ledger()
    ledger.issue(0, 8)
    ledger.ask_again(3, 5)
    ledger.ask_again(0, 0)
    ledger.check()
    assert dict(Ledger.restored(ledger.snapshot()).again) == {"resumed": 3, "anew": 5}
    assert dict(Ledger.restored({**Ledger().snapshot(), "again": {}}).again) == {}
