"""Keys of other RL trainers that have a counterpart here: an error about one names ours. Plain data; any process."""

from __future__ import annotations

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

VERL = {
    "data.train_files": "task.path",
    "data.train_batch_size": "rl.prompts_per_step",
    "data.max_prompt_length": "task.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.prompt_key": "task.prompt_key",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.recompute",
    f"{_ACTOR}.ppo_mini_batch_size": "rl.minibatches",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.microbatch_tokens",
    f"{_ACTOR}.optim.lr": "optimizer.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "optimizer.warmup_steps",
    f"{_ACTOR}.optim.weight_decay": "optimizer.weight_decay",
    f"{_ACTOR}.grad_clip": "optimizer.clip_grad",
    f"{_ACTOR}.clip_ratio": "algorithm.clip_low",
    f"{_ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{_ACTOR}.clip_ratio_high": "algorithm.clip_high",
    f"{_ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.kl_loss_coef": "algorithm.kl_coef",
    f"{_ACTOR}.loss_agg_mode": "algorithm.reduction",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "parallel.tensor",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "parallel.pipeline",
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    f"{_ACTOR}.megatron.context_parallel_size": "parallel.context",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "parallel.expert",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "parallel.expert_tensor",
    f"{_ACTOR}.megatron.override_transformer_config": "trainer.megatron",
    f"{_ACTOR}.megatron.optimizer_offload": "trainer.optimizer_offload",
    f"{_ACTOR}.megatron.param_offload": "trainer.sleep",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "trainer.optimizer_offload",
    f"{_ACTOR}.fsdp_config.param_offload": "trainer.sleep",
    f"{_ROLLOUT}.n": "rl.group_size",
    f"{_ROLLOUT}.name": "rollout",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.top_k": "rollout.top_k",
    f"{_ROLLOUT}.response_length": "rollout.max_new_tokens",
    f"{_ROLLOUT}.max_num_seqs": "rollout.max_running",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tensor",
    f"{_ROLLOUT}.expert_parallel_size": "rollout.expert",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.memory_share",
    f"{_ROLLOUT}.engine_kwargs.sglang": "rollout.server_args",
    f"{_ROLLOUT}.val_kwargs.temperature": "evaluation.temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "evaluation.top_p",
    f"{_ROLLOUT}.val_kwargs.top_k": "evaluation.top_k",
    f"{_ROLLOUT}.val_kwargs.n": "evaluation.samples",
    "algorithm.adv_estimator": "algorithm",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.use_kl_in_reward": "algorithm.kl_in",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "custom_reward_function.path": "task.reward",
    **{
        f"{place}.{name}": ours
        for place in ("reward.reward_kwargs", "reward_model.reward_kwargs")
        for name, ours in {
            "overlong_buffer_cfg": "algorithm.overlong_buffer",
            "overlong_buffer_cfg.penalty_factor": "algorithm.overlong_factor",
            "max_resp_len": "algorithm.overlong_limit",
        }.items()
    },
    "reward_model.overlong_buffer": "algorithm.overlong_buffer",
    "reward_model.overlong_buffer.penalty_factor": "algorithm.overlong_factor",
    "trainer.total_training_steps": "rl.steps",
    "trainer.total_epochs": "rl.steps",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "evaluation.every",
    "trainer.val_only": "moerl eval",
    "trainer.rollout_data_dir": "dump.rollouts_every",
    "trainer.project_name": "metrics.project",
    "trainer.logger": "metrics.sinks",
    "trainer.default_local_dir": "run_dir",
    "global_profiler.steps": "trainer.profile_steps",
}

