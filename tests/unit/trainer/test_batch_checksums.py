"""Proof before the update of the rows that a sequence attends to and of the sets that tokens are scored in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
from packing_samples import with_prompt_of
from ranks import Ranks
from replay_steps import assert_same_weights

from moerl.contract.batch import Microbatch
from moerl.errors import ReplayError, UnprovedError
from moerl.trainer import attention

LENGTHS = (20, 17, 23)


def make_batch(trainer: Any, *, same_prompts: bool = False) -> tuple[Microbatch, float]:
    """Two groups of three responses with prompts of nine tokens, in one microbatch; where asked, of the same tokens."""
    groups = [tiny_moe.make_samples(seed, LENGTHS, num_prompt=9) for seed in (1, 2)]
    samples = [with_prompt_of(group[0], each) for group in groups for each in group]
    if same_prompts:
        prompt = samples[0].trajectory.token_ids[:9]
        samples = [
            replace(
                each,
                trajectory=replace(each.trajectory, token_ids=np.concatenate([prompt, each.trajectory.token_ids[9:]])),
            )
            for each in samples
        ]
    (batch,), denominator = tiny_moe.shares(trainer, samples, token_budget=256, share_prompts=True)
    return batch, denominator


def point_at_the_other_prompt(batch: Microbatch) -> Microbatch:
    assert batch.prefix_of is not None
    assert batch.prefix_of.tolist() == [-1, 0, 0, 0, -1, 4, 4, 4]
    return replace(batch, prefix_of=np.array([-1, 0, 0, 0, -1, 4, 0, 4], np.int32))


def forget_the_prompts(batch: Microbatch) -> Microbatch:
    return replace(batch, prefix_of=None, prefix_rows=None)


def change_an_input(batch: Microbatch) -> Microbatch:
    tokens = batch.input_ids.copy()
    tokens[[3, 4]] = tokens[[4, 3]]
    return replace(batch, input_ids=tokens)


def listed(batch: Microbatch) -> np.ndarray:
    """Rows of the first response that list sets."""
    rows = np.flatnonzero(batch.truncated & (batch.sample_index == 0))
    assert len(rows) > 2
    return rows


def move_sets_by_a_row(batch: Microbatch) -> Microbatch:
    """Each target is in the set of its row all the same: the kernel has nothing to object to."""
    rows, order = listed(batch), np.arange(batch.num_rows)
    order[rows] = np.roll(rows, 1)
    return with_targets_inside(batch, batch.kept.take(order))


def put_another_id_into_a_set(batch: Microbatch) -> Microbatch:
    row = listed(batch)[0]
    start, stop = batch.kept.offsets[row : row + 2]
    ids = batch.kept.ids.copy()
    others = np.setdiff1d(np.arange(tiny_moe.SPEC.vocab_size), ids[start:stop])
    place = next(i for i in range(start, stop) if ids[i] != batch.target_ids[row])
    ids[place] = others[0]
    ids[start:stop].sort()
    return replace(batch, kept=replace(batch.kept, ids=ids))


def with_targets_inside(batch: Microbatch, kept: Any) -> Microbatch:
    ids = kept.ids.copy()
    for row in np.flatnonzero(batch.truncated):
        mine = ids[kept.offsets[row] : kept.offsets[row + 1]]
        if batch.target_ids[row] not in mine:
            mine[0] = batch.target_ids[row]
            mine.sort()
    return replace(batch, kept=replace(kept, ids=ids))


def refusal(layout: Any, path: Path, change: Callable[[Microbatch], Microbatch], enforce: bool) -> str:
    """Returns the refusal of a step over a changed batch, which applies nothing; then trains the batch itself."""
    trainer = tiny_moe.build(layout, path)
    untouched = tiny_moe.exported(trainer)
    batch, denominator = make_batch(trainer)
    wrong = change(batch)
    with pytest.raises(ReplayError) as caught:
        trainer.step([wrong], tiny_moe.policy_loss(trainer, [wrong], denominator), enforce=enforce)
    assert_same_weights(tiny_moe.exported(trainer), untouched)
    trainer.step([batch], tiny_moe.policy_loss(trainer, [batch], denominator), enforce=enforce)
    return str(caught.value)


@pytest.mark.parametrize("enforce", [True, False], ids=["with replay", "without"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (point_at_the_other_prompt, "tokens that its sequences attend to"),
        (forget_the_prompts, "tokens that its sequences attend to"),
        (change_an_input, "tokens that its sequences attend to"),
        (move_sets_by_a_row, "kept sets that its tokens are scored in"),
        (put_another_id_into_a_set, "kept sets that its tokens are scored in"),
    ],
)
def test_a_batch_that_is_not_what_was_recorded_is_refused(
    change: Any, what: str, enforce: bool, untied: Path, one_process: Ranks
) -> None:
    (message,) = one_process.run(refusal, untied, change, enforce)
    assert f"microbatch 0 on rank 0: the {what} are not those of the trajectories" in message


def refusal_of_a_silent_loss(layout: Any, path: Path) -> str:
    trainer = tiny_moe.build(layout, path)
    untouched = tiny_moe.exported(trainer)
    batch, denominator = make_batch(trainer)
    loss = tiny_moe.policy_loss(trainer, [batch], denominator)

    def silent(*arguments: Any) -> Any:
        total, rows = loss(*arguments)
        return total, replace(rows, kept=None)

    with pytest.raises(UnprovedError) as caught:
        trainer.step([batch], silent, enforce=True, in_sets=True)
    assert_same_weights(tiny_moe.exported(trainer), untouched)
    trainer.step([batch], loss, enforce=True, in_sets=True)
    return str(caught.value)


def test_a_loss_that_does_not_say_in_which_sets_it_scored_is_refused(untied: Path, one_process: Ranks) -> None:
    (message,) = one_process.run(refusal_of_a_silent_loss, untied)
    assert "microbatch 0 on rank 0: its loss did not say in which kept sets it scored" in message


def refusal_of_the_same_tokens(layout: Any, path: Path) -> str:
    trainer = tiny_moe.build(layout, path)
    batch, denominator = make_batch(trainer, same_prompts=True)
    wrong = point_at_the_other_prompt(batch)
    assert batch.input_ids[:8].tolist() == batch.input_ids[batch.cu_seqlens[4] :][:8].tolist()
    with pytest.raises(ReplayError) as caught:
        trainer.step([wrong], tiny_moe.policy_loss(trainer, [wrong], denominator), enforce=True)
    return str(caught.value)


def test_a_prompt_of_the_same_tokens_and_other_experts_is_refused(untied: Path, one_process: Ranks) -> None:
    (message,) = one_process.run(refusal_of_the_same_tokens, untied)
    assert "tokens that its sequences attend to" in message


def attend_elsewhere(layout: Any, path: Path) -> str:
    """A fault of the trainer: the frame is right, and attention reads the rows of another prompt."""
    trainer = tiny_moe.build(layout, path)
    batch, denominator = make_batch(trainer)
    padded = attention._padded

    def elsewhere(starts: Any, lengths: Any, prefix_starts: Any, prefix_lengths: Any) -> Any:
        return padded(starts, lengths, prefix_starts[::-1], prefix_lengths)

    attention._padded = elsewhere
    try:
        with pytest.raises(ReplayError) as caught:
            trainer.step([batch], tiny_moe.policy_loss(trainer, [batch], denominator), enforce=True)
    finally:
        attention._padded = padded
    return str(caught.value)


def test_attention_that_reads_other_rows_than_those_it_was_told_is_refused(untied: Path, one_process: Ranks) -> None:
    (message,) = one_process.run(attend_elsewhere, untied)
    assert "tokens that its sequences attend to" in message


def score_openly(layout: Any, path: Path) -> None:
    trainer = tiny_moe.build(layout, path)
    batch, denominator = make_batch(trainer)
    wrong = put_another_id_into_a_set(batch)
    trainer.step([wrong], tiny_moe.policy_loss(trainer, [wrong], denominator, keep_mask=False), enforce=True)


def test_sets_that_nothing_is_scored_in_are_not_asked_for(untied: Path, one_process: Ranks) -> None:
    one_process.run(score_openly, untied)
