"""Dumps that other systems' own code wrote (`python -m scripts.foreign_dumps`): what went in comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_dumps import open_any_dump

from moerl.diagnostics.dumps.rollout import DumpedRollout

DUMPS = Path(__file__).parents[2] / "golden" / "dumps"
DRAWN = json.loads((DUMPS / "drawn.json").read_text())
MOE_LAYERS = (1, 2)

ROUTES, KEPT, TRAINER, VERSIONS = "routes", "kept sets", "the trainer's log-probs", "versions"
HOLDS = {
    "slime/rollout.pt": {ROUTES, KEPT, VERSIONS},
    "slime/train.pt": {KEPT, TRAINER},
    "miles/rollout_data/4.pt": {ROUTES, VERSIONS},
    "miles/train_data/4_0.pt": {TRAINER, VERSIONS},
    "miles/dashboard_columns/rollout_4.parquet": set[str](),
    "nemo_rl/train_data_step4.jsonl": {TRAINER},
    "prime_rl/rollouts/step_4/train/effective/traces.jsonl": {VERSIONS},
    "prime_rl/token_exports/step_4/rank_0.jsonl": {TRAINER},
}
"""Contents of each dump besides tokens, flags of sampled tokens, and their log-probs."""
ROUNDED = "prime_rl/rollouts/step_4/train/effective/traces.jsonl"
ONE_VERSION_OF_AN_EPISODE = ROUNDED


def spans(conversation: dict[str, Any]) -> list[tuple[dict[str, Any] | None, list[int]]]:
    """Returns the given and the answered tokens in turn, with the answer or None."""
    found: list[tuple[dict[str, Any] | None, list[int]]] = [(None, conversation["prompt"])]
    for number, answer in enumerate(conversation["answers"]):
        found += [(None, conversation["tools"][number - 1])] if number else []
        found += [(answer, answer["tokens"])]
    return found


def by_token(conversation: dict[str, Any], of_answer: Any, otherwise: Any) -> list[Any]:
    return [
        value
        for answer, tokens in spans(conversation)
        for value in (of_answer(answer) if answer else [otherwise] * len(tokens))
    ]


@pytest.fixture(scope="module", params=HOLDS)
def opened(request: pytest.FixtureRequest) -> tuple[str, list[DumpedRollout], tuple[str, ...]]:
    dump = open_any_dump(DUMPS / request.param, moe_layers=MOE_LAYERS)
    rollouts = list(dump.rollouts)
    assert not dump.unusable.counts
    assert len(rollouts) == len(DRAWN["conversations"])
    return request.param, rollouts, tuple(dump.notes)


def pairs(rollouts: list[DumpedRollout]) -> list[tuple[DumpedRollout, dict[str, Any]]]:
    return list(zip(rollouts, DRAWN["conversations"], strict=True))


def test_tokens_and_log_probs_are_those_that_the_system_was_given(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    file, rollouts, _ = opened
    for rollout, drawn in pairs(rollouts):
        assert rollout.token_ids.tolist() == [token for _, tokens in spans(drawn) for token in tokens]
        assert rollout.sampled.tolist() == by_token(drawn, lambda answer: [True] * len(answer["tokens"]), False)
        expected = by_token(drawn, lambda answer: answer["logprobs"], 0.0)
        tolerance = 5.1e-5 if file == ROUNDED else 0.0
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, rtol=0, atol=tolerance)


def test_each_has_what_its_system_writes_and_nothing_more(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    file, rollouts, _ = opened
    for rollout, drawn in pairs(rollouts):
        found = {
            ROUTES: rollout.expert_ids is not None,
            KEPT: rollout.kept is not None,
            TRAINER: bool(rollout.trainer_logprobs),
            VERSIONS: bool((rollout.policy_versions >= 0).any()),
        }
        several = len({answer["version"] for answer in drawn["answers"]}) > 1
        without = {VERSIONS} if several and file == ONE_VERSION_OF_AN_EPISODE else set[str]()
        assert {name for name, is_there in found.items() if is_there} == HOLDS[file] - without


def test_routes_are_those_of_the_moe_layers(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    for rollout, drawn in pairs(opened[1]):
        if rollout.expert_ids is not None:
            np.testing.assert_array_equal(rollout.expert_ids, np.asarray(drawn["expert_ids"])[:, MOE_LAYERS])


def test_kept_sets_stand_at_the_tokens_that_were_drawn_from_them(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    for rollout, drawn in pairs(opened[1]):
        if rollout.kept is not None:
            sets = np.split(rollout.kept.ids, rollout.kept.offsets[1:-1])
            assert [each.tolist() for each in sets] == by_token(drawn, lambda answer: answer["kept"], [])


def test_log_probs_of_the_trainer_stand_at_their_tokens(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    for rollout, drawn in pairs(opened[1]):
        for logprobs in rollout.trainer_logprobs.values():
            np.testing.assert_array_equal(logprobs, np.asarray(drawn["trainer_logprobs"], np.float32))


def test_each_answer_has_its_version(opened: tuple[str, list[DumpedRollout], Any]) -> None:
    for rollout, drawn in pairs(opened[1]):
        if (rollout.policy_versions >= 0).any():
            expected = by_token(drawn, lambda answer: [answer["version"]] * len(answer["tokens"]), -1)
            assert rollout.policy_versions.tolist() == expected


def test_that_log_probs_are_rounded_is_said(opened: tuple[str, list[DumpedRollout], tuple[str, ...]]) -> None:
    file, _, notes = opened
    assert any("four decimals" in note for note in notes) == (file == ROUNDED)
