from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from full_updates import send

from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.models.spec import spec_from_hf_config
from moerl.rollout.capture import routers
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.rounding import emulate, rounded
from moerl.rollout.weight_staging import held_dtypes, held_tensors

HALVES = [torch.bfloat16, torch.float16]


def _engine(model: Any) -> EmbeddedEngine:
    spec = spec_from_hf_config(model.config.to_dict())
    return EmbeddedEngine(model, spec, engine_id="e", max_running=4, policy_version=0)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(60).view(4, 15) * 7 % 61
    return model(input_ids=tokens).logits.float()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_errs_as_much_as_a_model_of_that_precision(make_model, dtype: torch.dtype):
    """Neither an engine that rounds less, whose mismatch would not be real, nor one that rounds more."""
    native = make_model(dtype=dtype)
    exact, emulated = deepcopy(native).float(), deepcopy(native)
    stop = emulate(emulated, dtype, routers(emulated))
    wanted = _logits(exact)
    errors = [(_logits(model) - wanted).abs().median().item() for model in (native, emulated)]
    assert 0.5 < errors[1] / errors[0] < 2.0
    stop()
    assert torch.equal(_logits(emulated), wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_and_routers_give_numbers_of_the_half_type_alone(make_model, dtype: torch.dtype):
    model = make_model(dtype=dtype)
    emulate(model, dtype, routers(model))
    seen: list[torch.Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    logits = _logits(model)
    assert len(seen) == 2
    for values in (logits, *seen):
        assert values.dtype == torch.float32
        assert torch.equal(values, rounded(values, dtype))


def test_an_update_is_rounded_held_and_checked_in_the_half_type(make_model):
    engine, update = _engine(make_model(dtype=torch.bfloat16)), make_model(seed=1)
    send(engine, 1, held_tensors(update, held_dtypes(update)))
    halves = deepcopy(update).bfloat16()
    assert set(engine.held_dtypes().values()) == {"bfloat16"}
    engine.verify(checksums(held_tensors(halves, held_dtypes(halves))))
    for name, tensor in engine._model.state_dict().items():
        assert torch.equal(tensor, halves.state_dict()[name].float())
    with pytest.raises(WeightSyncError, match="does not hold what was sent"):
        engine.verify(checksums(held_tensors(update, held_dtypes(update))))
