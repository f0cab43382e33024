"""AReaL: its PPO loss with the corrections of the decoupled objective, SAPO, M2PO's mask, interpolated log-probs."""

from __future__ import annotations

import importlib
from typing import Any

from scripts.golden.inputs import Inputs, loss_and_gradient, plain
from scripts.golden.stand_ins import stand_in_for, without_code_of

REQUIRES = ("areal==1.0.4",)
VERSION = 5
"""Version of the weights being trained."""

CLIP = {"eps_clip": 0.2, "eps_clip_higher": 0.28}
SEQUENCE = {"eps_clip": 0.03, "eps_clip_higher": 0.04, "importance_sampling_level": "sequence"}


def _correction(
    level: str, action: str, upper: float, lower: float | None = None, metric: str = "ratio"
) -> dict[str, Any]:
    return {"level": level, "action": action, "metric": metric, "agg": "mean", "upper": upper, "lower": lower}


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": CLIP,
    "ppo, dual clip": CLIP | {"c_clip": 1.5},
    "ppo, sequence": SEQUENCE,
    "decoupled, token clamp": CLIP | {"rejection_sampling": _correction("token", "clamp", 1.3)},
    "decoupled, token mask": CLIP | {"rejection_sampling": _correction("token", "mask", 1.3, 0.8)},
    "decoupled, sequence clamp": CLIP | {"rejection_sampling": _correction("sequence", "clamp", 1.1, 0.9)},
    "decoupled, sequence mask": CLIP | {"rejection_sampling": _correction("sequence", "mask", 1.1, 0.9)},
    "decoupled, k2 mask": CLIP | {"rejection_sampling": _correction("token", "mask", 0.05, metric="kl_k2")},
    "decoupled, dual clip": CLIP | {"c_clip": 1.5, "rejection_sampling": _correction("token", "clamp", 1.3)},
    "decoupled, sequence and clamp": SEQUENCE | {"rejection_sampling": _correction("token", "clamp", 1.3)},
    "decoupled, sequence and mask": SEQUENCE | {"rejection_sampling": _correction("token", "mask", 1.3, 0.8)},
}
SAPO = {"token": {"importance_sampling_level": "token"}, "sequence": {"importance_sampling_level": "sequence"}}
M2_THRESHOLD = 0.04


def cases(inputs: Inputs) -> dict[str, Any]:
    """All losses, the mask of M2PO and the interpolated log-probs."""
    # The package and its trainer import every engine; these are what their settings and logs need.
    without_code_of("areal", "areal.trainer", "areal.trainer.ppo")
    stand_in_for(
        "areal.infra", "areal.experimental", "uvloop", "colorlog", "ray", "numba", "torchdata", "lark", "orjson"
    )
    functional: Any = importlib.import_module("areal.utils.functional.functional")
    actor: Any = importlib.import_module("areal.trainer.ppo.actor")
    found: dict[str, Any] = {f"loss: {name}": _loss(functional, inputs, options) for name, options in LOSSES.items()}
    for level, options in SAPO.items():
        settings = {"tau_pos": 1.0, "tau_neg": 1.05} | options
        leaf_NT = inputs.trainer_NT.clone().requires_grad_()
        loss, _ = functional.sapo_loss_fn(
            leaf_NT, inputs.proximal_NT, inputs.of_each_token(), loss_mask=inputs.mask_NT, **settings
        )
        found[f"loss: sapo, {level}"] = {"options": settings} | loss_and_gradient(loss, leaf_NT, inputs.mask_NT)
    # Its loss does this to the mask before anything else.
    kept_NT = actor._apply_m2po_masking(inputs.rollout_NT, inputs.proximal_NT, inputs.mask_NT, M2_THRESHOLD)
    found["m2po mask"] = {"options": {"m2_threshold": M2_THRESHOLD}, "mask": plain(kept_NT)}
    between = actor.compute_prox_logp_approximations(
        inputs.rollout_NT, inputs.trainer_NT, inputs.versions_NT, current_version=VERSION
    )
    for method, logprobs_NT in between.items():
        found[f"proximal: {method}"] = {
            "options": {"current_version": VERSION, "method": method},
            "logprobs": plain(logprobs_NT),
        }
    return found


def _loss(functional: Any, inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    settings: Any = importlib.import_module("areal.api.cli_args")
    values, correction = dict(options), options.get("rejection_sampling")
    if correction is not None:
        values["rejection_sampling"] = settings.RejectionSamplingConfig(**correction)
    leaf_NT = inputs.trainer_NT.clone().requires_grad_()
    loss, seen = functional.ppo_actor_loss_fn(
        logprobs=leaf_NT,
        proximal_logprobs=inputs.proximal_NT,
        old_logprobs=inputs.rollout_NT,
        advantages=inputs.of_each_token(),
        loss_mask=inputs.mask_NT,
        **values,
    )
    found = {"options": options} | loss_and_gradient(loss, leaf_NT, inputs.mask_NT)
    if correction is not None:
        found["weights"] = plain(seen["behave_imp_weight"])
    return found
