"""The embedded engine on the device against a forward pass of transformers. A check of `gpu_check.py`.

In float32: log-probs and experts of everything that it samples are those of transformers, and the engine's sampler on a
CPU, given transformers' logits, seeds and positions, draws the same tokens from the same kept sets. Few may differ:
numbers that are equal up to rounding. In bfloat16: log-probs against float32, with the limit of `_gpu_models.py`. Twice
the same tokens, and the same by steps that are not recorded; tokens per second of both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu_checks import Findings
from _gpu_models import SIZES, apart_results, replays, same_experts, sampled_logprobs, write_checkpoint
from _report import Result
from torch import Tensor

from moerl.config.engine_memory import DeviceOptions
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.models.description import ModelDescription
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_model
from moerl.rollout.sampler import RowParams, sample, seeded_uniforms

REQUESTS = {"cuda": 32, "cpu": 6}
NEW_TOKENS = {"cuda": 64, "cpu": 8}
LOGPROB_LIMIT = 1e-3
"""Nats, in float32."""
SAME_LIMIT = 0.995
"""Least share of choices in float32 that are the same."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
)


def check(device: str) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), device)
        exact = rollouts(model, torch.float32, device)
        results = [
            same("tokens in a second run, float32", exact, rollouts(model, torch.float32, device)),
            same("tokens by steps that are not recorded", exact, rollouts(model, torch.float32, device, record=False)),
            *exact_results(model, exact, device),
        ]
        half = rollouts(model, torch.bfloat16, device)
        results += [speed(model, device, record=record) for record in (True, False)]
        results.append(same("tokens in a second run, bfloat16", half, rollouts(model, torch.bfloat16, device)))
        ours = sampled_logprobs(half, [trajectory.rollout_logprobs for trajectory in half])
        theirs, wanted = (replays(model, half, dtype, device) for dtype in (torch.bfloat16, torch.float32))
        results += apart_results(
            "engine in bfloat16",
            ours,
            *(sampled_logprobs(half, [each.logprobs for each in r]) for r in (theirs, wanted)),
        )
        share = same_experts(half, theirs)
        results.append(Result("bfloat16: experts that transformers in bfloat16 would choose", share, unit="share"))
    return Findings(results)


def requests(device: str) -> list[RolloutRequest]:
    rng = np.random.default_rng(5)
    return [
        RolloutRequest(
            Lineage(f"rollout-{i}", f"prompt-{i}", f"group-{i}"),
            tuple(rng.integers(0, SIZES[device].vocab, 3 + i).tolist()),
            SamplingParams(seed=i, **SAMPLING[i % len(SAMPLING)]),
            NEW_TOKENS[device] - i % 3,
        )
        for i in range(REQUESTS[device])
    ]


def engine_of(model: ModelDescription, dtype: torch.dtype, device: str, *, record: bool) -> EmbeddedEngine:
    """Fewer slots than requests."""
    assert model.folder is not None
    return EmbeddedEngine(
        load_model(model.folder, dtype=dtype).to(device),
        model.spec,
        engine_id="engine",
        max_running=REQUESTS[device] * 2 // 3,
        policy_version=0,
        on_device=DeviceOptions(record_steps=record),
    )


def speed(model: ModelDescription, device: str, *, record: bool) -> Result:
    """Tokens per second of a second run in bfloat16, whose steps are recorded already."""
    engine, asked = engine_of(model, torch.bfloat16, device, record=record), requests(device)
    num_tokens, seconds = 0, 1.0
    for _ in range(2):
        start = time.perf_counter()
        num_tokens = sum(Trajectory(**record.values).num_sampled for record in engine.generate(asked))
        seconds = time.perf_counter() - start
    engine.close()
    how = "recorded steps" if record else "steps one operation at a time"
    return Result(f"bfloat16: {how}", num_tokens / seconds, unit="tokens/s")


def rollouts(model: ModelDescription, dtype: torch.dtype, device: str, *, record: bool = True) -> list[Trajectory]:
    """Returns the trajectories that the engine samples, in the order of the requests."""
    engine, asked = engine_of(model, dtype, device, record=record), requests(device)
    found = {record.rollout_id: Trajectory(**record.values) for record in engine.generate(asked)}
    engine.close()
    return [found[request.lineage.rollout_id] for request in asked]


def exact_results(model: ModelDescription, trajectories: Sequence[Trajectory], device: str) -> list[Result]:
    """In float32, against transformers on the device."""
    replayed = replays(model, trajectories, torch.float32, device)
    ours = sampled_logprobs(trajectories, [trajectory.rollout_logprobs for trajectory in trajectories])
    theirs = sampled_logprobs(trajectories, [each.logprobs for each in replayed])
    largest = float(np.abs(ours - theirs).max())
    tokens, sets = drawn_again(model, trajectories, device)
    return [
        Result(
            "float32: log-probs against transformers",
            largest,
            f"<= {LOGPROB_LIMIT:g}",
            largest <= LOGPROB_LIMIT,
            "nats",
        ),
        at_least("float32: experts that transformers would choose", same_experts(trajectories, replayed)),
        at_least("float32: tokens drawn from transformers' logits", tokens),
        at_least("float32: kept sets made of transformers' logits", sets),
    ]


def at_least(name: str, share: float) -> Result:
    return Result(name, share, f">= {SAME_LIMIT:g}", share >= SAME_LIMIT, "share")


def same(name: str, first: Sequence[Trajectory], second: Sequence[Trajectory]) -> Result:
    """Nothing of what an engine does on one device depends on more than its requests."""
    pairs = zip(first, second, strict=True)
    share = float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in pairs]))
    return Result(f"rollouts with the same {name}", share, "== 1", share == 1.0, "share")


def drawn_again(model: ModelDescription, trajectories: Sequence[Trajectory], device: str) -> tuple[float, float]:
    """Shares of sampled tokens, and of their kept sets, that the sampler on a CPU gives for transformers' logits."""
    assert model.folder is not None
    judge = load_model(model.folder, dtype=torch.float32, attn_implementation="sdpa").to(device).eval()
    same_tokens: list[bool] = []
    same_sets: list[bool] = []
    for request, trajectory in zip(requests(device), trajectories, strict=True):
        positions = np.flatnonzero(trajectory.sampled)
        ids = torch.from_numpy(trajectory.token_ids[:-1].astype(np.int64)).to(device)[None]
        with torch.inference_mode():
            logits_TV: Tensor = judge(input_ids=ids, use_cache=False).logits[0].cpu()
        seeds = np.full(len(positions), request.sampling.seed, np.uint64)
        params = RowParams.of([request.sampling] * len(positions))
        found = sample(logits_TV[torch.from_numpy(positions - 1)], params, seeded_uniforms(seeds, positions))
        same_tokens += (found.token_ids == trajectory.token_ids[positions]).tolist()
        sets = np.split(found.kept_ids, np.cumsum(found.kept_sizes)[:-1])
        bounds = zip(trajectory.kept.offsets[positions], trajectory.kept.offsets[positions + 1], strict=True)
        held = [trajectory.kept.ids[start:end] for start, end in bounds]
        same_sets += [np.array_equal(mine, wanted) for mine, wanted in zip(held, sets, strict=True)]
    return float(np.mean(same_tokens)), float(np.mean(same_sets))
