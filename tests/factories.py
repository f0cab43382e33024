"""Random valid trajectories for any test: ``from factories import make_trajectory``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

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
from moerl.machine.model_files import SINGLE_FILE
from moerl.machine.model_tensors import needed_tensors
from moerl.models.description import describe

SPEC = ModelSpec(num_moe_layers=3, experts_per_token=2, num_experts=8, vocab_size=100, fingerprint="tiny")
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.9, top_k=12, seed=5)
FULL = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Layout:
    """Spans of a trajectory: (kind, number of tokens, sampling parameters of sampled spans), in order."""

    spans: tuple[tuple[TurnKind, int, SamplingParams | None], ...]

    @classmethod
    def single_turn(cls, num_prompt: int, num_sampled: int, sampling: SamplingParams) -> Layout:
        return cls(((TurnKind.PROMPT, num_prompt, None), (TurnKind.SAMPLED, num_sampled, sampling)))

    def turns(self) -> tuple[Turn, ...]:
        turns, start = [], 0
        for kind, length, sampling in self.spans:
            turns.append(Turn(start, start + length, kind, sampling))
            start += length
        return tuple(turns)


def make_trajectory(
    rng: np.random.Generator,
    spec: ModelSpec = SPEC,
    *,
    num_prompt: int = 3,
    num_sampled: int = 5,
    sampling: SamplingParams = NUCLEUS,
    **overrides: Any,
) -> Trajectory:
    """A valid trajectory of one prompt and one sampled turn; `overrides` replace fields of the result."""
    return make_from_layout(rng, Layout.single_turn(num_prompt, num_sampled, sampling), spec, **overrides)


def make_from_layout(rng: np.random.Generator, layout: Layout, spec: ModelSpec = SPEC, **overrides: Any) -> Trajectory:
    """A valid trajectory with the given spans; `rollout_id`, `version` and `unrouted` (rows) are shorthands."""
    turns = layout.turns()
    num_tokens = turns[-1].end
    sampled = np.zeros(num_tokens, np.bool_)
    for turn in turns:
        sampled[turn.start : turn.end] = turn.kind is TurnKind.SAMPLED
    token_ids = rng.integers(0, spec.vocab_size, num_tokens, dtype=np.int32)
    kept = _kept_sets(rng, turns, token_ids, spec.vocab_size)
    sizes = kept.sizes
    logprobs = np.where(sampled & (sizes != 1), -rng.exponential(1.0, num_tokens), 0.0)
    expert_ids = _expert_ids(rng, num_tokens - 1, spec)
    routed = np.ones(num_tokens - 1, np.bool_)
    routed[list(overrides.pop("unrouted", ()))] = False
    expert_ids[~routed] = 0
    rollout_id = overrides.pop("rollout_id", "rollout-0")
    version = overrides.pop("version", 3)
    values: dict[str, Any] = {
        "spec": spec,
        "lineage": Lineage(rollout_id, f"prompt-of-{rollout_id}", f"group-of-{rollout_id}"),
        "turns": turns,
        "token_ids": token_ids,
        "sampled": sampled,
        "rollout_logprobs": logprobs.astype(np.float32),
        "kept_logmass": np.where(sizes > 0, -rng.exponential(0.1, num_tokens), 0.0).astype(np.float32),
        "policy_versions": np.where(sampled, version, -1).astype(np.int32),
        "expert_ids": expert_ids,
        "routed": routed,
        "kept": kept,
        "truncated": sizes > 0,
        "finish_reason": FinishReason.STOP,
        "rewards": {"reward": 1.0},
        "engine_id": "engine-0",
    }
    return Trajectory(**(values | overrides))


QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
"""Fields of the published config of Qwen3-30B-A3B that decide sizes."""


def hf_config(**changes: Any) -> dict[str, Any]:
    """The config of a tiny Qwen3-MoE with 4 query and 2 key-value heads; a change to None leaves the key out."""
    values: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 128,
        "vocab_size": 100,
        "rope_theta": 10000.0,
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


def write_hf_config(folder: Path, **changes: Any) -> None:
    """Writes `hf_config` as the folder's config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a trajectory by name, arrays copied so that a test may break them."""
    return {field.name: _copy(getattr(trajectory, field.name)) for field in fields(trajectory)}