SLIME = {
    "--hf-checkpoint": "model.path",
    "--prompt-data": "task.path",
    "--input-key": "task.prompt_key",
    "--label-key": "task.rewards.answer.column",
    "--rm-type": "task.rewards.answer.kind",
    "--custom-rm-path": "task.reward",
    "--num-rollout": "rl.steps",
    "--rollout-batch-size": "rl.prompts_per_step",
    "--n-samples-per-prompt": "rl.group_size",
    "--global-batch-size": "rl.minibatches",
    "--num-steps-per-rollout": "rl.minibatches",
    "--dynamic-sampling-filter-path": "rl.filters",
    "--rollout-max-response-len": "rollout.max_new_tokens",
    "--rollout-max-prompt-len": "task.max_prompt_tokens",
    "--rollout-temperature": "rollout.temperature",
    "--rollout-top-p": "rollout.top_p",
    "--rollout-top-k": "rollout.top_k",
    "--rollout-num-gpus-per-engine": "rollout.tensor",
    **dict.fromkeys(("--sglang-ep-size", "--sglang-expert-parallel-size"), "rollout.expert"),
    "--sglang-mem-fraction-static": "rollout.memory_share",
    "--colocate": "rollout.placement",
    "--max-tokens-per-gpu": "trainer.microbatch_tokens",
    "--advantage-estimator": "algorithm",
    "--eps-clip": "algorithm.clip_low",
    "--eps-clip-high": "algorithm.clip_high",
    "--eps-clip-c": "algorithm.dual_clip",
    "--kl-coef": "algorithm.kl_coef",
    "--kl-loss-coef": "algorithm.kl_coef",
    "--entropy-coef": "algorithm.entropy_coef",
    "--use-tis": "algorithm.importance",
    "--tis-clip": "algorithm.importance_cap",
    "--tis-clip-low": "algorithm.importance_floor",
    "--opsm-delta": "algorithm.opsm_delta",
    "--custom-loss-function-path": "algorithm.loss",
    "--use-rollout-routing-replay": "keep_routing.mode",
    "--lr": "optimizer.lr",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.beta1",
    "--adam-beta2": "optimizer.beta2",
    "--adam-eps": "optimizer.eps",
    "--clip-grad": "optimizer.clip_grad",
    **dict.fromkeys(("--recompute-granularity", "--recompute-method", "--recompute-num-layers"), "trainer.recompute"),
    "--tensor-model-parallel-size": "parallel.tensor",
    "--pipeline-model-parallel-size": "parallel.pipeline",
    "--context-parallel-size": "parallel.context",
    "--expert-model-parallel-size": "parallel.expert",
    "--expert-tensor-parallel-size": "parallel.expert_tensor",
    "--save": "run_dir",
    "--save-interval": "checkpoint.every",
    "--eval-interval": "evaluation.every",
    "--n-samples-per-eval-prompt": "evaluation.samples",
    "--optimizer-cpu-offload": "trainer.optimizer_offload",
    "--optimizer-offload-fraction": "trainer.optimizer_offload",
    "--update-weight-buffer-size": "weights.bucket_bytes",
    "--wandb-project": "metrics.project",
    "--save-debug-rollout-data": "dump.rollouts_every",
    "--load-debug-rollout-data": "rollout.path",
    "--debug-train-only": "rollout=dumps",
    "--debug-rollout-only": "moerl rollout",
}

TRL = {
    "model_name_or_path": "model.path",
    "dataset_name": "task.hub",
    "num_generations": "rl.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "max_steps": "rl.steps",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "scale_rewards": "algorithm.normalize_std",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_grad",
    "gradient_checkpointing": "trainer.recompute",
    "vllm_tensor_parallel_size": "rollout.tensor",
    "vllm_gpu_memory_utilization": "rollout.memory_share",
    "output_dir": "run_dir",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "report_to": "metrics.sinks",
}

FOREIGN_KEYS = {"verl": VERL, "slime": SLIME, "TRL": TRL}
"""By trainer, its keys and ours: a key, a `GROUP=OPTION`, or a command of its own. Values need not mean the same:
`--help --all` says what ours takes."""


def counterpart(name: str) -> tuple[str, str] | None:
    """Returns the trainers that have a key or option of this name, joined by "and", and our key; None if none has. A
    key inside a mapping counts as the key that holds the mapping; options are found with and without dashes."""
    path = name.partition("=")[0]
    while path:
        found = {
            trainer: ours
            for trainer, keys in FOREIGN_KEYS.items()
            for each, ours in keys.items()
            if _plain(path) == _plain(each)
        }
        if found:
            return " and ".join(found), next(iter(found.values()))
        path = path.rpartition(".")[0]
    return None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
