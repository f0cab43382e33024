"""The experts of the embedded engine: on a CPU, one pass over tokens sorted by expert.

Runs inside the embedded rollout engine, registered with transformers under `experts_function`. The stock grouped
function masks and scatters every row for cases that do not occur here; with the few rows of a decoding step that is
half of its time on a CPU. On a device the stock function is the fastest in 16 bits; `why_experts_wait` says on which
GPUs it waits for the host. Shape legend: R = rows, K = experts per token, E = experts, H = hidden size, F = width of an
expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moerl.errors import EngineError
from moerl.rollout import host
from moerl.rollout.blocks import ROWS
from moerl.rollout.capture import experts_by_layer
from moerl.rollout.eight_bits import eight_bit_weight, has_eight_bit_products, to_eight_bits
from moerl.rollout.independent_rows import grouped, is_for_kernels
from moerl.rollout.rounding import rounded

_STOCK = "grouped_mm"
"""transformers' own: exact, and within 10% of the fastest at every batch size; its `batched_mm` is 15-50 times slower
on a CPU."""

_ON_DEVICE_ALONE = (9, 10)
"""Major compute capabilities on which torch's grouped product in bfloat16 is one kernel (2.13). On others, and in all
other types, the host reads the ends of the rows of each expert and starts a product for each."""

_NAME, _EVERY = "moerl_sorted", "moerl_every"

_EVERY_ELEMENTS = 2**26
"""Numbers that the experts of one pass of `every_expert` give out together."""


def sorted_experts(
    module: Any,
    hidden_RH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    *,
    dtype: torch.dtype | None = None,
    eight_bits: bool = False,
) -> Tensor:
    """Computes sum over k of weights[r, k] * down(act(gate(h)) * up(h)) of expert ids[r, k], by the interface of
    transformers.

    Args:
        module: holds `gate_up_proj` [E, 2F, H] and `down_proj` [E, H, F].
        dtype: type that activations are rounded to; None if they are left as they are.
        eight_bits: operands of products are rounded to 8 bits (`moerl.rollout.eight_bits`).

    Returns:
        [R, H].
    """
    num_rows, num_chosen = ids_RK.shape
    places, ends_E = _places(ids_RK.flatten(), module.num_experts)
    # Rows that fill up the last block of an expert are anything finite.
    sources = places.new_zeros(int(ends_E[-1]))
    sources[places] = torch.arange(num_rows, device=places.device).repeat_interleave(num_chosen)
    rows = hidden_RH.index_select(0, sources)
    gate_up = _product(rows, module.gate_up_proj, ends_E, eight_bits)
    gated = rounded(module._apply_gate(gate_up), dtype)
    out = _product(gated, module.down_proj, ends_E, eight_bits)
    in_order = out.index_select(0, places).view(num_rows, num_chosen, -1)
    weighted = in_order * rounded(weights_RK, dtype)[:, :, None]
    return rounded(weighted.sum(1).to(hidden_RH.dtype), dtype)


def every_expert(module: Any, hidden_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Computes what `sorted_experts` does, [R, H], by all experts for all rows: in float32 on a device, for checks.

    Shapes and operations do not depend on what was chosen, at E / K times the operations.
    """
    num_rows, num_experts = len(hidden_RH), module.num_experts
    weights_RE = hidden_RH.new_zeros(num_rows, num_experts).scatter_(1, ids_RK, weights_RK.to(hidden_RH.dtype))
    out_RH = torch.zeros_like(hidden_RH)
    together = max(1, _EVERY_ELEMENTS // (num_rows * module.gate_up_proj.shape[1]))
    for start in range(0, num_experts, together):
        some = slice(start, start + together)
        gate_up = torch.einsum("rh,efh->erf", hidden_RH, module.gate_up_proj[some])
        made_ERH = torch.bmm(module._apply_gate(gate_up), module.down_proj[some].transpose(1, 2))
        out_RH = out_RH + torch.einsum("re,erh->rh", weights_RE[:, some], made_ERH)
    return out_RH


def _places(experts_C: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts C choices by expert; returns the place of each, int64 [C], and the end of each expert's rows, int32
    [num_experts]. Every expert has whole blocks of rows (`moerl.rollout.blocks`)."""
    order = experts_C.argsort()
    counts_E = torch.bincount(experts_C, minlength=num_experts)
    sizes_E = (counts_E + ROWS - 1) // ROWS * ROWS
    shifts_E = (sizes_E - counts_E).cumsum(0) - (sizes_E - counts_E)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device) + shifts_E[experts_C[order]]
    return places, sizes_E.cumsum(0, dtype=torch.int32)


def _product(rows: Tensor, weight_EOI: Tensor, ends_E: Tensor, eight_bits: bool) -> Tensor:
    if eight_bits:
        rows, weight_EOI = to_eight_bits(rows), eight_bit_weight(weight_EOI)
    if is_for_kernels(rows):
        return grouped(rows, weight_EOI, ends_E)
    return torch.nn.functional.grouped_mm(rows, weight_EOI.transpose(1, 2), offs=ends_E)


def experts_function(model: PreTrainedModel, dtype: torch.dtype | None) -> str:
    """Returns the name of the function that is best for the experts of a model, rounding activations to `dtype`.

    Raises:
        EngineError: the model's products are of 8 bits, and these experts have no such function.
    """
    shape: Any = next(iter(experts_by_layer(model).values()))
    is_plain = shape.has_gate and shape.is_concatenated and not shape.has_bias and not shape.is_transposed
    eight_bits = has_eight_bit_products(model)
    if not host.is_host(model) and is_plain and model.dtype.itemsize != 2:
        ALL_EXPERTS_FUNCTIONS.register(_EVERY, every_expert)
        return _EVERY
    if not is_plain or not host.is_host(model):
        if eight_bits:
            raise EngineError(
                "embedded engine: no 8-bit experts", seen=type(model).__name__, remedy="set rollout.dtype=bfloat16"
            )
        return _STOCK
    name = _NAME if dtype is None else f"{_NAME}_{str(dtype).removeprefix('torch.')}"
    name += "_float8" if eight_bits else ""
    if name not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, partial(sorted_experts, dtype=dtype, eight_bits=eight_bits))
    return name


def why_experts_wait(model: PreTrainedModel) -> str:
    """Returns why the experts of a model on a GPU wait for the host; an empty text if they do not."""
    if model.device.type != "cuda" or experts_function(model, None) != _STOCK:
        return ""
    major, minor = torch.cuda.get_device_capability(model.device)
    if model.dtype == torch.bfloat16 and major in _ON_DEVICE_ALONE:
        return ""
    precision = str(model.dtype).removeprefix("torch.")
    return f"torch's grouped product in {precision} waits for the host on compute capability {major}.{minor}"
