"""Repairs of prompts: what one adds the other takes away, and rows keep their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from foreign_dumps import make_dumped, same

from moerl.orchestration.prompt_edits import inserted, prompt_edits, removed


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("at", [0, -1])
def test_tokens_that_are_inserted_and_removed_again_leave_the_rollout_as_it_was(rng: np.random.Generator, at: int):
    rollout = make_dumped(rng, prefix_versions=np.array([2, 2, 2, -1, -1, -1, -1, -1], np.int32))
    longer = inserted(rollout, at=at, tokens=(41, 42))
    assert len(longer) == len(rollout) + 2
    place = rollout.num_prompt if at else 0
    assert longer.token_ids[place : place + 2].tolist() == [41, 42]
    assert longer.routed is not None
    assert not longer.routed[place : place + 2].any()
    same(removed(longer, at=at, tokens=(41, 42)), rollout)


def test_every_sampled_token_keeps_its_log_prob_kept_set_and_route(rng: np.random.Generator):
    rollout = make_dumped(rng, spans=(4, 6))
    longer = inserted(rollout, at=-1, tokens=(9,))
    assert rollout.kept is not None
    assert longer.kept is not None
    assert rollout.expert_ids is not None
    assert longer.expert_ids is not None
    for token in np.flatnonzero(rollout.sampled):
        there = token + 1
        assert longer.token_ids[there] == rollout.token_ids[token]
        assert longer.rollout_logprobs[there] == rollout.rollout_logprobs[token]
        ours = rollout.kept.ids[rollout.kept.offsets[token] : rollout.kept.offsets[token + 1]]
        assert np.array_equal(longer.kept.ids[longer.kept.offsets[there] : longer.kept.offsets[there + 1]], ours)
        if token + 1 < len(rollout):
            assert np.array_equal(longer.expert_ids[there], rollout.expert_ids[token])


def test_tokens_that_are_not_there_are_not_removed(rng: np.random.Generator):
    rollout = make_dumped(rng)
    assert removed(rollout, at=0, tokens=(int(rollout.token_ids[0]) + 1,)) is rollout
    assert removed(rollout, at=0, tokens=tuple(rollout.token_ids[:3].tolist())) is rollout  # nothing would be left


class Tokenizer:
    """Tokenizer of a chat model: a template whose answer opens with tokens 7 and 8."""

    bos_token_id, special_tokens_map = 1, {"bos_token": "1"}
    chat_template = "{{ bos_token }} 5 6{% if add_generation_prompt %} 7 8{% endif %}"

    def get_chat_template(self, tools: object) -> str:
        return self.chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(each) for each in text.split()]

    def decode(self, ids: object) -> str:
        return "<answer>"


def test_candidates_are_the_first_token_and_the_opening_of_the_answer():
    edits = prompt_edits(Tokenizer())
    assert [title for _, title in edits] == [
        "prompts lack the BOS token",
        "prompts begin with BOS twice",
        "prompts lack the opening of the answer, '<answer>'",
        "prompts hold an opening of the answer that the engine did not see, '<answer>'",
    ]
    assert prompt_edits(None) == []
