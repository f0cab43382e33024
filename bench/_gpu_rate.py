"""Tokens per second of the embedded engine on the device, for the model of recipe=laptop. A check of `gpu_check.py`.

Sampling as in the recipe (temperature 1, top-p 0.95, top-k 12, bfloat16), as many sequences as decode together in it;
experts and kept sets of every token are captured. A first, shorter pass is untimed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from _gpu_checks import Findings, keep
from _report import Result
from _samples import Sizes, write_model

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.models.description import read_model
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_model

LAPTOP = Sizes(
    hidden=128,
    layers=4,
    heads=4,
    key_value_heads=2,
    head_dim=32,
    experts=8,
    experts_per_token=2,
    expert_width=128,
    vocab=512,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Sequences that decode together, tokens of each, and timed passes."""

    max_running: int
    new_tokens: int
    passes: int


SETTINGS = {"cuda": Setting(192, 72, 3), "cpu": Setting(4, 6, 1)}


def check(device: str) -> Findings:
    setting = SETTINGS[device]
    with tempfile.TemporaryDirectory() as folder:
        write_model(LAPTOP, Path(folder), dtype=torch.bfloat16, device="cpu")
        model = replace(read_model(Path(folder)), spec=LAPTOP.spec)
        loaded = load_model(Path(folder), dtype=torch.bfloat16).to(device)
        engine = EmbeddedEngine(
            loaded, model.spec, engine_id="engine", max_running=setting.max_running, policy_version=0
        )
        rates: list[float] = []
        for turn in range(setting.passes + 1):
            num_tokens, seconds = sample(engine, setting, turn)
            if turn:
                rates.append(num_tokens / seconds)
                keep(findings(setting, rates))
        engine.close()
    return findings(setting, rates)


def findings(setting: Setting, rates: Sequence[float]) -> Findings:
    name = f"{setting.max_running} sequences, {setting.new_tokens} tokens each"
    spread = max(rates) - min(rates)
    return Findings([Result(f"{name}: rate", statistics.median(rates), unit="tokens/s", spread=spread)])


def sample(engine: EmbeddedEngine, setting: Setting, turn: int) -> tuple[int, float]:
    """Sampled tokens, and the seconds that they took."""
    rng = np.random.default_rng(turn)
    asked = [
        RolloutRequest(
            Lineage(f"rollout-{turn}-{i}", f"prompt-{i}", f"group-{i}"),
            tuple(rng.integers(0, LAPTOP.vocab, 12).tolist()),
            SamplingParams(temperature=1.0, top_p=0.95, top_k=12, seed=turn * 1000 + i),
            setting.new_tokens if turn else setting.new_tokens // 6,
        )
        for i in range(setting.max_running)
    ]
    start = time.perf_counter()
    num_tokens = sum(int(record.values["sampled"].sum()) for record in engine.generate(asked))
    return num_tokens, time.perf_counter() - start
