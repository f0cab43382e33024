"""8-bit products on a CPU, emulated: operands rounded to float8 (e4m3), products in float32.

Runs inside the embedded rollout engine, on top of `moerl.rollout.rounding`. An engine that samples in 8 bits (W8A8)
holds 16-bit weights that arrived, quantizes them once per update, and quantizes activations before each product. So
here: linear maps and experts take both operands rounded to e4m3, weights with a scale per output channel, activations
with a scale per token; everything else is bfloat16. The head, routers and embeddings stay in bfloat16, as engines keep
them. Nothing is faster or smaller for it: what is emulated is the rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moerl.errors import EngineError

FLOAT8 = "float8"
"""Value of `rollout.dtype` for 8-bit products."""

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_CACHE, _MARK = "moerl_eight_bits", "moerl_eight_bit_products"


def to_eight_bits(values: Tensor) -> Tensor:
    """Returns `values` in float32, each row along the last dimension rounded to e4m3 with a scale of its own."""
    values = values.float()
    scales = values.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (values / scales).to(_E4M3).float() * scales


def eight_bit_weight(weight: Tensor) -> Tensor:
    """Returns the rounded weight [..., out, in], computed once after each change of `weight`."""
    version, rounded = getattr(weight, _CACHE, (None, weight))
    if version != weight._version:
        version, rounded = weight._version, to_eight_bits(weight.detach())
        setattr(weight, _CACHE, (version, rounded))
    return rounded


def round_operands(model: PreTrainedModel) -> None:
    """Has linear maps of a model multiply 8-bit numbers from now on, and so its experts (`experts_function`).

    Raises:
        EngineError: the model is not on a CPU.
    """
    if model.device.type != "cpu":
        raise EngineError(
            "embedded engine: 8 bits are emulated on a CPU alone",
            seen=f"a model on {model.device}",
            expected="cpu",
            remedy="set rollout.dtype=bfloat16",
        )
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            cast(Any, module).forward = partial(_product, module)
    setattr(model, _MARK, True)


def has_eight_bit_products(model: PreTrainedModel) -> bool:
    """Returns whether `round_operands` was called for a model."""
    return getattr(model, _MARK, False)


def _product(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Computes the forward pass of one linear map."""
    return nn.functional.linear(to_eight_bits(inputs), eight_bit_weight(module.weight), module.bias)
