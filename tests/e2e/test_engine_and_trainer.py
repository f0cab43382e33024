"""The gate of the two guarantees: on the same weights, in fp32, the trainer's log-probs are the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_moe
from ranks import Ranks


def sample(path: Path, *, temperature: float, top_p: float) -> list[Any]:
    """Samples 12 rollouts, with their routes and kept sets, with the embedded engine and the model at `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    from moerl.contract.batch import TrainSample
    from moerl.contract.ports import RolloutRequest
    from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
    from moerl.rollout.embedded import EmbeddedEngine

    rng = np.random.default_rng(5)
    requests = [
        RolloutRequest(
            lineage=Lineage(f"rollout-{i}", f"prompt-{i}", f"group-{i}"),
            prompt_ids=tuple(rng.integers(0, tiny_moe.SPEC.vocab_size, 3 + i).tolist()),
            sampling=SamplingParams(temperature=temperature, top_p=top_p, seed=i),
            max_new_tokens=12 + i,
        )
        for i in range(12)
    ]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = EmbeddedEngine(model, tiny_moe.SPEC, engine_id="engine", max_running=5, policy_version=0)
    trajectories = [Trajectory(**record.values) for record in engine.generate(requests)]
    return [TrainSample(t, np.zeros(len(t.token_ids), np.float32)) for t in trajectories]


def score_rollouts(layout: Any, path: Path, temperature: float, top_p: float) -> dict[str, np.ndarray]:
    """Per sampled token: log-probs of the engine and of the trainer with and without masks and recorded routes."""
    from moerl.trainer.losses import Scorer

    samples = sample(path, temperature=temperature, top_p=top_p)
    batches = tiny_moe.pack(samples)[0]
    trainer = tiny_moe.build(layout, path)

    def rows(field: str, *, keep_mask: bool, enforce: bool) -> np.ndarray:
        scorer = Scorer(batches, keep_mask=keep_mask)
        scores = trainer.score(batches, scorer, enforce=enforce)
        return np.concatenate([getattr(s, field).numpy()[b.loss_mask] for b, s in zip(batches, scores, strict=True)])

    return {
        "engine": np.concatenate([batch.rollout_logprobs[batch.loss_mask] for batch in batches]),
        "kept_logmass": np.concatenate(
            [
                samples[batch.sample_index[row]].trajectory.kept_logmass[batch.position_ids[row] + 1, None]
                for batch in batches
                for row in np.flatnonzero(batch.loss_mask)
            ]
        ),
        "kept": rows("logprobs_T", keep_mask=True, enforce=True),
        "natural": rows("logprobs_T", keep_mask=True, enforce=False),
        "full": rows("logprobs_T", keep_mask=False, enforce=True),
        "differing": rows("layers_differing_T", keep_mask=True, enforce=False),
    }


def test_with_masks_the_trainer_gives_the_log_probs_of_the_engine(untied: Path, one_process: Ranks) -> None:
    [rows] = one_process.run(score_rollouts, untied, 1.0, 0.9)
    assert len(rows["engine"]) > 150
    assert not rows["differing"].any()
    for routes in ("kept", "natural"):
        np.testing.assert_allclose(rows[routes], rows["engine"], rtol=0, atol=1e-5)


def test_without_masks_every_log_prob_is_off_by_the_kept_mass(untied: Path, one_process: Ranks) -> None:
    [rows] = one_process.run(score_rollouts, untied, 0.7, 0.9)
    assert (rows["kept_logmass"] < -0.01).mean() > 0.9
    np.testing.assert_allclose(rows["full"] - rows["engine"], rows["kept_logmass"], rtol=0, atol=1e-5)


def test_sampling_that_cuts_nothing_needs_no_masks(tied: Path, one_process: Ranks) -> None:
    [rows] = one_process.run(score_rollouts, tied, 1.0, 1.0)
    assert not rows["kept_logmass"].any()
    for scored in ("kept", "full"):
        np.testing.assert_allclose(rows[scored], rows["engine"], rtol=0, atol=1e-5)
