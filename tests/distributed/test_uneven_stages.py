"""Pipeline stages that differ in their number of layers are the one-process model, cut up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks

from moerl.contract.parallel import stage_layers
from moerl.models.description import read_model
from moerl.models.spec import spec_from_hf_config

FAMILY = families.FAMILIES["deepseek_v3"]
NUM_LAYERS = 5
"""The first is dense, so that MoE layers are counted otherwise than layers."""
LENGTHS = (5, 30, 17, 41, 9, 24)


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("five-layers") / "model"
    return families.write_model(folder, FAMILY, seed=5, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def three_processes() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def megatrons_stages(config: Any, pipeline: int) -> list[list[int]]:
    """The layers of every stage by Megatron's own arithmetic, from 0."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.pipeline_model_parallel_layout is not None:
        return [config.pipeline_model_parallel_layout.get_layer_id_list(pp_rank=stage) for stage in range(pipeline)]
    offsets = [get_transformer_layer_offset(config, pp_rank=stage) for stage in range(pipeline)]
    counts = [get_num_layers_to_build(config, pp_rank=stage) for stage in range(pipeline)]
    return [list(range(start, start + count)) for start, count in zip(offsets, counts, strict=True)]


def stages_of_large_models(layout: Any) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moerl.trainer.model import _parallel_settings

    for num_layers in (46, 61, 92, 94):
        for pipeline in (1, 2, 3, 4, 5, 7, 8, 16):
            here = SimpleNamespace(
                tensor=1, pipeline=pipeline, virtual_pipeline=1, context=1, expert=1, expert_tensor=1
            )
            settings: Any = _parallel_settings(here, num_layers)  # pyright: ignore[reportArgumentType] - the sizes of it
            settings |= {"pipeline_dtype": torch.float32, "moe_token_dispatcher_type": "alltoall"}
            config = TransformerConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=1, **settings)
            stages = megatrons_stages(config, pipeline)
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            assert [len(stage) for stage in stages] == stage_layers(num_layers, pipeline)


def test_megatron_counts_the_layers_of_large_models_as_the_split_says(one_process: Ranks) -> None:
    one_process.run(stages_of_large_models)


def train(layout: Any, path: Path) -> dict[str, Any]:
    """Two steps with Keep Routing, full recompute, and what they were made of."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    spec = spec_from_hf_config(FAMILY.config(num_hidden_layers=NUM_LAYERS).to_dict())
    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(recompute="full"), tiny_moe.OPTIMIZER, 8)
    losses, norms, verified = [], [], 0
    for seed in (91, 92):
        local, denominator = tiny_moe.shares(trainer, families.make_samples(spec, seed, LENGTHS))
        report: Any = trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
        losses.append(sum(float(row.losses_T.sum()) for row in report.rows))
        norms.append(report.update.grad_norm)
        verified += report.rows_verified
    return {
        "losses": losses,
        "norms": norms,
        "verified": verified,
        "load": report.expert_load_LE.numpy(),
        "moe_layers": [hook.moe_layer for hook in trainer.keep_routing.hooks],
        "weights": tiny_moe.exported(trainer),
    }


@pytest.mark.parametrize(
    ("pipeline", "moe_layers"),
    [(2, [[0, 1], [2, 3]]), pytest.param(3, [[0], [1, 2], [3]], marks=pytest.mark.distributed)],
)
def test_steps_with_uneven_stages_equal_those_of_one_process(
    pipeline: int, moe_layers: list[list[int]], five_layers: Path, one_process: Ranks, request: pytest.FixtureRequest
) -> None:
    (expected,) = one_process.run(train, five_layers)
    ranks: Ranks = request.getfixturevalue({2: "two_processes", 3: "three_processes"}[pipeline])
    stages = ranks.run(train, five_layers, pipeline=pipeline)
    assert [stage["moe_layers"] for stage in stages] == moe_layers
    np.testing.assert_allclose(stages[-1]["losses"], expected["losses"], rtol=1e-5)
    assert sum(stage["verified"] for stage in stages) == expected["verified"] > 0
    np.testing.assert_array_equal(np.sum([stage["load"] for stage in stages], axis=0), expected["load"])
    for stage in stages:
        np.testing.assert_allclose(stage["norms"], expected["norms"], rtol=1e-4)
        assert tiny_moe.largest_difference(stage["weights"], expected["weights"]) < 1e-5
