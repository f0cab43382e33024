"""Tokens of the embedded engine on a CPU: the same bits for a request, whichever requests are sampled with it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import families
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import embedded, independent_rows
from moerl.rollout.embedded import EmbeddedEngine

VOCAB = 91
COMPILED, TRANSFORMERS = "qwen3_moe-dense", "qwen3_moe-dense, layers of transformers"
HALF, WHOLE = torch.bfloat16, torch.float32
# Libraries multiply few rows of 96 numbers and more in another order than many, on some CPUs.
CASES = [
    *((COMPILED, width, dtype, 1) for width in (24, 64, 96, 128, 192, 256) for dtype in (WHOLE, HALF)),
    (COMPILED, 256, WHOLE, 3),
    *(
        pytest.param(other, width, dtype, size, marks=[pytest.mark.slow] * (size == 1))
        for other in (TRANSFORMERS, "deepseek_v3", "glm4_moe", "olmoe")
        for width, dtype, size in ((96, WHOLE, 2), (256, WHOLE, 1), (256, HALF, 3))
    ),
]


def _model(family: str, width: int, dtype: torch.dtype) -> Any:
    """Widths of all products change with the hidden size: of heads, experts and dense layers, too. Some are odd: the
    last numbers of a tensor fill no vector."""
    tiny = families.FAMILIES[family.partition(",")[0]]
    changes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": 2, "intermediate_size": width + 33}
    if "moe_intermediate_size" in tiny.settings:
        changes["moe_intermediate_size"] = width - 1
    if "head_dim" in tiny.settings:
        changes["head_dim"] = width // 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny.config(**changes)).to(dtype).eval()


def _requests() -> list[RolloutRequest]:
    """Prompts of 2 to 40 tokens, kept sets of one to thirty."""
    rng = np.random.default_rng(5)
    sampling = [SamplingParams(top_p=0.05 + 0.04 * n, top_k=30, seed=n) for n in range(18)]
    prompts = [tuple(rng.integers(0, VOCAB, rng.integers(2, 41)).tolist()) for _ in sampling]
    pairs = enumerate(zip(prompts, sampling, strict=True))
    return [RolloutRequest(Lineage(f"r{i}", f"p{i}", "g"), prompt, params, 8) for i, (prompt, params) in pairs]


def _bits(model: Any, requests: list[RolloutRequest], max_running: int) -> dict[str, list[bytes]]:
    spec = replace(spec_from_hf_config(model.config.to_dict()), vocab_size=VOCAB)
    engine = EmbeddedEngine(deepcopy(model), spec, engine_id="e", max_running=max_running, policy_version=0)
    names = ("token_ids", "rollout_logprobs", "kept_logmass", "expert_ids")
    return {each.rollout_id: [each.values[name].tobytes() for name in names] for each in engine.generate(requests)}


@pytest.mark.parametrize(("family", "width", "dtype", "num_threads"), CASES)
def test_a_request_samples_the_same_bits_in_any_company(
    family: str, width: int, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
):
    if family == TRANSFORMERS:
        monkeypatch.setattr(embedded, "knows_layers_of", lambda model, dtype: False)
    torch.set_num_threads(num_threads)
    # Also where there is little to do.
    monkeypatch.setattr(independent_rows, "_FEW_TERMS", 1 if num_threads > 1 else independent_rows._FEW_TERMS)
    model, requests = _model(family, width, dtype), _requests()
    together = _bits(model, requests, max_running=18)
    # Prompts and batches of other sizes and lengths, experts with other numbers of rows.
    for max_running, chosen in ((5, requests), (18, requests[9:]), (18, requests[3:6]), (18, requests[7:8])):
        apart = _bits(model, chosen, max_running)
        assert len(apart) == len(chosen)
        assert apart == {rollout_id: together[rollout_id] for rollout_id in apart}