def same_trajectory(left: Trajectory, right: Trajectory) -> bool:
    """True where two trajectories agree in every field, bit for bit, dtypes included."""
    return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in fields(Trajectory))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Valid trajectories of many shapes: several turns, every way of sampling, missing rows, both expert dtypes."""
    num_experts = draw(st.sampled_from([1, 4, 8, 300]))
    spec = ModelSpec(
        num_moe_layers=draw(st.integers(1, 3)),
        experts_per_token=draw(st.integers(1, min(4, num_experts))),
        num_experts=num_experts,
        vocab_size=draw(st.sampled_from([2, 30, 5000, 70000])),
        fingerprint=draw(st.sampled_from(["", "abc"])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samplings = st.sampled_from([NUCLEUS, FULL, GREEDY, SamplingParams(min_p=0.1), SamplingParams(top_k=1)])
    spans: list[tuple[TurnKind, int, SamplingParams | None]] = [(TurnKind.PROMPT, draw(st.integers(1, 9)), None)]
    for turn in range(draw(st.integers(1, 3))):
        if turn:
            spans.append((TurnKind.OBSERVATION, draw(st.integers(1, 5)), None))
        spans.append((TurnKind.SAMPLED, draw(st.integers(1, 9)), draw(samplings)))
    num_tokens = sum(length for _, length, _ in spans)
    names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    parent = draw(st.booleans())
    rollout_id = draw(names)
    return make_from_layout(
        rng,
        Layout(tuple(spans)),
        spec,
        lineage=Lineage(rollout_id, draw(names), draw(names), "e", "a", "p" if parent else "", 4 if parent else -1),
        unrouted=draw(st.sets(st.integers(0, num_tokens - 2), max_size=3)),
        version=rng.integers(0, 2**31 - 1, num_tokens),
        rewards=draw(st.dictionaries(names, numbers, max_size=3)),
        timings=draw(st.dictionaries(names, numbers, max_size=2)),
        scores={
            name: rng.normal(size=num_tokens).astype(np.float32)
            for name in draw(st.lists(names, max_size=2, unique=True))
        },
        attempt=draw(st.integers(0, 2**31 - 1)),
        finish_reason=draw(st.sampled_from(FinishReason)),
    )


def _kept_sets(rng: np.random.Generator, turns: tuple[Turn, ...], token_ids: np.ndarray, vocab_size: int) -> KeptSets:
    rows: list[np.ndarray] = [np.zeros(0, np.int32)] * len(token_ids)
    for turn in turns:
        if turn.sampling is None or turn.sampling.effective_top_k is None:
            continue
        limit = 1 if turn.sampling.is_greedy else min(turn.sampling.effective_top_k, vocab_size, 50)
        for t in range(turn.start, turn.end):
            others = rng.integers(0, vocab_size, rng.integers(0, limit))
            rows[t] = np.union1d(others, token_ids[t : t + 1]).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return KeptSets(offsets, np.concatenate(rows))


def _expert_ids(rng: np.random.Generator, num_rows: int, spec: ModelSpec) -> np.ndarray:
    shape = (num_rows, spec.num_moe_layers, spec.num_experts)
    ranked = rng.random(shape, dtype=np.float32).argsort(axis=2)
    return np.ascontiguousarray(ranked[:, :, : spec.experts_per_token].astype(spec.expert_dtype))


def _copy(value: Any) -> Any:
    if isinstance(value, KeptSets):
        return KeptSets(value.offsets.copy(), value.ids.copy())
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, KeptSets):
        return _same(left.offsets, right.offsets) and _same(left.ids, right.ids)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return left == right


# --- model directories -----------------------------------------------------------------------------------------------

StoredTensors = dict[str, tuple[str, tuple[int, ...]]]
"""dtype, as safetensors writes it, and shape."""

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8}
_SMALL: dict[str, Any] = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4}


def write_safetensors(file: Path, tensors: StoredTensors) -> None:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_hf_model(folder: Path, **changes: Any) -> StoredTensors:
    """A whole model of zeros in one file; its tokenizer is there and empty."""
    config = hf_config(**{**_SMALL, **changes})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    needed = needed_tensors(describe(config, "config.json"))
    tensors = {name: ("BF16", shape) for name, shape in needed.items()}
    write_safetensors(folder / SINGLE_FILE, tensors)
    return tensors
