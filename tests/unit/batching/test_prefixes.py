"""Shared prompts: packed once, and every sample still finds each of its rows, in their order, exactly once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import FULL, NUCLEUS, SPEC, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_samples import fork_of, with_prompt_of
from routing_sums import routing_checksums

from moerl.batching.cost import SequenceCost
from moerl.batching.packing import PackOptions, pack_for_ranks, pack_text_for_ranks, packing_metrics
from moerl.batching.prefixes import find_families
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.batch_wire import decode_batches, encode_batches
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key, shared_key
from moerl.errors import ContractError


def make_group(rng: np.random.Generator, name: str, num_prompt: int, lengths: list[int]) -> list[TrainSample]:
    """Samples of one prompt, which was computed once."""
    group = []
    for index, num_sampled in enumerate(lengths):
        trajectory = make_trajectory(
            rng,
            num_prompt=num_prompt,
            num_sampled=num_sampled,
            sampling=FULL if index % 2 else NUCLEUS,
            rollout_id=f"{name}-{index}",
        )
        advantages = rng.normal(size=len(trajectory)).astype(np.float32) * trajectory.sampled
        sample = TrainSample(trajectory, advantages.astype(np.float32))
        group.append(with_prompt_of(group[0], sample) if group else sample)
    return group


@st.composite
def groups(draw: st.DrawFn) -> list[TrainSample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 8), min_size=1, max_size=5)), min_size=1)
    )
    samples = [
        each for i, (prompt, lengths) in enumerate(shapes[:4]) for each in make_group(rng, str(i), prompt, lengths)
    ]
    # Forks of sessions, and of forks that were drawn before.
    for number in range(draw(st.integers(0, 4))):
        samples.append(make_fork(rng, draw(st.sampled_from(samples)), f"fork-{number}", draw(st.integers(0, 9))))
    return draw(st.permutations(samples))


def make_fork(rng: np.random.Generator, session: TrainSample, name: str, num_more: int) -> TrainSample:
    """A fork behind up to so many sampled tokens of a session."""
    num_prompt = min(int(session.trajectory.sampled.argmax()) + num_more, len(session.trajectory))
    made = make_trajectory(rng, num_prompt=num_prompt, num_sampled=3, sampling=FULL, rollout_id=name)
    return fork_of(session, TrainSample(made, rng.normal(size=len(made)).astype(np.float32) * made.sampled))


def rows_of(batch: Microbatch, sequence: int) -> list[int]:
    """Rows of a packed sequence, those of its prefix first: the slow and obvious reference."""
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    prefix = -1 if batch.prefix_of is None else int(batch.prefix_of[sequence])
    before = int(batch.rows_before[sequence])
    return ([] if prefix < 0 else rows_of(batch, prefix)[:before]) + list(range(start, end))


def prefixes_in(batch: Microbatch) -> set[int]:
    """Sequences that are prompts of others, and no samples themselves."""
    used = set() if batch.prefix_of is None else set(batch.prefix_of[batch.prefix_of >= 0].tolist())
    return {each for each in used if not batch.loss_mask[batch.cu_seqlens[each] : batch.cu_seqlens[each + 1]].any()}


@settings(max_examples=80, deadline=None)
@given(groups(), st.integers(24, 80), st.sampled_from([(1, 1), (1, 4), (4, 4)]), st.integers(1, 3))
def test_every_sample_finds_each_of_its_rows_in_order(
    samples: list[TrainSample], budget: int, padding: tuple[int, int], num_ranks: int
) -> None:
    options = PackOptions(budget, Padding(*padding), share_prompts=True)
    seen: list[int] = []
    for batch in (batch for rank in pack_for_ranks(samples, num_ranks, options, replay=True) for batch in rank):
        for sequence in set(range(len(batch.cu_seqlens) - 1)) - prefixes_in(batch):
            rows = [row for row in rows_of(batch, sequence) if not batch.is_pad[row]]
            if not rows:
                continue
            index = int(batch.sample_index[rows[-1]])
            trajectory = samples[index].trajectory
            assert batch.input_ids[rows].tolist() == trajectory.token_ids[:-1].tolist()
            assert batch.position_ids[rows].tolist() == list(range(len(trajectory) - 1))
            before = int(batch.rows_before[sequence])
            assert not trajectory.sampled[1:][:before].any()
            assert batch.loss_mask[rows[before:]].tolist() == trajectory.sampled[1:][before:].tolist()
            assert batch.advantages[rows[before:]].tolist() == samples[index].advantages[1:][before:].tolist()
            assert batch.expert_ids is not None
            assert np.array_equal(batch.expert_ids[rows], trajectory.expert_ids)
            trained = [row for row in rows[before:] if batch.loss_mask[row]]
            assert set(batch.sample_index[trained].tolist()) == {index}
            seen.append(index)
    assert sorted(seen) == list(range(len(samples)))


@settings(max_examples=60, deadline=None)
@given(groups(), st.sampled_from([1, 4]))
def test_checksums_prove_the_shared_rows_once_and_all_others_under_their_own_rollout(
    samples: list[TrainSample], sequence: int
) -> None:
    options = PackOptions(60, Padding(sequence, 4), share_prompts=True)
    (batches,) = pack_for_ranks(samples, 1, options, replay=True)
    for batch in batches:
        total = np.zeros(SPEC.num_moe_layers, np.uint64)
        for sequence_at, before in enumerate(batch.rows_before.tolist()):
            start, end = batch.cu_seqlens[sequence_at : sequence_at + 2].tolist()
            rows = np.flatnonzero(~batch.is_pad[start:end]) + start
            if not len(rows):
                continue
            key = rollout_key(samples[int(batch.sample_index[start])].trajectory.lineage.rollout_id)
            key = shared_key(key) if sequence_at in prefixes_in(batch) else key
            assert batch.rollout_keys[sequence_at] == key
            assert batch.expert_ids is not None
            total += routing_checksums(key, batch.expert_ids[rows], first=before)
        assert batch.routing_checksums is not None
        assert batch.routing_checksums.tolist() == total.tolist()
        assert len(np.unique(batch.rollout_keys)) == len(batch.rollout_keys)


def changed(sample: TrainSample, **arrays: Any) -> TrainSample:
    return replace(sample, trajectory=replace(sample.trajectory, **arrays))


def test_a_sample_that_was_routed_otherwise_shares_nothing() -> None:
    group = make_group(np.random.default_rng(0), "a", 6, [3, 3, 3])
    experts = group[1].trajectory.expert_ids.copy()
    experts[2, 1] = np.roll(experts[2, 1], 1)
    group[1] = changed(group[1], expert_ids=experts)
    assert [family.members for family in find_families(group, Padding(), 100)] == [(0, 2), (1,)]


def test_a_sample_of_another_prompt_of_the_same_length_shares_nothing() -> None:
    group = make_group(np.random.default_rng(0), "a", 6, [3, 3, 3])
    tokens = group[2].trajectory.token_ids.copy()
    tokens[0] = (tokens[0] + 1) % SPEC.vocab_size
    group[2] = changed(group[2], token_ids=tokens)
    families = find_families(group, Padding(), 100)
    assert [(family.members, family.nums_shared[0]) for family in families] == [((0, 1), 5), ((2,), 0)]


def test_the_last_token_of_the_prompt_stays_with_each_response() -> None:
    """Its row predicts the first sampled token, another one in each response."""
    group = make_group(np.random.default_rng(0), "a", 6, [3, 4])
    ((batch,),) = pack_for_ranks(group, 1, PackOptions(64, share_prompts=True), replay=True)
    assert batch.prefix_of is not None
    assert batch.prefix_of.tolist() == [-1, 0, 0]
    assert np.diff(batch.cu_seqlens).tolist() == [5, 3, 4]
    assert not batch.loss_mask[:5].any()
    assert batch.loss_mask[5:].all()


@pytest.mark.parametrize(("num_prompt", "shared"), [(1, 0), (2, 0), (5, 4), (8, 4), (9, 8)])
def test_no_padding_comes_between_a_prompt_and_its_responses(num_prompt: int, shared: int) -> None:
    group = make_group(np.random.default_rng(0), "a", num_prompt, [3, 3])
    families = find_families(group, Padding(sequence=4), 100)
    assert {family.nums_shared[0] for family in families} == {shared}


def test_forks_go_on_from_their_session_and_a_fork_of_a_fork_from_what_it_has_of_the_first() -> None:
    rng = np.random.default_rng(0)
    group = make_group(rng, "a", 6, [8, 8])
    fork = make_fork(rng, group[0], "b", 5)
    second = make_fork(rng, fork, "c", 2)
    families = find_families([*group, fork, second], Padding(), 100)
    assert [family.members for family in families] == [(0, 2, 3), (1,)]
    ((batch,),) = pack_for_ranks([*group, fork, second], 1, PackOptions(64, share_prompts=True), replay=True)
    assert batch.prefix_of is not None
    assert batch.prefix_rows is not None
    # 14 and 14 tokens; forks of 11 + 3 and 13 + 3 tokens have 10 rows of the session.
    assert sorted(np.diff(batch.cu_seqlens).tolist()) == [3, 5, 13, 13]
    assert sorted(batch.prefix_rows.tolist()) == [0, 0, 10, 10]
    assert packing_metrics([[batch]], PackOptions(64))["packing/shared_rows"] == 20 / 34


def test_a_fork_at_the_prompt_shares_it_with_the_group() -> None:
    rng = np.random.default_rng(0)
    group = make_group(rng, "a", 6, [8, 8])
    families = find_families([*group, make_fork(rng, group[0], "b", 0)], Padding(), 100)
    assert [(family.members, family.nums_shared[0]) for family in families] == [((0, 1, 2), 5)]


def test_a_fork_that_was_routed_otherwise_or_does_not_fit_is_packed_alone() -> None:
    rng = np.random.default_rng(0)
    (session,) = make_group(rng, "a", 6, [8])
    fork = make_fork(rng, session, "b", 5)
    experts = fork.trajectory.expert_ids.copy()
    experts[2, 1] = np.roll(experts[2, 1], 1)
    other = changed(fork, expert_ids=experts)
    assert [each.members for each in find_families([session, other], Padding(), 100)] == [(0,), (1,)]
    assert [each.members for each in find_families([session, fork], Padding(), 16)] == [(0, 1)]
    assert [each.members for each in find_families([session, fork], Padding(), 15)] == [(0,), (1,)]


def test_lineages_that_name_each_other_share_nothing() -> None:
    rng = np.random.default_rng(0)
    (session,) = make_group(rng, "a", 6, [8])
    fork = make_fork(rng, session, "b", 5)
    lineage = replace(session.trajectory.lineage, parent_rollout_id="b", fork_at=3)
    families = find_families([changed(session, lineage=lineage), fork], Padding(), 100)
    assert [family.members for family in families] == [(0,), (1,)]


def test_groups_are_divided_where_a_microbatch_or_an_even_share_is_smaller() -> None:
    group = make_group(np.random.default_rng(0), "a", 11, [9] * 6)
    assert [f.members for f in find_families(group, Padding(), 40)] == [(0, 1, 2), (3, 4, 5)]
    assert [f.members for f in find_families(group, Padding(), 20)] == [(0,), (1,), (2,), (3,), (4,), (5,)]
    many = [each for i in range(32) for each in make_group(np.random.default_rng(i), str(i), 11, [9] * 8)]
    options = PackOptions(1000, share_prompts=True)
    ranks = pack_for_ranks(many, 4, options, replay=False)
    metrics = packing_metrics(ranks, options)
    assert metrics["packing/cost_max_over_mean"] < 1.05
    assert metrics["packing/shared_rows"] > 0.5


def test_costs_of_what_is_shared_count_once() -> None:
    group = make_group(np.random.default_rng(0), "a", 11, [9, 5])
    (family,) = find_families(group, Padding(), 100)
    cost = SequenceCost(linear=2.0, quadratic=1.0)
    num_rows = [len(sample.trajectory) - 1 for sample in group]
    assert family.size(num_rows, Padding()) == 10 + 9 + 5
    assert family.cost(num_rows, Padding(), cost) == cost(19) + cost(15) - cost(10)


def make_texts(rng: np.random.Generator, num_common: int, shapes: list[tuple[int, int]]) -> list[TextSample]:
    """Texts that begin with the same tokens, of which none is learned: `shapes` has how many more tokens each one's
    prompt has, and how many its response."""
    common = rng.integers(100, 200, num_common)
    texts = []
    for own, learned in shapes:
        token_ids = np.concatenate([common, rng.integers(0, 100, own + learned)]).astype(np.int32)
        texts.append(TextSample(token_ids, np.arange(len(token_ids)) >= num_common + own))
    return texts


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=9),
    st.integers(24, 80),
    st.sampled_from([(1, 1), (1, 4), (4, 4)]),
    st.integers(1, 3),
)
def test_every_text_finds_each_of_its_rows_in_order(
    seed: int, common: int, shapes: list[tuple[int, int]], budget: int, padding: tuple[int, int], num_ranks: int
) -> None:
    texts = make_texts(np.random.default_rng(seed), common, [(own, learned + 1) for own, learned in shapes])
    options = PackOptions(budget, Padding(*padding), share_prompts=True)
    seen: list[int] = []
    for batch in (batch for rank in pack_text_for_ranks(texts, num_ranks, options) for batch in rank):
        for sequence in set(range(len(batch.cu_seqlens) - 1)) - prefixes_in(batch):
            rows = [row for row in rows_of(batch, sequence) if not batch.is_pad[row]]
            if rows:
                index = int(batch.sample_index[rows[-1]])
                assert batch.input_ids[rows].tolist() == texts[index].token_ids[:-1].tolist()
                assert batch.position_ids[rows].tolist() == list(range(len(rows)))
                assert batch.loss_mask[rows].tolist() == texts[index].loss_mask[1:].tolist()
                own = [row for row in rows if batch.loss_mask[row]]
                assert batch.target_ids[own].tolist() == texts[index].token_ids[texts[index].loss_mask].tolist()
                seen.append(index)
    assert sorted(seen) == list(range(len(texts)))


def test_texts_share_what_all_of_them_begin_with_and_nothing_that_one_learns() -> None:
    rng = np.random.default_rng(0)
    options = PackOptions(64, share_prompts=True)
    ((batch,),) = pack_text_for_ranks(make_texts(rng, 6, [(2, 3), (1, 4)]), 1, options)
    assert np.diff(batch.cu_seqlens).tolist() == [6, 4, 4]
    assert packing_metrics([[batch]], options)["packing/shared_rows"] == 6 / 14
    # The row of a text's last unlearned token predicts a learned one, and stays with it.
    ((batch,),) = pack_text_for_ranks(make_texts(rng, 6, [(0, 3), (0, 4)]), 1, options)
    assert np.diff(batch.cu_seqlens).tolist() == [5, 3, 4]
    for alone in ([*make_texts(rng, 6, [(2, 3)]), *make_texts(rng, 0, [(4, 3)])], make_texts(rng, 6, [(2, 3)])):
        ((batch,),) = pack_text_for_ranks(alone, 1, options)
        assert batch.prefix_of is None


def make_shared() -> Microbatch:
    group = make_group(np.random.default_rng(0), "a", 6, [3, 4])
    ((batch,),) = pack_for_ranks(group, 1, PackOptions(64, share_prompts=True), replay=True)
    return batch


def test_a_frame_brings_prefixes_to_the_ranks() -> None:
    ((batch,), _) = decode_batches(encode_batches([make_shared()], {}), spec=SPEC)
    assert batch.prefix_of is not None
    assert batch.prefix_of.tolist() == [-1, 0, 0]


@pytest.mark.parametrize("prefix_of", [[-1, 1, 0], [-1, 0, 1], [-1, 2, 0], [-2, 0, 0], [-1, 0, 7]])
def test_prefixes_that_come_later_or_have_one_themselves_are_refused(prefix_of: list[int]) -> None:
    frame = encode_batches([replace(make_shared(), prefix_of=np.array(prefix_of, np.int32))], {})
    with pytest.raises(ContractError) as caught:
        decode_batches(frame, spec=SPEC)
    assert (caught.value.reason, caught.value.field) == (Reason.VALUE_OUT_OF_RANGE, "prefix_of")


@pytest.mark.parametrize("rows", [[0, 6, 5], [0, 0, 5], [1, 5, 5], [0, -1, 5], None])
def test_more_rows_than_a_prefix_has_are_refused(rows: list[int] | None) -> None:
    wrong = replace(make_shared(), prefix_rows=None if rows is None else np.array(rows, np.int32))
    with pytest.raises(ContractError) as caught:
        decode_batches(encode_batches([wrong], {}), spec=SPEC)
    assert caught.value.field == "prefix_rows"
