"""TRL: the loss of `GRPOTrainer`, its off-policy mask and its gamma weights.

The loss is a method; it runs on an object that holds the settings it reads and returns the given log-probs.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.golden.inputs import LONGEST, Inputs, loss_and_gradient, plain

REQUIRES = (
    "trl==1.16.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
)

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "dapo, two-sided clip": {"loss_type": "dapo", "delta": 1.5},
    "dapo, off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "gspo, token mean": {
        "loss_type": "dapo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
SETTINGS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "importance_sampling_level": "token",
    "max_completion_length": LONGEST,
    "off_policy_mask_threshold": None,
    "delta": None,
}


def cases(inputs: Inputs) -> dict[str, Any]:
    """All losses, and the two functions by themselves."""
    trainer: Any = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    found: dict[str, Any] = {f"loss: {name}": _loss(trainer, inputs, options) for name, options in LOSSES.items()}
    mask_NT, advantages_N1 = inputs.mask_NT.double(), inputs.advantages_N[:, None]
    threshold = {"off_policy_threshold": 0.05}
    kept_N1 = trainer.get_off_policy_mask(advantages_N1, inputs.trainer_NT, inputs.rollout_NT, mask_NT, **threshold)
    found["get_off_policy_mask"] = {"options": threshold, "mask": plain(kept_N1[:, 0].bool())}
    shape = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    log_ratio_NT = inputs.trainer_NT - inputs.proximal_NT
    weight_NT = (inputs.proximal_NT - inputs.rollout_NT).exp().clamp(max=1.3).masked_fill(~inputs.mask_NT, 1.0)
    for name, ratio_NT in (("get_gamma_weights", None), ("get_gamma_weights, truncated", weight_NT)):
        gamma_N1 = trainer.get_gamma_weights(advantages_N1, log_ratio_NT, mask_NT, ratio_NT, **shape)
        options = (
            shape if ratio_NT is None else shape | {"importance_sampling_ratio": "min(exp(proximal - rollout), 1.3)"}
        )
        found[name] = {"options": options, "weights": plain(gamma_N1[:, 0])}
    return found


def _loss(trainer: Any, inputs: Inputs, changes: dict[str, Any]) -> dict[str, Any]:
    options = SETTINGS | changes
    leaf_NT, mask_NT = inputs.trainer_NT.clone().requires_grad_(), inputs.mask_NT.double()
    ids_NT = torch.zeros_like(inputs.mask_NT, dtype=torch.long)
    batch = {
        "prompt_ids": ids_NT,
        "prompt_mask": ids_NT,
        "completion_ids": ids_NT,
        "completion_mask": mask_NT,
        "advantages": inputs.advantages_N,
        "old_per_token_logps": inputs.proximal_NT,
        "sampling_per_token_logps": inputs.rollout_NT,
        "num_items_in_batch": mask_NT.sum(),
    }
    loss = trainer._compute_loss(_settings(trainer, leaf_NT, options), None, batch)
    return {"options": options} | loss_and_gradient(loss, leaf_NT, inputs.mask_NT)


def _settings(trainer: Any, leaf_NT: Tensor, options: dict[str, Any]) -> SimpleNamespace:
    arguments = SimpleNamespace(
        delta=options["delta"],
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    return SimpleNamespace(
        args=arguments,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=_same, reduce=_same),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf_NT, torch.zeros_like(leaf_NT), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        **{key: value for key, value in options.items() if key != "delta"},
    )


def _same(values: Tensor, reduction: str | None = None) -> Tensor:
    return values
