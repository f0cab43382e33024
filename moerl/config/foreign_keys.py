"""Keys of other RL trainers that have a counterpart here: an error about one names ours. Plain data; any process."""

from __future__ import annotations

COUNTERPARTS = {
    "task.path": "data.train_files --prompt-data",
    "rl.prompts_per_step": "data.train_batch_size --rollout-batch-size",
    "task.max_prompt_tokens": "data.max_prompt_length --rollout-max-prompt-len",
    "rollout.max_new_tokens": (
        "data.max_response_length actor_rollout_ref.rollout.response_length --rollout-max-response-len"
        " max_completion_length"
    ),
    "task.prompt_key": "data.prompt_key --input-key",
    "model.path": "actor_rollout_ref.model.path --hf-checkpoint model_name_or_path",
    "trainer.recompute": (
        "actor_rollout_ref.model.enable_gradient_checkpointing --recompute-granularity --recompute-method"
        " --recompute-num-layers gradient_checkpointing"
    ),
    "rl.minibatches": "actor_rollout_ref.actor.ppo_mini_batch_size --global-batch-size --num-steps-per-rollout",
    "trainer.microbatch_tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu --max-tokens-per-gpu",
    "optimizer.lr": "actor_rollout_ref.actor.optim.lr --lr learning_rate",
    "optimizer.warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps warmup_steps warmup_ratio",
    "optimizer.weight_decay": "actor_rollout_ref.actor.optim.weight_decay --weight-decay weight_decay",
    "optimizer.clip_grad": "actor_rollout_ref.actor.grad_clip --clip-grad max_grad_norm",
    "algorithm.clip_low": (
        "actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low --eps-clip epsilon"
    ),
    "algorithm.clip_high": "actor_rollout_ref.actor.clip_ratio_high --eps-clip-high epsilon_high",
    "algorithm.dual_clip": "actor_rollout_ref.actor.clip_ratio_c --eps-clip-c delta",
    "algorithm.entropy_coef": "actor_rollout_ref.actor.entropy_coeff --entropy-coef",
    "algorithm.kl_coef": "actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef --kl-coef --kl-loss-coef beta",
    "algorithm.reduction": "actor_rollout_ref.actor.loss_agg_mode",
    "parallel.tensor": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size --tensor-model-parallel-size",
    "parallel.pipeline": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size --pipeline-model-parallel-size",
    "parallel.virtual_pipeline": "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
    "parallel.context": "actor_rollout_ref.actor.megatron.context_parallel_size --context-parallel-size",
    "parallel.expert": "actor_rollout_ref.actor.megatron.expert_model_parallel_size --expert-model-parallel-size",
    "parallel.expert_tensor": (
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size --expert-tensor-parallel-size"
    ),
    "trainer.megatron": "actor_rollout_ref.actor.megatron.override_transformer_config",
    "trainer.optimizer_offload": (
        "actor_rollout_ref.actor.megatron.optimizer_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload"
        " --optimizer-cpu-offload --optimizer-offload-fraction"
    ),
    "trainer.sleep": "actor_rollout_ref.actor.megatron.param_offload actor_rollout_ref.actor.fsdp_config.param_offload",
    "rl.group_size": "actor_rollout_ref.rollout.n --n-samples-per-prompt num_generations",
    "rollout": "actor_rollout_ref.rollout.name",
    "rollout.temperature": "actor_rollout_ref.rollout.temperature --rollout-temperature temperature",
    "rollout.top_p": "actor_rollout_ref.rollout.top_p --rollout-top-p top_p",
    "rollout.top_k": "actor_rollout_ref.rollout.top_k --rollout-top-k top_k",
    "rollout.max_running": "actor_rollout_ref.rollout.max_num_seqs",
    "rollout.tensor": (
        "actor_rollout_ref.rollout.tensor_model_parallel_size --rollout-num-gpus-per-engine vllm_tensor_parallel_size"
    ),
    "rollout.expert": "actor_rollout_ref.rollout.expert_parallel_size --sglang-ep-size --sglang-expert-parallel-size",
    "rollout.memory_share": (
        "actor_rollout_ref.rollout.gpu_memory_utilization --sglang-mem-fraction-static vllm_gpu_memory_utilization"
    ),
    "rollout.server_args": "actor_rollout_ref.rollout.engine_kwargs.sglang",
    "evaluation.temperature": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "evaluation.top_p": "actor_rollout_ref.rollout.val_kwargs.top_p",
    "evaluation.top_k": "actor_rollout_ref.rollout.val_kwargs.top_k",
    "evaluation.samples": "actor_rollout_ref.rollout.val_kwargs.n --n-samples-per-eval-prompt",
    "algorithm": "algorithm.adv_estimator --advantage-estimator",
    "algorithm.kl_in": "algorithm.use_kl_in_reward",
    "algorithm.normalize_std": "algorithm.norm_adv_by_std_in_grpo scale_rewards",
    "task.reward": "custom_reward_function.path --custom-rm-path",
    "algorithm.overlong_buffer": (
        "reward.reward_kwargs.overlong_buffer_cfg reward_model.reward_kwargs.overlong_buffer_cfg"
        " reward_model.overlong_buffer"
    ),
    "algorithm.overlong_factor": (
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor"
        " reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor"
    ),
    "algorithm.overlong_limit": "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len",
    "rl.steps": "trainer.total_training_steps trainer.total_epochs --num-rollout max_steps",
    "checkpoint.every": "trainer.save_freq --save-interval save_steps",
    "evaluation.every": "trainer.test_freq --eval-interval eval_steps",
    "moerl eval": "trainer.val_only",
    "dump.rollouts_every": "trainer.rollout_data_dir --save-debug-rollout-data",
    "metrics.project": "trainer.project_name --wandb-project",
    "metrics.sinks": "trainer.logger report_to",
    "run_dir": "trainer.default_local_dir --save output_dir",
    "trainer.profile_steps": "global_profiler.steps",
    "task.rewards.answer.column": "--label-key",
    "task.rewards.answer.kind": "--rm-type",
    "rl.filters": "--dynamic-sampling-filter-path",
    "rollout.placement": "--colocate",
    "algorithm.importance": "--use-tis",
    "algorithm.importance_cap": "--tis-clip",
    "algorithm.importance_floor": "--tis-clip-low",
    "algorithm.opsm_delta": "--opsm-delta",
    "algorithm.loss": "--custom-loss-function-path",
    "keep_routing.mode": "--use-rollout-routing-replay",
    "optimizer.beta1": "--adam-beta1",
    "optimizer.beta2": "--adam-beta2",
    "optimizer.eps": "--adam-eps",
    "weights.bucket_bytes": "--update-weight-buffer-size",
    "rollout.path": "--load-debug-rollout-data",
    "rollout=dumps": "--debug-train-only",
    "moerl rollout": "--debug-rollout-only",
    "task.hub": "dataset_name",
    "rollout.min_p": "min_p",
    "optimizer.schedule": "lr_scheduler_type",
}
"""By key of ours, or `GROUP=OPTION`, or command: the keys of verl (dotted), the options of slime (with dashes) and the
arguments of TRL that it is the counterpart of. Values need not mean the same: `--help --all` says what ours takes."""


def counterpart(name: str) -> tuple[str, str] | None:
    """Returns the trainers that have a key or option of this name, joined by "and", and our key; None if none has. A
    key inside a mapping counts as the key that holds the mapping; options are found with and without dashes."""
    path = name.partition("=")[0]
    while path:
        for ours, theirs in COUNTERPARTS.items():
            if trainers := [trainer_of(each) for each in theirs.split() if _plain(each) == _plain(path)]:
                return " and ".join(trainers), ours
        path = path.rpartition(".")[0]
    return None


def trainer_of(name: str) -> str:
    """Returns the trainer that has a key or option of `COUNTERPARTS`."""
    if name.startswith("--"):
        return "slime"
    return "verl" if "." in name else "TRL"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
