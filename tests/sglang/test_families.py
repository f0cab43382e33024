"""Other families than Qwen3-MoE on live servers: DeepSeek-V3 (routing by groups with a correction bias, latent
attention), GLM-4.5, OLMoE. Parity with transformers before and after a weight update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import families
import pytest
import sglang_live
from full_updates import full
from safetensors.torch import load_file
from sglang_reference import Reference, collect, collect_twice, make_requests

from moerl.kernels.checksum import checksums
from moerl.models.spec import moe_layer_indices
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.sglang.digests import ServedModel
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

pytestmark = pytest.mark.sglang


@dataclass(frozen=True)
class Served:
    family: str
    folder: Path
    other_folder: Path
    server: SGLangServer
    num_ranks: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in load_file(self.folder / "model.safetensors").items()}

    def engine(self) -> FleetEngine:
        family = families.FAMILIES[self.family]
        model = ModelFacts(family.spec(), moe_layer_indices(family.config().to_dict()))
        return sglang_live.connect(self.server.endpoint, model=model, shapes=self.shapes)


@pytest.fixture(
    scope="module",
    params=[("deepseek_v3", 1), ("deepseek_v3-yarn", 2), ("glm4_moe", 2), ("olmoe-normalised", 1)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def served(request, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, num_ranks = request.param
    published = sglang_live.DEEPSEEK_PUBLISHED if family.startswith("deepseek") else {}
    folder, other = (
        families.write_model(tmp_path_factory.mktemp("model") / "hf", families.FAMILIES[family], seed=seed, **published)
        for seed in (0, 1)
    )
    options = ServerOptions(
        model=folder, environment=environment, device="cpu", dtype="float32", tensor=num_ranks, max_pool_tokens=16384
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("server")) as started:
        yield Served(family, folder, other, started, num_ranks)


def test_routing_kept_sets_and_logprobs_are_those_of_transformers_before_and_after_an_update(served: Served):
    engine = served.engine()
    requests = make_requests(24)
    reference = Reference(served.folder, served.family)
    collect_twice(engine, requests, reference)
    assert reference.num_rows > 3000

    tensors = load_file(served.other_folder / "model.safetensors")
    engine.begin_update(full(1, tensors))
    for bucket in tensors.items():  # so small that DeepSeek's two projections into latents come apart
        engine.receive([bucket])
    engine.end_update()
    model = ServedModel(served.shapes, served.num_ranks, {})
    assert sglang_live.digests(served.server.endpoint, model) == checksums(tensors.items())
    assert set(sglang_live.dtypes(served.server.endpoint, model).values()) == {"float32"}

    reference = Reference(served.other_folder, served.family)
    for trajectory in collect(engine, requests).values():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {1}
        reference.compare(trajectory)
    reference.require_parity()
    engine.close()
