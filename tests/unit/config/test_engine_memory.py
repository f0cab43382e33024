"""Trainer and embedded engine on one device: refused with numbers before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import families
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from moerl.config import engine_memory
from moerl.config.architecture import describe_model
from moerl.config.engine_memory import device_options, engine_bytes
from moerl.config.load import load_config
from moerl.config.rollouts import EmbeddedRolloutConfig
from moerl.config.run_memory import check_shared_device
from moerl.config.schema import LaunchConfig, RunConfig
from moerl.errors import ConfigError
from moerl.machine.memory import USABLE_SHARE, rank_memory
from moerl.models.description import describe
from moerl.rollout import schedule
from moerl.rollout.cache import SlotCache
from moerl.rollout.device_sampler import Kinds, draw_rows
from moerl.rollout.sampler_kernel import Cuts


def config_of(*overrides: str, command: str = "train") -> RunConfig:
    return load_config(["recipe=laptop", *overrides], command=command)


def needed(config: RunConfig) -> int:
    sizes = describe_model(config.model)
    rank = rank_memory(sizes, config.parallel.dims, config.rank_needs(), 0).total_bytes
    return rank + sum(of_engine(config).values())


def of_engine(config: RunConfig, *, on_ray: bool = False) -> dict[str, int]:
    return engine_bytes(config.rollout, describe_model(config.model), on_ray=on_ray)


def test_a_device_that_holds_trainer_and_engine_is_taken_and_one_with_a_byte_less_is_not() -> None:
    config = config_of()
    enough = int(needed(config) / USABLE_SHARE) + 1
    check_shared_device(config, enough)
    with pytest.raises(ConfigError) as refused:
        check_shared_device(config, enough - 10)
    text = str(refused.value)
    for part in ("a trainer rank with", "key-value cache", "weights of an update", "GiB together, 90% of"):
        assert part in text
    assert "rollout.max_running" in refused.value.remedy
    assert "rollout=sglang" in refused.value.remedy


def test_longer_responses_and_more_of_them_need_more() -> None:
    assert needed(config_of("rollout.max_new_tokens=256")) > needed(config_of())
    assert needed(config_of("rollout.max_running=1024")) > needed(config_of())
    assert needed(config_of("rollout.dtype=float32")) > needed(config_of())


@pytest.mark.parametrize("where", ["8 bits", "another node"])
def test_an_engine_that_is_not_on_the_device_of_a_rank_needs_nothing_of_it(where: str) -> None:
    config = config_of("rollout.dtype=float8") if where == "8 bits" else config_of("rollout.placement=process")
    if where == "another node":
        config = config.model_copy(update={"launch": LaunchConfig(on="ray", address=None)})
    assert of_engine(config, on_ray=where == "another node") == {}
    check_shared_device(config, 1)


def test_a_command_without_a_trainer_counts_the_engine_alone() -> None:
    config = config_of()
    alone = int(sum(of_engine(config).values()) / USABLE_SHARE) + 1
    check_shared_device(config.model_copy(update={"command": "eval"}), alone)
    with pytest.raises(ConfigError, match="together with the trainer"):
        check_shared_device(config, alone)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_weights_and_cache_are_those_that_a_model_has(family: str) -> None:
    config = config_of("rollout.max_running=8", "rollout.max_new_tokens=128", "rollout.dtype=float32")
    hf_config = families.FAMILIES[family].config()
    model = AutoModelForCausalLM.from_config(hf_config)
    assert isinstance(config.rollout, EmbeddedRolloutConfig)
    found = engine_bytes(config.rollout, describe(hf_config.to_dict(), "config.json"), on_ray=False)
    assert found["weights"] == sum(each.numel() for each in model.parameters()) * 4
    num_tokens = device_options(config.rollout).slot_tokens
    cache = SlotCache(8, num_tokens)
    cache.reserve(num_tokens)
    cache.begin_prefill(torch.zeros(1, dtype=torch.int64), 1)
    ones = torch.ones(1, 1, dtype=torch.int64)
    model.base_model(input_ids=ones, past_key_values=cache, use_cache=True)
    held = (*cache._keys, *cache._values)
    assert found["key-value cache"] == sum(each.numel() * each.element_size() for each in held)


def test_prompts_of_a_pass_are_as_many_as_the_schedule_takes() -> None:
    assert schedule.PREFILL_TOKENS == engine_memory.PREFILL_TOKENS


def test_scores_of_grouped_queries_count_in_float32() -> None:
    config = config_of("rollout.dtype=float32")
    sizes = describe_model(config.model)
    counted = [
        engine_bytes(config.rollout, replace(sizes, num_attention_heads=heads), on_ray=False)["prompts"]
        for heads in (2, 4, 64)  # of 2 key-value heads
    ]
    assert counted[0] == counted[1] == of_engine(config)["prompts"]  # the experts need more
    assert counted[2] == engine_memory.PREFILL_TOKENS * engine_memory.PROMPT_TOKENS * 64 * engine_memory.SCORE_BYTES
    halves = config_of("rollout.dtype=bfloat16")
    assert engine_bytes(halves.rollout, replace(sizes, num_attention_heads=64), on_ray=False)["prompts"] < counted[1]


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Returns the most memory that lies there at once of what a function allocates."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        compute()
    results: Any = seen.profiler and seen.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    return max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.parametrize("kinds", [Kinds(64, False, True), Kinds(0, True, False)], ids=["cut", "open"])
def test_a_logit_takes_the_bytes_that_are_counted_for_it(kinds: Kinds) -> None:
    rows, vocab = 64, 20_000
    ones = torch.ones(rows, dtype=torch.float64)
    top_k = torch.full((rows,), kinds.width)
    cuts = Cuts(ones.float(), 0.9 * ones, 0 * ones, top_k, top_k > 64)
    logits = torch.randn(rows, vocab)
    peak = peak_bytes(lambda: draw_rows(logits, cuts, 0.5 * ones, kinds))
    # Its own bytes lie there before. What belongs to ids alone is a few bytes for each.
    assert peak / logits.numel() + 4 == pytest.approx(engine_memory.LOGIT_BYTES, abs=0.3)


def test_a_score_takes_the_bytes_that_are_counted_for_it() -> None:
    query, key, value = (torch.randn(4, heads, 512, 2) for heads in (8, 2, 2))
    with sdpa_kernel(SDPBackend.MATH):
        peak = peak_bytes(lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    assert peak / (4 * 8 * 512**2) == pytest.approx(engine_memory.SCORE_BYTES, abs=0.3)
