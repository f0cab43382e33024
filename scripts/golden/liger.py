"""Liger-Kernel: the losses of its fused linear GRPO, without the KL."""

from __future__ import annotations

import importlib
from typing import Any

from scripts.golden.inputs import LONGEST, Inputs, loss_and_gradient

REQUIRES = ("liger-kernel==0.8.5",)

LOSSES: dict[str, dict[str, Any]] = {
    "grpo, token mean": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo, sequence mean": {"loss_type": "grpo", "epsilon_high": 0.28},
    "grpo, constant": {"loss_type": "dr_grpo", "max_completion_length": LONGEST},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
}


def cases(inputs: Inputs) -> dict[str, Any]:
    """`ppo_loss_fn` with the options of each case."""
    liger: Any = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    mask_NT, found = inputs.mask_NT, {}
    for name, changes in LOSSES.items():
        options = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0} | changes
        leaf_NT = inputs.trainer_NT.clone().requires_grad_()
        loss, _ = liger.LigerFusedLinearGRPOFunction.ppo_loss_fn(
            leaf_NT,
            mask_NT.double(),
            inputs.advantages_N,
            mask_NT.double(),
            old_per_token_logps=inputs.proximal_NT,
            **options,
        )
        found[name] = {"options": options} | loss_and_gradient(loss, leaf_NT, mask_NT)
    return found
