"""16-bit precision on a CPU: weights and activations rounded, products in float32.

Runs inside the embedded rollout engine. Few CPUs multiply 16-bit numbers, and those that do are slower at it with the
few rows of a decoding step than with float32; what an engine's precision means for its trainer is the rounding, and
that costs little. Weights are held as float32 numbers that the 16-bit type has, too. The residual stream, what linear
maps and norms are given and give, routers' logits, and experts' inner activations, weights and sums are rounded to the
16-bit type; products and sums inside of attention and norms are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


def rounded(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns `values` in their own dtype, each rounded to a number that `dtype` has; unchanged if `dtype` is None."""
    return values if dtype is None else values.to(dtype).to(values.dtype)


def emulate(model: PreTrainedModel, dtype: torch.dtype, routers: list[nn.Module]) -> Callable[[], None]:
    """Has a model compute in float32 from now on, rounding to `dtype`. Returns a function that removes the hooks."""
    model.float()
    handles: list[Any] = []

    def round_output(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return rounded(output, dtype)

    def round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(inputs[0], dtype), *inputs[1:])

    def round_in_place(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # The sum of the residual stream, which goes on past the norm.
        inputs[0].copy_(rounded(inputs[0], dtype))

    for module in model.modules():
        is_linear, is_norm = isinstance(module, nn.Linear), type(module).__name__.endswith("Norm")
        if is_linear:
            handles.append(module.register_forward_pre_hook(round_input))
        if is_norm:
            handles.append(module.register_forward_pre_hook(round_in_place))
        if is_norm or is_linear:
            handles.append(module.register_forward_hook(round_output))
    mode = _RoundedLinear(dtype)

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    for router in routers:
        handles.append(router.register_forward_pre_hook(enter))
        handles.append(router.register_forward_hook(leave, always_call=True))

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


class _RoundedLinear(TorchFunctionMode):
    """A mode that rounds what `torch.nn.functional.linear` gives: routers call it by themselves."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return rounded(result, self._dtype) if func is torch.nn.functional.linear else result
