"""Minibatches on their way to the ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_moe
from policy_rows import preset

from moerl.algorithms.arrays import sampled_tokens
from moerl.batching.cost import SequenceCost
from moerl.batching.packing import PackOptions
from moerl.contract.batch import BatchTotals, Microbatch, TextSample
from moerl.contract.batch_wire import decode_batches, encode_batches
from moerl.contract.parallel import ParallelDims
from moerl.errors import ContractError
from moerl.orchestration.batches import pack_minibatch, pack_text_minibatch

RANKS = ParallelDims(data=2).ranks()


def received(frame: bytes) -> tuple[list[Microbatch], dict[str, float]]:
    return decode_batches(frame, spec=tiny_moe.SPEC)


def test_every_rank_gets_its_own_frame_and_the_tokens_of_all() -> None:
    minibatch = pack_minibatch(tiny_moe.make_samples(3, (8, 9, 10)), RANKS, PackOptions(32), "reject")
    shares, facts = zip(*map(received, minibatch.frames), strict=True)
    tokens = [sum(int(batch.loss_mask.sum()) for batch in share) for share in shares]
    assert all(tokens)
    assert sum(tokens) == minibatch.num_tokens
    assert [each["num_tokens"] for each in facts] == [minibatch.num_tokens] * 2


def test_a_share_with_an_expert_that_does_not_exist_is_refused_by_its_rank() -> None:
    minibatch = pack_minibatch(tiny_moe.make_samples(3, (8, 9, 10)), RANKS, PackOptions(32), "reject")
    batches, facts = received(minibatch.frames[1])
    assert batches[0].expert_ids is not None
    expert_ids = batches[0].expert_ids.copy()
    expert_ids[0, 0, 0] = 200
    with pytest.raises(
        ContractError, match=r"expert_id_out_of_range in field 'expert_ids'; seen: 200; expected: in \[0, 8\)"
    ):
        received(encode_batches([replace(batches[0], expert_ids=expert_ids)], facts))


def test_what_an_algorithm_says_of_all_tokens_reaches_every_rank() -> None:
    samples = tiny_moe.make_samples(3, (8, 9, 10))
    said = preset("kl_cov").batch_facts(sampled_tokens(samples))
    minibatch = pack_minibatch(samples, RANKS, PackOptions(32), "reject", said)
    told = [BatchTotals.read(received(frame)[1]) for frame in minibatch.frames]
    assert told == [minibatch.totals] * 2
    assert told[0].facts == said
    trained = [batch for frame in minibatch.frames for batch in received(frame)[0]]
    mean = np.concatenate([batch.rollout_logprobs[batch.loss_mask] for batch in trained]).mean()
    assert told[0].facts["cov_mean_logprob"] == pytest.approx(float(mean), rel=1e-6)


def test_a_minibatch_says_what_the_model_computes_for_it_however_it_is_packed() -> None:
    cost = SequenceCost(linear=2.0, quadratic=1.0)
    samples = tiny_moe.make_samples(3, (8, 9, 10))
    expected = 3 * sum(2 * rows + rows**2 for rows in (7, 8, 9))
    for tokens in (16, 64):
        assert pack_minibatch(samples, RANKS, PackOptions(tokens, cost=cost), "reject").model_flops == expected
    texts = [TextSample(np.arange(length, dtype=np.int32), np.arange(length) > 0) for length in (8, 9, 10)]
    assert pack_text_minibatch(texts, RANKS, PackOptions(64, cost=cost)).model_flops == expected
