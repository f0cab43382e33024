"""Weights that are lent to a model part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_models import MODELS, write_model

from moerl.errors import EngineError
from moerl.rollout.lent_weights import lent_weights, parts_of
from moerl.rollout.loading import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lent"), request.param)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    model = load_model(folder, dtype=dtype, attn_implementation="sdpa").eval()
    model.set_experts_implementation("eager")
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def bytes_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize(("rest", "lent"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_a_model_computes_in_a_finer_arithmetic_as_a_copy_does_that_is_loaded_in_it(
    folder: Path, rest: torch.dtype, lent: torch.dtype
) -> None:
    model, copy = (loaded(folder, dtype) for dtype in (rest, lent))
    plain, before = logits(model), bytes_of(model)
    with lent_weights(model, dtype=lent, device=CPU):
        assert torch.equal(logits(model), logits(copy))
    assert torch.equal(logits(model), plain)
    after = bytes_of(model)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == each.dtype and torch.equal(after[name], each) for name, each in before.items())


def test_one_part_at_a_time_has_a_copy(folder: Path) -> None:
    model = loaded(folder, torch.bfloat16)
    parts, seen = parts_of(model), set[tuple[int, ...]]()

    def look(*_: object) -> None:
        lent = [any(p.dtype == torch.float32 for p in part.parameters()) for part in parts]
        seen.add(tuple(i for i, is_lent in enumerate(lent) if is_lent))

    hooks = [
        module.register_forward_pre_hook(look) for part in parts for module in part.modules() if module is not part
    ]
    with lent_weights(model, dtype=torch.float32, device=CPU):
        logits(model)
    assert len(seen) > 2
    assert all(len(lent) <= 1 for lent in seen)
    for hook in hooks:
        hook.remove()


def test_a_part_that_fails_gives_its_weights_back(folder: Path) -> None:
    model = loaded(folder, torch.bfloat16)
    before = logits(model)

    def fail(*_: object) -> None:
        raise RuntimeError("a layer failed")

    hook = model.base_model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a layer failed"), lent_weights(model, dtype=torch.float32, device=CPU):
        logits(model)
    hook.remove()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), before)


def test_a_parameter_that_no_part_holds_is_refused(folder: Path) -> None:
    model = loaded(folder, torch.bfloat16)
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(EngineError, match="extra"):
        parts_of(model)
