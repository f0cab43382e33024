"""verl: advantages, policy losses, and what its rollout correction makes of weights and masks.

Masks are int64, as its trainer has them; those of advantages float64, because their sums become float32 otherwise.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scripts.golden.inputs import LONGEST, Inputs, loss_and_gradient, plain
from scripts.golden.stand_ins import stand_in_for

REQUIRES = ("verl==0.9.1",)

ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
    "grpo, no deviation": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    "grpo, groups of one": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "groups": "alone"},
    "rloo": {"adv_estimator": "rloo"},
    "rloo, groups of one": {"adv_estimator": "rloo", "groups": "alone"},
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "gamma": 1.0},
    "reinforce_plus_plus_baseline": {"adv_estimator": "reinforce_plus_plus_baseline"},
    "grpo_passk": {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": True},
    "grpo_passk, no deviation": {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False},
}
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
SEQUENCES = {"loss_agg_mode": "seq-mean-token-mean"}
NARROW = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla, token mean": {"loss_mode": "vanilla"},
    "vanilla, sequence mean": {"loss_mode": "vanilla"} | SEQUENCES,
    "vanilla, constant": {
        "loss_mode": "vanilla",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "global_batch_info": {"loss_scale_factor": LONGEST},
    },
    "vanilla, padded width": {"loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "gspo": {"loss_mode": "gspo"} | NARROW | SEQUENCES,
    "gspo, token mean": {"loss_mode": "gspo"} | NARROW,
    "cispo": {"loss_mode": "cispo"},
    "geo_mean": {"loss_mode": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4} | SEQUENCES,
    "sapo": {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.05} | SEQUENCES,
    "clip_cov": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.9, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8},
    "kl_cov": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "dppo_tv": {"loss_mode": "dppo_tv", "clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    "dppo_kl": {"loss_mode": "dppo_kl", "clip_ratio_low": 0.01, "clip_ratio_high": 0.02},
    "dppo_tv, no truncation": {
        "loss_mode": "dppo_tv",
        "clip_ratio_low": 0.05,
        "clip_ratio_high": 0.08,
        "clip_ratio_c": 20.0,
    },
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated, token": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "truncated, sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.3},
    "icepop, token": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "icepop, sequence": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"},
    "rejected, token": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"},
    "rejected, geometric": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "1.1"},
    "rejected, sequence": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "rejected, k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.04"},
    "truncated and rejected": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.3,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "1.1",
    },
}
WITH_WEIGHTS = {"vanilla": {}, "gspo": NARROW | SEQUENCES, "geo_mean": LOSSES["geo_mean"]}
"""Losses that also get the weights of `truncated, token`; in verl each applies them by itself."""


def cases(inputs: Inputs) -> dict[str, Any]:
    """All of the tables above, by their names."""
    stand_in_for("ray", "tensordict", "codetiming", "orjson")
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    found: dict[str, Any] = {f"advantages: {name}": _advantages(core, inputs, ADVANTAGES[name]) for name in ADVANTAGES}
    found |= {f"loss: {name}": _loss(core, inputs, options) for name, options in LOSSES.items()}
    for name, options in CORRECTIONS.items():
        corrected = _corrected(inputs, options)
        weights_NT = torch.tensor(corrected["weights"], dtype=torch.float64) if "weights" in corrected else None
        mask_NT = torch.tensor(corrected["mask"]) if "mask" in corrected else inputs.mask_NT.long()
        loss = _loss(core, inputs, {"loss_mode": "vanilla"}, weights_NT, mask_NT)
        found[f"correction: {name}"] = corrected | loss | {"options": options | loss["options"]}
    weights_NT = torch.tensor(found["correction: truncated, token"]["weights"], dtype=torch.float64)
    for mode, changes in WITH_WEIGHTS.items():
        found[f"weighted: {mode}"] = _loss(core, inputs, {"loss_mode": mode} | changes, weights_NT)
    return found


def _advantages(core: Any, inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    config: Any = importlib.import_module("verl.trainer.config").AlgoConfig(
        gamma=options.get("gamma", 1.0), norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True)
    )
    normalized = {key: value for key, value in options.items() if key == "norm_adv_by_std_in_grpo"}
    groups_N = inputs.alone_N if options.get("groups") == "alone" else inputs.groups_N
    advantages_NT, _ = core.get_adv_estimator_fn(options["adv_estimator"])(
        token_level_rewards=inputs.rewards_of_tokens(),
        response_mask=inputs.mask_NT.double(),
        index=groups_N.numpy(),
        config=config,
        **({} if options["adv_estimator"] == "grpo_passk" else normalized),
    )
    first_N = inputs.mask_NT.long().argmax(1)
    # All tokens of a response have the same.
    return {"options": options, "advantages": plain(advantages_NT[torch.arange(len(first_N)), first_N])}


def _loss(
    core: Any, inputs: Inputs, changes: dict[str, Any], weights_NT: Any = None, mask_NT: Any = None
) -> dict[str, Any]:
    actor: Any = importlib.import_module("verl.workers.config.actor")
    options = {"loss_agg_mode": "token-mean"} | CLIP | changes
    coupled = {key: options[key] for key in options if "_cov" in key or key in ("loss_mode", "ppo_kl_coef")}
    values = {key: value for key, value in options.items() if key not in coupled and key != "loss_agg_mode"}
    config = actor.ActorConfig(
        strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, policy_loss=actor.PolicyLossConfig(**coupled), **values
    )
    leaf_NT = inputs.trainer_NT.clone().requires_grad_()
    loss, _ = core.get_policy_loss_fn(options["loss_mode"])(
        old_log_prob=inputs.proximal_NT,
        log_prob=leaf_NT,
        advantages=inputs.of_each_token(),
        response_mask=inputs.mask_NT.long() if mask_NT is None else mask_NT,
        loss_agg_mode=options["loss_agg_mode"],
        config=config,
        rollout_is_weights=weights_NT,
    )
    return {"options": options} | loss_and_gradient(loss, leaf_NT, inputs.mask_NT)


def _corrected(inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    helper: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio_NT, mask_NT = inputs.proximal_NT - inputs.rollout_NT, inputs.mask_NT.long()
    found: dict[str, Any] = {}
    if "rollout_is" in options:
        how = {key: value for key, value in options.items() if key.startswith("rollout_is")}
        weights_NT, _ = helper.compute_rollout_correction_weights(log_ratio_NT, mask_NT, **how)
        found["weights"] = plain(weights_NT)
    if "rollout_rs" in options:
        how = {key: value for key, value in options.items() if key.startswith("rollout_rs")}
        kept_NT, _ = helper.compute_rollout_rejection_mask(log_ratio_NT, mask_NT, **how)
        found["mask"] = plain(kept_NT)
    return found
