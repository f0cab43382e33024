"""Weights and cache of engines that sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import QWEN3_30B, write_hf_config
from published_models import DEEPSEEK_V3

from moerl.config.architecture import describe_model
from moerl.config.engine_memory import EngineMemory, cache_token_bytes, engine_needs, pool_tokens
from moerl.config.load import load_plan
from moerl.config.rollouts import CPU_POOL_TOKENS, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.models.description import describe

GIB = 2**30


def run(folder: Path, *overrides: str) -> RunConfig:
    write_hf_config(folder, **QWEN3_30B)
    return load_plan(["recipe=math", f"model.path='{folder}'", "parallel.expert=8", *overrides])


def served(config: RunConfig) -> tuple[SGLangRolloutConfig, EngineMemory]:
    assert isinstance(config.rollout, SGLangRolloutConfig)
    return config.rollout, engine_needs(config.rollout, config.trainer, config.task, describe_model(config.model))


@pytest.mark.parametrize(("tensor", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_grouped_heads_are_split_over_devices_and_repeated_on_more_of_them(tensor: int, heads: int) -> None:
    sizes = describe(QWEN3_30B, "here")
    # Keys and values of 48 layers, 128 numbers a head, in two bytes.
    assert cache_token_bytes(sizes, tensor, 2) == 48 * 2 * heads * 128 * 2


@pytest.mark.parametrize("tensor", [1, 8])
def test_latent_attention_keeps_one_compressed_row_on_each_device(tensor: int) -> None:
    assert cache_token_bytes(describe(DEEPSEEK_V3, "here"), tensor, 2) == 61 * (512 + 64) * 2


def test_weights_are_split_over_the_devices_of_a_server(tmp_path: Path) -> None:
    one, two = (served(run(tmp_path, f"rollout.tensor={n}"))[1].weights_bytes for n in (1, 2))
    assert one == pytest.approx(30.5e9 * 2, rel=0.01)
    assert one / two == pytest.approx(2, rel=0.01)
    wide = served(run(tmp_path, "rollout.dtype=float32"))[1]
    assert wide.weights_bytes == 2 * one


def test_experts_of_groups_take_as_much_of_a_device_as_experts_that_are_cut(tmp_path: Path) -> None:
    cut, groups = (served(run(tmp_path, "rollout.tensor=4", f"rollout.expert={n}"))[1].weights_bytes for n in (1, 4))
    assert cut == groups == pytest.approx(30.5e9 * 2 / 4, rel=0.02)


def test_the_longest_sequence_is_that_of_the_task_the_microbatch_or_the_model(tmp_path: Path) -> None:
    assert served(run(tmp_path))[1].longest == 2048 + 8192
    assert served(run(tmp_path, "task.max_prompt_tokens=null"))[1].longest == 20480
    many = ("task.max_prompt_tokens=null", "trainer.microbatch_tokens=99999")
    assert served(run(tmp_path, *many))[1].longest == 40960


def test_what_is_asked_to_run_side_by_side_is_all_at_their_longest(tmp_path: Path) -> None:
    engine = served(run(tmp_path, "rollout.max_running=100"))[1]
    assert engine.asked_bytes == 100 * 10240 * 98304


def test_the_pool_is_what_a_share_leaves_beside_the_weights_or_what_is_set(tmp_path: Path) -> None:
    rollout, engine = served(run(tmp_path, "rollout.memory_share=0.9"))
    assert pool_tokens(rollout, engine, 80 * GIB) == (int(0.9 * 80 * GIB) - engine.weights_bytes) // 98304
    assert pool_tokens(rollout, engine, 40 * GIB) == 0
    fewer, _ = served(run(tmp_path, "rollout.max_pool_tokens=1000"))
    assert pool_tokens(fewer, engine, 80 * GIB) == 1000


def test_the_pool_of_a_server_on_cpus_has_a_fixed_size(tmp_path: Path) -> None:
    rollout, engine = served(run(tmp_path))
    assert pool_tokens(rollout, engine, None) == CPU_POOL_TOKENS
    fewer, _ = served(run(tmp_path, "rollout.max_pool_tokens=1000"))
    assert pool_tokens(fewer, engine, None) == 1000
