"""Wire codec against int32 + base64 in JSON: size, speed, and what validation costs on top.

One trajectory of 32K tokens with 48 MoE layers, top-8 of 128 experts, kept sets of a dozen ids on average; once with
uniform routing (the worst case for any codec) and once with skewed expert popularity. The baseline carries the same
arrays, each as base64 text, through the standard library's json; it checks nothing.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import numpy as np
from _report import Result, Timing, json_argument, report, timed

from moerl.contract.invariants import check_trajectory
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.contract.wire import decode_records, encode_trajectories

SPEC = ModelSpec(48, 8, 128, 151_669, fingerprint="bench")
NUM_TOKENS, NUM_PROMPT = 32_768, 1_024
REPEATS = 9


@dataclass(frozen=True)
class Measured:
    """Bytes and seconds of one workload."""

    frame_bytes: int
    json_bytes: int
    encode: Timing
    decode: Timing
    validate: Timing
    json_encode: Timing
    json_decode: Timing


def sample_routing(rng: np.random.Generator, skew: float, num_rows: int) -> np.ndarray:
    """uint8 [S-1, L, K]: Gumbel top-K, with log-popularity of standard deviation `skew` drawn per layer."""
    expert_ids = np.empty((num_rows, SPEC.num_moe_layers, SPEC.experts_per_token), np.uint8)
    for layer in range(SPEC.num_moe_layers):
        popularity = rng.normal(0.0, skew, SPEC.num_experts).astype(np.float32)
        noise = rng.random((num_rows, SPEC.num_experts), dtype=np.float32)
        keys = -np.log(-np.log(np.maximum(noise, 1e-9))) + popularity
        expert_ids[:, layer] = np.argpartition(-keys, SPEC.experts_per_token, axis=1)[:, : SPEC.experts_per_token]
    return expert_ids


def sample_trajectory(
    rng: np.random.Generator, skew: float, num_tokens: int = NUM_TOKENS, num_prompt: int = NUM_PROMPT
) -> Trajectory:
    sampled = np.arange(num_tokens) >= num_prompt
    ranks = (rng.pareto(0.6, num_tokens) * 60).astype(np.int64)
    token_ids = np.minimum(ranks, SPEC.vocab_size - 1).astype(np.int32)
    sizes = np.where(sampled, np.clip(rng.lognormal(1.2, 1.4, num_tokens), 1, 512), 0).astype(np.int64)
    rows = []
    for t in np.flatnonzero(sampled):
        others = (rng.pareto(0.6, sizes[t] - 1) * 60).astype(np.int64)
        rows.append(np.union1d(np.minimum(others, SPEC.vocab_size - 1), token_ids[t]).astype(np.int32))
    lengths = np.zeros(num_tokens, np.int64)
    lengths[sampled] = [len(row) for row in rows]
    logprobs = np.where(lengths > 1, -rng.exponential(0.5, num_tokens), 0.0)
    logmass = np.where(sampled, -rng.exponential(0.05, num_tokens), 0.0)
    return Trajectory(
        spec=SPEC,
        lineage=Lineage("rollout", "prompt", "group"),
        turns=(
            Turn(0, num_prompt, TurnKind.PROMPT),
            Turn(num_prompt, num_tokens, TurnKind.SAMPLED, SamplingParams(top_p=0.95, top_k=512)),
        ),
        token_ids=token_ids,
        sampled=sampled,
        rollout_logprobs=logprobs.astype(np.float32),
        kept_logmass=logmass.astype(np.float32),
        policy_versions=np.where(sampled, 3, -1).astype(np.int32),
        expert_ids=sample_routing(rng, skew, num_tokens - 1),
        routed=np.ones(num_tokens - 1, np.bool_),
        kept=KeptSets(np.concatenate(([0], np.cumsum(lengths))), np.concatenate(rows)),
        truncated=sampled,
        finish_reason=FinishReason.STOP,
        rewards={"reward": 1.0},
    )


def json_arrays(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """The arrays of the baseline, integers as int32; made in advance, so that the baseline pays for no conversion."""
    arrays = {
        "token_ids": trajectory.token_ids,
        "rollout_logprobs": trajectory.rollout_logprobs,
        "kept_logmass": trajectory.kept_logmass,
        "policy_versions": trajectory.policy_versions,
        "expert_ids": trajectory.expert_ids.astype(np.int32),
        "kept_offsets": trajectory.kept.offsets.astype(np.int32),
        "kept_ids": trajectory.kept.ids,
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def json_encode(arrays: dict[str, np.ndarray]) -> bytes:
    return json.dumps({name: base64.b64encode(array.data).decode() for name, array in arrays.items()}).encode()


def json_decode(text: bytes) -> dict[str, np.ndarray]:
    floats = ("rollout_logprobs", "kept_logmass")
    return {
        name: np.frombuffer(base64.b64decode(data), np.float32 if name in floats else np.int32)
        for name, data in json.loads(text).items()
    }


def measure(trajectory: Trajectory) -> Measured:
    frame, arrays = encode_trajectories([trajectory]), json_arrays(trajectory)
    text = json_encode(arrays)
    decoded = json_decode(text)
    if not all((decoded[name] == array.reshape(-1)).all() for name, array in arrays.items()):
        raise SystemExit("the baseline does not round-trip")
    timings = timed(
        [
            lambda: encode_trajectories([trajectory]),
            lambda: decode_records(frame, spec=SPEC),
            lambda: check_trajectory(trajectory),
            lambda: json_encode(arrays),
            lambda: json_decode(text),
        ],
        REPEATS,
    )
    return Measured(len(frame), len(text), *timings)


def results_of(name: str, m: Measured) -> list[Result]:
    ratio = m.frame_bytes / m.json_bytes
    codec, baseline = m.encode.median + m.decode.median, m.json_encode.median + m.json_decode.median
    relative = (m.encode.spread + m.decode.spread) / codec + (m.json_encode.spread + m.json_decode.spread) / baseline
    speed_up = baseline / codec
    share = m.validate.median / m.json_decode.median
    context = {
        "encode": m.encode,
        "decode, not validated": m.decode,
        "validation": m.validate,
        "JSON encode": m.json_encode,
        "JSON decode": m.json_decode,
    }
    return [
        Result(f"{name}: size / JSON size", ratio, "<= 0.19", ratio <= 0.19, "ratio"),
        Result(f"{name}: bytes per token", m.frame_bytes / NUM_TOKENS, unit="B"),
        Result(
            f"{name}: encode + decode, times faster than JSON",
            speed_up,
            ">= 10",
            speed_up >= 10,
            "x",
            speed_up * relative,
        ),
        Result(
            f"{name}: validation / JSON decode",
            share,
            "<= 1",
            share <= 1,
            "ratio",
            share * (m.validate.spread / m.validate.median + m.json_decode.spread / m.json_decode.median),
        ),
        *(
            Result(f"{name}: {what}", timing.median * 1e3, unit="ms", spread=timing.spread * 1e3)
            for what, timing in context.items()
        ),
    ]


def main() -> None:
    json_path = json_argument(__doc__)
    results: list[Result] = []
    for name, skew in (("uniform routing", 0.0), ("skewed routing", 1.0)):
        results += results_of(name, measure(sample_trajectory(np.random.default_rng(0), skew)))
    report(results, json_path)


if __name__ == "__main__":
    main()
