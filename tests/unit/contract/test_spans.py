"""Spans of episodes with their texts, and their column in dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from factories import FULL, Layout, make_from_layout, make_trajectory, same_trajectory

from moerl.contract.disk import read_parquet, write_parquet
from moerl.contract.spans import ReadableSpan, is_of_episode, spans_of
from moerl.contract.trajectory import Lineage, Trajectory, TurnKind
from moerl.errors import ContractError

PROMPT, SAMPLED, OBSERVATION = TurnKind.PROMPT, TurnKind.SAMPLED, TurnKind.OBSERVATION
END = 7


def decode(ids: Sequence[int]) -> str:
    return "".join(f"{number}." for number in ids)


def episode(**changes: Any) -> Trajectory:
    """Tokens 0 to 9: two of a prompt, three sampled, two observed, three sampled; the first turn ends with its end."""
    layout = Layout(((PROMPT, 2, None), (SAMPLED, 3, FULL), (OBSERVATION, 2, None), (SAMPLED, 3, FULL)))
    ids = np.array([10, 11, 12, 13, END, 20, 21, 14, 15, 16], np.int32)
    return make_from_layout(np.random.default_rng(0), layout, token_ids=ids, **changes)


def test_each_author_and_each_version_has_a_span_of_its_own() -> None:
    versions = np.array([-1, -1, 3, 3, 3, -1, -1, 3, 4, 4], np.int32)
    assert [*spans_of(episode(policy_versions=versions), decode, {END})] == [
        ReadableSpan(PROMPT, 0, -1, 2, False, "10.11."),
        ReadableSpan(SAMPLED, 1, 3, 3, True, "12.13."),
        ReadableSpan(OBSERVATION, 0, -1, 2, False, "20.21."),
        ReadableSpan(SAMPLED, 2, 3, 1, False, "14."),
        ReadableSpan(SAMPLED, 2, 4, 2, False, "15.16."),
    ]


def test_the_tokens_of_a_fork_that_are_its_parents_have_no_text() -> None:
    lineage = Lineage("r~1", "p", "g", "r", "", "r", 1)
    spans = [*spans_of(episode(lineage=lineage), decode, {END})]
    assert spans[0] == ReadableSpan("shared", 0, -1, 1, False, "")
    assert spans[1] == ReadableSpan(OBSERVATION, 0, -1, 1, False, "11.")
    assert sum(span.num_tokens for span in spans) == 10


def test_a_character_whose_tokens_two_versions_sampled_is_in_the_later_span() -> None:
    def of_bytes(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    ids = np.frombuffer("ab\u00e9c".encode(), np.uint8).astype(np.int32) % 200
    whole = make_trajectory(np.random.default_rng(0), num_prompt=1, num_sampled=4, sampling=FULL)
    versions = np.array([-1, 3, 3, 4, 4], np.int32)
    spec = replace(whole.spec, vocab_size=256)
    cut = replace(whole, spec=spec, token_ids=ids, policy_versions=versions)
    texts = [span.text for span in spans_of(cut, of_bytes, set())]
    assert texts == ["a", "b", "\u00e9c"]


def test_a_response_of_one_turn_is_no_episode_and_a_session_among_others_is() -> None:
    single = make_trajectory(np.random.default_rng(0))
    assert not is_of_episode(single)
    assert is_of_episode(episode())
    assert is_of_episode(replace(single, lineage=replace(single.lineage, episode_id="e")))


def test_spans_are_a_column_for_people_and_are_not_read_back(tmp_path: Path) -> None:
    sent = [episode(), make_trajectory(np.random.default_rng(1), rollout_id="r2")]
    spans = [[*spans_of(each, decode, {END})] for each in sent]
    write_parquet(tmp_path / "d.parquet", sent, spans=spans)
    rows = pq.read_table(tmp_path / "d.parquet").column("spans").to_pylist()
    assert [[ReadableSpan(**span) for span in row] for row in rows] == spans
    back = read_parquet(tmp_path / "d.parquet")
    assert all(same_trajectory(a, b) for a, b in zip(sent, back, strict=True))


def test_spans_for_other_trajectories_or_of_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="wrong_shape"):
        write_parquet(tmp_path / "d.parquet", [episode()], spans=[])
    with pytest.raises(ContractError, match="text_not_utf8"):
        write_parquet(tmp_path / "d.parquet", [episode()], spans=[[ReadableSpan(PROMPT, 0, -1, 2, False, "\ud800")]])
