from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_moe
import torch
from factories import FULL, GREEDY, NUCLEUS, SPEC, make_trajectory

from moerl.rollout.replay import TransformersReplay, support_logprobs

CPU = torch.device("cpu")


def test_a_replay_scores_every_sampled_token_with_the_recorded_experts_inside_its_kept_set(untied: Path) -> None:
    replay = TransformersReplay(tiny_moe.described(untied), dtype=torch.float32, device=CPU)
    judge = tiny_moe.Judge(untied)
    for sample in tiny_moe.make_samples(4, [200, 23, 31]):
        trajectory = sample.trajectory
        replayed = replay.replay(trajectory)
        with torch.inference_mode():
            logits = judge.logits(trajectory.token_ids[:-1], trajectory.expert_ids)
            wanted_TV = tiny_moe.support_logprobs(logits, sample)
        wanted = wanted_TV.numpy()[np.arange(len(trajectory) - 1), trajectory.token_ids[1:]]
        np.testing.assert_allclose(replayed.logprobs[1:], np.where(trajectory.sampled[1:], wanted, 0.0), atol=2e-5)
        assert replayed.own_ids.shape == trajectory.expert_ids.shape


def test_a_replay_tells_what_the_routers_would_have_chosen(untied: Path) -> None:
    from families import FAMILIES, Judge

    replay = TransformersReplay(tiny_moe.described(untied), dtype=torch.float32, device=CPU)
    [sample] = tiny_moe.make_samples(5, [30])
    trajectory = sample.trajectory
    judge = Judge(untied, FAMILIES["qwen3_moe"])
    with torch.inference_mode():
        judge.logits(trajectory.token_ids[:-1], trajectory.expert_ids)
    wanted = torch.stack([logits.topk(2).indices for logits in judge.router_logits], 1).sort(-1).values
    natural = torch.from_numpy(replay.replay(trajectory).own_ids).sort(-1).values
    assert (natural == wanted).all()
    assert (natural.numpy() != np.sort(trajectory.expert_ids, -1)).any()


@pytest.mark.parametrize("sampling", [NUCLEUS, FULL, GREEDY])
def test_log_probs_over_a_support_are_those_of_a_loop_over_its_ids(sampling) -> None:
    trajectory = make_trajectory(np.random.default_rng(1), sampling=sampling, num_sampled=40)
    tokens = np.flatnonzero(trajectory.sampled)
    logits = np.random.default_rng(2).normal(0.0, 3.0, (len(tokens), SPEC.vocab_size))
    wanted = []
    for row, token in enumerate(tokens):
        if sampling.is_greedy:
            wanted.append(0.0)
            continue
        kept = trajectory.kept.ids[trajectory.kept.offsets[token] : trajectory.kept.offsets[token + 1]]
        ids = kept if trajectory.truncated[token] else np.arange(SPEC.vocab_size)
        z = logits[row] / np.float64(np.float32(sampling.temperature))
        wanted.append(z[trajectory.token_ids[token]] - np.log(sum(np.exp(z[i]) for i in ids)))
    found = support_logprobs(torch.from_numpy(logits), trajectory, tokens)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_ids_that_the_engine_never_samples_have_no_mass(untied: Path) -> None:
    spec = replace(tiny_moe.SPEC, vocab_size=60)
    trajectory = make_trajectory(np.random.default_rng(0), spec, sampling=FULL, num_sampled=10)
    narrow = TransformersReplay(replace(tiny_moe.described(untied), spec=spec), dtype=torch.float32, device=CPU).replay(
        trajectory
    )
    wide = TransformersReplay(tiny_moe.described(untied), dtype=torch.float32, device=CPU).replay(trajectory)
    assert (narrow.logprobs[trajectory.sampled] > wide.logprobs[trajectory.sampled]).all()
