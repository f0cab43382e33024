"""Settings that are passed on to SGLang's servers and to Megatron as they are; names that moerl sets are refused.

Pure; any process. The processes that have a library check that it knows a name: one in the servers' environment before
a run starts (`moerl.rollout.sglang.server_args`), and each rank of the trainer (`moerl.trainer.provider`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError

SERVER_ARGS, MEGATRON = "rollout.server_args", "trainer.megatron"
NOT_CHECKED = "not checked by moerl"

SERVER_KEYS = {
    **dict.fromkeys(("model_path", "model", "tokenizer_path"), "model.path"),
    **dict.fromkeys(("tp_size", "tensor_parallel_size"), "rollout.tensor"),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "ep"), "rollout.expert"),
    "dtype": "rollout.dtype",
    "max_running_requests": "rollout.max_running",
    "max_total_tokens": "rollout.max_pool_tokens",
    "mem_fraction_static": "rollout.memory_share",
    "device": "rollout.environment",
    **dict.fromkeys(("base_gpu_id", "enable_memory_saver"), "rollout.placement"),
}
"""Arguments of SGLang's servers, under all their names, and the key that sets each."""

_ADDRESS = "a server of a run listens on a private address and a free port, with keys of its own"
_ONE_MACHINE = "a server's ranks are on one machine, and meet in a file"
_CONTRACT = "rollouts need it as it is"
_EXPERTS = "experts stay on the ranks that loaded them, one copy of each: weight updates and checksums count on it"
SERVER_FIXED = {
    **dict.fromkeys(("host", "port", "api_key", "admin_api_key"), _ADDRESS),
    **dict.fromkeys(("dist_init_addr", "nccl_init_addr", "nccl_port", "nnodes", "node_rank"), _ONE_MACHINE),
    **dict.fromkeys(("enable_return_routed_experts", "sampling_backend", "sampling_mask_max_tokens"), _CONTRACT),
    **dict.fromkeys(("enable_eplb", "init_expert_location", "ep_num_redundant_experts"), _EXPERTS),
    **dict.fromkeys(("ep_dispatch_algorithm", "elastic_ep_backend"), _EXPERTS),
    **dict.fromkeys(("skip_tokenizer_init", "skip_server_warmup"), "servers get and give token ids"),
    "json_model_override_args": "it bounds the ids that are sampled",
    "weight_version": "it is the policy version",
    "log_level_http": "a line for each request takes a tenth of a server's time",
    "config": "the arguments are in such a file already",
}
"""Arguments of SGLang's servers that no key sets, and why moerl does."""

MEGATRON_KEYS = {
    "tensor_model_parallel_size": "parallel.tensor",
    "sequence_parallel": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pipeline_model_parallel_layout": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype", "bf16", "fp16"), "model.dtype"),
    "deterministic_mode": "trainer.deterministic",
    **dict.fromkeys(
        (f"recompute_{n}" for n in ("granularity", "method", "num_layers", "modules")), "trainer.recompute"
    ),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_router_load_balancing_type"), "rl.moe_aux_loss_coef"),
    "moe_router_bias_update_rate": "trainer.expert_bias",
}
"""Settings of Megatron, and the key that sets each."""

_MODEL = "the model's config.json says it"
_LOSS = "the loss, its denominators and the scores of rollouts rest on it"
_LENGTHS = "packed microbatches differ in length"
MEGATRON_FIXED = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"), _MODEL),
    **dict.fromkeys(("num_query_groups", "kv_channels", "num_moe_experts", "moe_ffn_hidden_size"), _MODEL),
    **dict.fromkeys(("moe_layer_freq", "moe_shared_expert_intermediate_size", "mtp_num_layers"), _MODEL),
    **dict.fromkeys(("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"), _MODEL),
    **dict.fromkeys(("moe_router_pre_softmax", "moe_router_score_function", "rotary_percent"), _MODEL),
    **dict.fromkeys(("moe_router_enable_expert_bias", "transformer_layer_spec"), _MODEL),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "attention_softmax_in_fp32"), _LOSS),
    **dict.fromkeys(("calculate_per_token_loss", "moe_z_loss_coeff", "moe_router_dtype", "moe_router_fusion"), _LOSS),
    **dict.fromkeys(("finalize_model_grads_func", "grad_scale_func", "no_sync_func"), _LOSS),
    **dict.fromkeys(("grad_sync_func", "param_sync_func"), _LOSS),
    **dict.fromkeys(("variable_seq_lengths", "batch_p2p_comm"), _LENGTHS),
    **dict.fromkeys(("should_pad_vocab", "make_vocab_size_divisible_by"), "ids that are never sampled are left out"),
    "gradient_accumulation_fusion": "it follows from what is installed",
}
"""Settings of Megatron that no key sets, and why moerl does."""


def passed_on(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Returns by key what a run passes on; keys that pass nothing on are left out."""
    values = {MEGATRON: config.trainer.megatron}
    if isinstance(config.rollout, SGLangRolloutConfig):
        values[SERVER_ARGS] = config.rollout.server_args
    return {key: passed for key, passed in values.items() if passed}


def passed_on_notes(config: RunConfig) -> list[str]:
    """Returns a line for each key that passes something on."""
    return [f"{key} = {json.dumps(passed)}: {NOT_CHECKED}" for key, passed in passed_on(config).items()]


def check_passed_on(config: RunConfig) -> None:
    """Raises `ConfigError` for a name that moerl sets."""
    tables = {SERVER_ARGS: (SERVER_KEYS, SERVER_FIXED), MEGATRON: (MEGATRON_KEYS, MEGATRON_FIXED)}
    for path, passed in passed_on(config).items():
        keys, fixed = tables[path]
        for name, value in passed.items():
            if name in keys:
                raise ConfigError(
                    f"{path}.{name}: has a key of its own",
                    seen=value,
                    expected=keys[name],
                    remedy=f"leave it away and set {keys[name]}",
                )
            if name in fixed:
                raise ConfigError(
                    f"{path}.{name}: set by moerl",
                    seen=value,
                    expected=f"no value: {fixed[name]}",
                    remedy="leave it away",
                )
