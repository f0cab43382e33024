"""Weights that change while 64 requests run in the embedded engine: every token says which ones sampled it, rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_moe
import torch
import weight_sync
from ranks import Ranks

from moerl.contract.invariants import check_trajectory, check_versions
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory

NUM_REQUESTS, MAX_RUNNING = 72, 64
UPDATES = {3: 1, 7: 2}
"""Version by the step of the engine after which it is published."""


def requests() -> list[RolloutRequest]:
    rng = np.random.default_rng(5)
    return [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i}", "g"),
            tuple(int(t) for t in rng.integers(0, tiny_moe.SPEC.vocab_size, rng.integers(2, 9))),
            SamplingParams(top_k=9, seed=i),
            max_new_tokens=int(rng.integers(6, 16)),
        )
        for i in range(NUM_REQUESTS)
    ]


def run_in_flight(layout: Any, path: Path) -> tuple[list[Any], dict[int, dict[str, torch.Tensor]], list[int]]:
    """Publishes versions while an engine samples. Returns what the engine recorded, the weights of each version, and
    how many requests ran at each of these updates."""
    from transformers import AutoModelForCausalLM

    from moerl.rollout.embedded import EmbeddedEngine

    trainer = tiny_moe.build(layout, path, optimizer=None)
    generator = torch.Generator().manual_seed(3)
    held: dict[int, dict[str, torch.Tensor]] = {}
    step, running = 0, []

    def publish(version: int) -> None:
        shards = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in trainer.shards().items()
        }
        publisher.publish(shards, weight_sync.update_of(plan, version))
        held[version] = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}

    def between_steps() -> None:
        nonlocal step
        step += 1
        if step in UPDATES:
            assert engine._run is not None
            running.append(engine._run.table.num_running)
            publish(UPDATES[step])

    engine = EmbeddedEngine(
        AutoModelForCausalLM.from_pretrained(path), tiny_moe.SPEC, engine_id="e", max_running=MAX_RUNNING
    )
    engine.between_steps = between_steps
    plan = weight_sync.plan_for(trainer, path)
    publisher = weight_sync.publisher_of(plan, layout.rank, engine)
    publish(0)
    return [record.values for record in engine.generate(requests())], held, running


@torch.no_grad()
def replay(models: dict[int, Any], trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs [S - 1, V] and expert ids [S - 1, L, K] of the tokens one by one, each under the version that its row
    counts for, on the cache that the versions before have left."""
    from transformers import DynamicCache

    versions = trajectory.policy_versions[1:].copy()
    first = int(trajectory.sampled.argmax())
    versions[: first - 1] = versions[first - 1]
    cache, logprobs, experts = DynamicCache(config=models[0].config), [], []
    for token, version in zip(trajectory.token_ids[:-1].tolist(), versions.tolist(), strict=True):
        out = models[version](torch.tensor([[token]]), past_key_values=cache, output_router_logits=True)
        logprobs.append(out.logits[0, 0].log_softmax(-1).numpy())
        experts.append(np.stack([np.sort(layer[0].topk(2).indices.numpy()) for layer in out.router_logits]))
    return np.stack(logprobs), np.stack(experts)


def test_tokens_of_64_running_requests_carry_the_version_whose_weights_sampled_them(untied: Path, one_process: Ranks):
    from transformers import AutoModelForCausalLM

    ((records, held, running),) = one_process.run(run_in_flight, untied)
    assert running[0] == MAX_RUNNING
    assert running[1] > MAX_RUNNING // 2
    models = {}
    for version, weights in held.items():
        models[version] = AutoModelForCausalLM.from_pretrained(untied).eval()
        models[version].load_state_dict(weights)
    trajectories = sorted((Trajectory(**values) for values in records), key=lambda each: each.lineage.rollout_id)
    assert len(trajectories) == NUM_REQUESTS
    for trajectory in trajectories:
        check_trajectory(trajectory)
        check_versions(trajectory, trainer_version=2)
        versions = trajectory.policy_versions[trajectory.sampled]
        assert (np.diff(versions) >= 0).all()
        if versions[0] == 0:
            # The first step gives two tokens, each further one gives one.
            assert versions.tolist() == [0] * 4 + [1] * min(4, len(versions) - 4) + [2] * (len(versions) - 8)
    assert {tuple(np.unique(t.policy_versions[t.sampled])) for t in trajectories} >= {(0, 1), (0, 1, 2)}
    for trajectory in trajectories[::6]:
        first = int(trajectory.sampled.argmax())
        logprobs, experts = replay(models, trajectory)
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), experts)
        sampled = logprobs[np.arange(len(trajectory) - 1), trajectory.token_ids[1:].astype(np.int64)]
        scored = (trajectory.rollout_logprobs + trajectory.kept_logmass)[first:]
        np.testing.assert_allclose(scored, sampled[first - 1 :], atol=1e-4)
