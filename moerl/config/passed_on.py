"""Settings that are passed on to SGLang's servers and to Megatron as they are; names that moerl sets are refused.

Pure; any process. Names of Megatron's settings are in a list (`moerl.config.megatron_names`), so that any other is
refused here. SGLang knows its own: a process in the servers' environment asks it before a run starts
(`moerl.rollout.sglang.install`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from moerl.config.megatron_names import MEGATRON_FIXED, MEGATRON_KEYS, MEGATRON_OPEN, by_name
from moerl.config.rollouts import RolloutConfig, SGLangRolloutConfig
from moerl.config.training import TrainerConfig
from moerl.errors import ConfigError

SERVER_ARGS, MEGATRON = "rollout.server_args", "trainer.megatron"
NOT_CHECKED = "not checked by moerl"

SERVER_KEYS = by_name(
    {
        "model.path": "model_path model tokenizer_path",
        "rollout.tensor": "tp_size tensor_parallel_size",
        "rollout.expert": "ep_size expert_parallel_size ep",
        "rollout.servers": "dp_size data_parallel_size",
        "rollout.dtype": "dtype",
        "rollout.max_running": "max_running_requests",
        "rollout.max_pool_tokens": "max_total_tokens",
        "rollout.memory_share": "mem_fraction_static",
        "rollout.environment": "device",
        "rollout.placement": "base_gpu_id gpu_id_step enable_memory_saver",
    }
)
"""Arguments of SGLang's servers, under all their names, and the key that sets each."""

_TENSOR = (
    "a server's ranks are those of rollout.tensor, one on each of its GPUs; no other split of a model is supported"
)
_EXPERTS = "experts stay on the ranks that loaded them, one copy of each: weight updates and checksums count on it"
_DRAFTS = "speculative decoding returns no kept sets"
_CACHE = "hits of a cache beyond the GPU's return wrong routing rows"
SERVER_FIXED = by_name(
    {
        "a server of a run listens on a private address and a free port, with keys of its own": """
            host port api_key admin_api_key grpc_mode smg_grpc_mode grpc_port sidecar ssl_keyfile ssl_certfile
            enable_ssl_refresh""",
        "a server's ranks are on one machine, and meet in a file": """
            dist_init_addr nccl_init_addr nccl_port nnodes node_rank use_ray gated_launch_port""",
        _TENSOR: """
            pp_size pipeline_parallel_size dwdp_size attn_cp_size attention_context_parallel_size enable_prefill_cp
            dcp_size decode_context_parallel_size moe_dp_size moe_data_parallel_size moe_dense_tp_size
            shared_experts_tp_size enable_dp_attention attn_dp_size attention_data_parallel_size enable_dp_lm_head
            enable_dense_mlp_attn_tp enable_shared_experts_attn_tp""",
        "rollouts need it as it is": "enable_return_routed_experts sampling_backend sampling_mask_max_tokens",
        _EXPERTS: """
            enable_eplb init_expert_location ep_num_redundant_experts ep_dispatch_algorithm
            enable_elastic_expert_backup max_ep_size""",
        _DRAFTS: "enable_multi_layer_eagle spec_trace_dir uno_lora_path",
        _CACHE: """
            enable_hierarchical_cache enable_hicache enable_lmcache enable_flexkv radix_cache_backend
            enable_unified_cache_external_linker""",
        "servers get and give token ids": "skip_tokenizer_init skip_server_warmup",
        "it bounds the ids that are sampled": "json_model_override_args",
        "it is the policy version": "weight_version",
        "a line for each request takes a tenth of a server's time": "log_level_http",
        "the arguments are in such a file already": "config",
    }
)
"""Arguments of SGLang's servers that no key sets, and why they cannot be passed on. A release need not have all."""

SERVER_PREFIXES = by_name(
    {
        _DRAFTS: "speculative_ decoupled_spec_",
        _CACHE: "hicache_",
        _EXPERTS: "elastic_ep_ eplb_",
        "a server computes whole responses by itself": "disaggregation_",
    }
)
"""Beginnings of the names of more such arguments, and why."""


def passed_on(trainer: TrainerConfig, rollout: RolloutConfig) -> dict[str, Mapping[str, Any]]:
    """Returns by key what a run passes on; keys that pass nothing on are left out."""
    values = {MEGATRON: trainer.megatron}
    if isinstance(rollout, SGLangRolloutConfig):
        values[SERVER_ARGS] = rollout.server_args
    return {key: passed for key, passed in values.items() if passed}


def passed_on_notes(trainer: TrainerConfig, rollout: RolloutConfig) -> list[str]:
    """Returns a line for each key that passes something on."""
    return [f"{key} = {json.dumps(passed)}: {NOT_CHECKED}" for key, passed in passed_on(trainer, rollout).items()]


def check_passed_on(trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    """Checks the names of what a run passes on.

    Raises:
        ConfigError: moerl sets it, the model decides it, or Megatron has no such setting.
    """
    passed = passed_on(trainer, rollout)
    for name, value in passed.get(SERVER_ARGS, {}).items():
        _refuse_set(f"{SERVER_ARGS}.{name}", value, SERVER_KEYS.get(name), fixed_argument(name))
    for name, value in passed.get(MEGATRON, {}).items():
        path = f"{MEGATRON}.{name}"
        _refuse_set(path, value, MEGATRON_KEYS.get(name), MEGATRON_FIXED.get(name))
        if name not in MEGATRON_OPEN:
            near = get_close_matches(name, (*MEGATRON_OPEN, *MEGATRON_KEYS, *MEGATRON_FIXED), n=1)
            raise ConfigError(
                f"{path}: not known as a setting of Megatron",
                seen=value,
                expected="a name that MEGATRON_OPEN in moerl/config/megatron_names.py lists",
                remedy=f"did you mean {near[0]}?" if near else "leave it away",
            )


def fixed_argument(name: str) -> str | None:
    """Returns why an argument of SGLang's servers cannot be passed on; None if no rule but `SERVER_KEYS` refuses it."""
    prefixes = (why for prefix, why in SERVER_PREFIXES.items() if name.startswith(prefix))
    return SERVER_FIXED.get(name) or next(prefixes, None)


def _refuse_set(path: str, value: object, key: str | None, why: str | None) -> None:
    """Raises `ConfigError` if there is a key, or a reason why not."""
    if key is not None:
        raise ConfigError(
            f"{path}: has a key of its own", seen=value, expected=key, remedy=f"leave it away and set {key}"
        )
    if why is not None:
        raise ConfigError(
            f"{path}: cannot be passed on", seen=value, expected=f"no value: {why}", remedy="leave it away"
        )
