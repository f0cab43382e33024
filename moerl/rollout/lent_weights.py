"""Weights that a model is lent part by part, in another dtype or on another device than those that they rest in.

So a model in 16 bits computes in 32 without a second copy, and one that is larger than a device computes on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moerl.errors import EngineError


@contextlib.contextmanager
def lent_weights(model: Any, *, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Lends every part of a transformers model (embedding, each decoder layer, last norm, head) a copy of its weights
    while that part runs, and takes it back. Buffers keep their dtype: they rest in that of their arithmetic.

    Args:
        model: of `AutoModelForCausalLM`. dtype: of parameters while they are lent. device: for these.
    """
    own: list[tuple[Tensor, Tensor]] = []  # of the part that runs

    def take(part: nn.Module, inputs: tuple[Any, ...]) -> None:
        for tensor in chain(part.parameters(), part.buffers()):
            wanted = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype
            own.append((tensor, tensor.data))
            tensor.data = tensor.data.to(device, wanted)

    def give_back(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for tensor, data in own:
            tensor.data = data
        own.clear()

    with contextlib.ExitStack() as hooks:
        for part in parts_of(model):
            hooks.callback(part.register_forward_pre_hook(take).remove)
            hooks.callback(part.register_forward_hook(give_back, always_call=True).remove)
        yield


def parts_of(model: Any) -> list[nn.Module]:
    """Returns the modules that run one after the other and hold all parameters between them, each once but for tied
    ones.

    Raises:
        EngineError: a parameter is in none of them; it would compute in its own dtype.
    """
    parts: list[nn.Module] = []
    for child in model.base_model.children():
        parts += list(child) if isinstance(child, nn.ModuleList) else [child]
    parts.append(model.get_output_embeddings())
    held = {id(parameter) for part in parts for parameter in part.parameters()}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if left:
        raise EngineError(
            "weights of a model outside of its layers, embedding, norm and head",
            seen=", ".join(left[:3]),
            expected="parameters in these alone",
            remedy="score in the dtype of the model's weights, or report the model's name",
        )
    return parts
