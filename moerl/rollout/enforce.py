"""Enforced routing in a transformers model: its MoE layers use the experts that the caller names.

Used by `moerl.rollout.replay` and `moerl.offline.rescoring`. Hooks before the experts replace what the router chose;
the weights of the experts are those that the model's own router gives them. Shape legend: R = input rows of a pass, L =
MoE layers, E = experts, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError
from moerl.models.family import RouterWeights
from moerl.rollout.capture import RoutingCapture, experts_by_layer, family_of_model, routers


def softmax_weights(logits_RE: Tensor, ids_RK: Tensor, config: Any) -> Tensor:
    """Returns float32 [R, K]: p = softmax(logits) of the experts, divided by their sum if `norm_topk_prob`."""
    weights_RK = logits_RE.softmax(-1, dtype=torch.float32).gather(1, ids_RK)
    return weights_RK / weights_RK.sum(-1, keepdim=True) if config.norm_topk_prob else weights_RK


def sigmoid_weights(logits_RE: Tensor, ids_RK: Tensor, config: Any) -> Tensor:
    """Returns float32 [R, K]: sigmoid(logits) of the experts, divided by their sum if `norm_topk_prob`, then scaled.

    The correction bias changes the choice alone, never the weights (DeepSeek-V3, arXiv:2412.19437, eq. 16).
    """
    weights_RK = logits_RE.float().sigmoid().gather(1, ids_RK)
    if config.norm_topk_prob:
        weights_RK = weights_RK / (weights_RK.sum(-1, keepdim=True) + 1e-20)
    return weights_RK * config.routed_scaling_factor


WEIGHTS: dict[RouterWeights, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "softmax": softmax_weights,
    "sigmoid": sigmoid_weights,
}
"""How weights are made of a router's logits at given experts, by the name in a family's record."""


class EnforcedRouting:
    """Hooks on the MoE layers of one model, in the order of the layers, for one forward pass after another.

    Raises:
        EngineError: the model's MoE layers are unknown, or do not match the spec.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        # Hooks run in the order in which they were registered: the first capture sees what the router chose, the
        # second what the experts are really given.
        self._own = RoutingCapture(model, spec)
        self._config: Any = model.config
        family = family_of_model(model)
        assert family is not None  # or the capture had refused it
        self._weights = WEIGHTS[family.router_weights]
        gates = routers(model)
        self._biases = [getattr(gate, "e_score_correction_bias", None) for gate in gates]
        self._ranks_by_sigmoid = family.router_weights == "sigmoid"
        self._logits: list[Tensor | None] = [None] * len(gates)
        self._margins: list[Tensor] = []
        for layer, (gate, experts) in enumerate(zip(gates, experts_by_layer(model).values(), strict=True)):
            gate.register_forward_hook(partial(self._keep_logits, layer))
            experts.register_forward_pre_hook(partial(self._replace, layer))
        self._used = RoutingCapture(model, spec)
        self._ids_RLK = torch.zeros(0, len(gates), spec.experts_per_token, dtype=torch.int64)
        self._routed_R = torch.zeros(0, dtype=torch.bool)

    def begin(self, ids_RLK: Tensor, routed_R: Tensor) -> None:
        """Sets the experts that the next pass uses.

        Args:
            ids_RLK: int64, distinct experts per row and layer. routed_R: bool; False where the router decides.
        """
        self._own.begin()
        self._used.begin()
        self._margins.clear()
        self._ids_RLK, self._routed_R = ids_RLK, routed_R

    def end(self) -> Tensor:
        """Ends the pass; returns what the routers chose by themselves, on its hidden states: int64 [R, L, K].

        Raises:
            EngineError: a layer did not use the experts that `begin` named, or did not run on every row.
        """
        num_rows = len(self._routed_R)
        own_RLK, used_RLK = self._own.take(num_rows), self._used.take(num_rows)
        differs_RL = (used_RLK != self._ids_RLK).any(-1) & self._routed_R[:, None]
        if differs_RL.any():
            row, layer = differs_RL.nonzero()[0].tolist()
            raise EngineError(
                f"enforced routing: row {row}, MoE layer {layer} used other experts than it was told",
                seen=used_RLK[row, layer].tolist(),
                expected=self._ids_RLK[row, layer].tolist(),
                remedy="something else replaces the inputs of the experts; load a model of its own",
            )
        return own_RLK

    def margins(self) -> Tensor:
        """Returns the margins of the last pass: score of the last expert that the routers chose less that of the best
        one left out, in the units in which the family ranks; float32 [R, L], 0 if no expert is left out."""
        return torch.stack(self._margins, dim=1)

    def _keep_logits(self, layer: int, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._logits[layer] = output[0] if isinstance(output, tuple) else output

    def _replace(self, layer: int, experts: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, own_RK, own_weights_RK = inputs
        logits_RE, self._logits[layer] = self._logits[layer], None
        if logits_RE is None or len(logits_RE) != len(self._routed_R):
            raise EngineError(
                f"enforced routing: MoE layer {layer} reached its experts without its router's logits",
                seen=None if logits_RE is None else f"{len(logits_RE)} rows",
                expected=f"{len(self._routed_R)} rows",
                remedy="a fused path bypasses the router module; run the model eagerly",
            )
        self._margins.append(self._margin(layer, logits_RE, own_RK))
        ids_RK = self._ids_RLK[:, layer]
        weights_RK = self._weights(logits_RE, ids_RK, self._config).to(own_weights_RK.dtype)
        routed_R1 = self._routed_R[:, None]
        return hidden, ids_RK.where(routed_R1, own_RK), weights_RK.where(routed_R1, own_weights_RK)

    def _margin(self, layer: int, logits_RE: Tensor, own_RK: Tensor) -> Tensor:
        ranked_RE = logits_RE.float().sigmoid() if self._ranks_by_sigmoid else logits_RE.float()
        if (bias := self._biases[layer]) is not None:
            ranked_RE = ranked_RE + bias.float()
        chosen_RE = torch.zeros_like(ranked_RE, dtype=torch.bool).scatter_(1, own_RK, True)
        if chosen_RE.all():
            return torch.zeros(len(ranked_RE), device=ranked_RE.device)
        return ranked_RE.gather(1, own_RK).amin(1) - ranked_RE.masked_fill(chosen_RE, -torch.inf).amax(1)
