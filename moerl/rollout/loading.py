"""Transformers models that hold the weights of their directory, all of them. Any process with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moerl.errors import EngineError
from moerl.rollout.eight_bits import FLOAT8, round_operands
from moerl.rollout.host import engine_device


def load_model(folder: Path, *, dtype: torch.dtype, **settings: Any) -> Any:
    """Loads the model of a Hugging Face directory that `moerl.machine.model_tensors.check_weights` has let pass.

    Args:
        settings: for `from_pretrained`.

    Raises:
        EngineError: transformers would fill a parameter with random numbers.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype=dtype, output_loading_info=True, **settings)
    unfilled = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if unfilled:
        raise EngineError(
            f"transformers does not find every parameter in {folder}",
            seen=f"{len(unfilled)} without a tensor, first {unfilled[0]!r}",
            expected="a tensor of the right shape for every parameter",
            remedy="use a whole checkpoint of the model that its config.json describes",
        )
    return model


def load_sampler(folder: Path, dtype: str) -> Any:
    """Loads the model of the embedded engine in the precision of `rollout.dtype`, on the device that the engine samples
    on; for `FLOAT8` operands are rounded as it computes."""
    if dtype != FLOAT8:
        return load_model(folder, dtype=getattr(torch, dtype)).to(engine_device(dtype))
    model = load_model(folder, dtype=torch.bfloat16)
    round_operands(model)
    return model
