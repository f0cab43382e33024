from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.errors import EngineError
from moerl.rollout import capture
from moerl.rollout.enforce import EnforcedRouting

TOKENS = np.random.default_rng(0).integers(0, 91, 24)


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


def run(model: Any, routing: EnforcedRouting, ids: np.ndarray, routed: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Logits [T, V] and the natural experts of an enforced pass."""
    routing.begin(torch.from_numpy(ids), torch.from_numpy(routed))
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]
    return logits, routing.end().numpy()


def random_routes(family: families.TinyFamily) -> np.ndarray:
    rng, spec = np.random.default_rng(3), family.spec()
    scores = rng.random((len(TOKENS), spec.num_moe_layers, spec.num_experts))
    return scores.argsort(-1)[..., : spec.experts_per_token]


@pytest.fixture(params=["qwen3_moe", "qwen3_moe-unnormalised", "qwen3_moe-dense", "deepseek_v3", "glm4_moe", "olmoe"])
def family(request: pytest.FixtureRequest) -> families.TinyFamily:
    return families.FAMILIES[request.param]


def test_enforced_experts_give_what_the_family_defines(family: families.TinyFamily, tmp_path: Path) -> None:
    path = families.write_model(tmp_path, family, seed=1)
    routes, everywhere = random_routes(family), np.ones(len(TOKENS), np.bool_)
    model = load(path)
    logits, natural = run(model, EnforcedRouting(model, family.spec()), routes, everywhere)
    judge = families.Judge(path, family)
    with torch.inference_mode():
        wanted = judge.logits(TOKENS, routes)
        unforced = judge.logits(TOKENS)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    assert float((logits - unforced).abs().max()) > 0.1
    assert natural.shape == routes.shape


def test_the_routers_own_choice_enforced_changes_nothing(family: families.TinyFamily, tmp_path: Path) -> None:
    path = families.write_model(tmp_path, family, seed=2)
    judge = families.Judge(path, family)
    routes, everywhere = judge.routes(TOKENS), np.ones(len(TOKENS), np.bool_)
    model = load(path)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]
    logits, natural = run(model, EnforcedRouting(model, family.spec()), routes, everywhere)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-6)
    assert (natural == routes).all()


def test_rows_without_captured_routing_are_left_to_the_router(family: families.TinyFamily, tmp_path: Path) -> None:
    model = load(families.write_model(tmp_path, family, seed=2))
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]
    routes = random_routes(family)
    routed = np.arange(len(TOKENS)) >= 20
    logits, _ = run(model, EnforcedRouting(model, family.spec()), routes, routed)
    torch.testing.assert_close(logits[:20], wanted[:20], rtol=0, atol=1e-5)
    assert float((logits[20:] - wanted[20:]).abs().max()) > 1e-2


def test_experts_that_are_replaced_behind_its_back_are_noticed(tmp_path: Path) -> None:
    family = families.FAMILIES["qwen3_moe"]
    model = load(families.write_model(tmp_path, family, seed=2))
    routing = EnforcedRouting(model, family.spec())
    routing._used.close()
    layer = model.model.layers[2].mlp.experts
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0], inputs[1].flip(0), inputs[2]))
    routing._used = capture.RoutingCapture(model, family.spec())
    with pytest.raises(EngineError, match="row 0, MoE layer 2 used other experts"):
        run(model, routing, random_routes(family), np.ones(len(TOKENS), np.bool_))


def test_experts_without_their_routers_logits_are_refused(tmp_path: Path) -> None:
    family = families.FAMILIES["olmoe"]
    model = load(families.write_model(tmp_path, family, seed=2))
    routing = EnforcedRouting(model, family.spec())
    # As in a fused block: the router's function is called, its module is not.
    block = model.model.layers[1].mlp
    block.__dict__["gate"] = block._modules.pop("gate").forward
    with pytest.raises(EngineError, match="without its router's logits"):
        run(model, routing, random_routes(family), np.ones(len(TOKENS), np.bool_))
