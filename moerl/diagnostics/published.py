"""Figures that others published of trainers and engines apart, each with its source. Data alone; any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measure = Literal["k3", "logprob_abs_mean"]

MEASURES: dict[Measure, str] = {"k3": "KL, k3", "logprob_abs_mean": "mean |d|, nats"}
"""Measures by name, as of `mismatch/<scorer>/...`, with their titles in a table. They do not compare: |d| is of first
order in the difference of log-probs, k3 of second."""


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure."""

    measure: Measure
    """Key of `MEASURES`."""
    value: float
    """Nats."""
    setting: str
    """Model, and the two sides."""
    source: str
    """URL of the text that has it."""


_R3 = "https://arxiv.org/abs/2510.11370"
_NEMO_RL = "https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/models/qwen/qwen3-5.md"
_MILES = "https://github.com/radixark/miles/blob/main/docs/models/qwen/qwen3-8.md"
_VIME = "https://github.com/vllm-project/vime/issues/64"

PUBLISHED = (
    Published("k3", 1.5e-3, "Qwen3-30B-A3B, SGLang and Megatron, own routing", _R3),
    Published("k3", 7.5e-4, "Qwen3-30B-A3B, SGLang and Megatron, recorded routing", _R3),
    Published("k3", 8.4e-4, "Qwen3-30B-A3B, Megatron twice, own routing", _R3),
    Published("k3", 6.4e-4, "Qwen3-8B (dense), SGLang and Megatron", _R3),
    Published("k3", 2.4e-3, "Qwen3.5-35B-A3B in FP8, vLLM and Megatron, first 20 steps", _NEMO_RL),
    Published("logprob_abs_mean", 0.010, "Qwen3.8-27B (dense), SGLang and Megatron, step 0", _MILES),
    Published("logprob_abs_mean", 0.011, "Qwen3-4B (dense), vLLM and Megatron, 30 steps", _VIME),
    Published("logprob_abs_mean", 0.036, "Qwen3-4B (dense), SGLang and Megatron, grown to this by step 30", _VIME),
)
"""Figures by measure. A figure without a source that can be looked up has no place here."""
