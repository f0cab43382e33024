"""The embedded engine on every family: it records the routes that the family's own routers choose."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from full_updates import send
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.models.spec import moe_layer_indices
from moerl.rollout.embedded import EmbeddedEngine


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_routes_and_logprobs_are_those_of_the_family(name: str, tmp_path: Path):
    family = FAMILIES[name]
    path = families.write_model(tmp_path / name, family, seed=5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = EmbeddedEngine(model, family.spec(), engine_id="e", max_running=2, policy_version=0)
    assert engine.handshake().layer_numbers == moe_layer_indices(model.config.to_dict())
    requests = [_request(index, length) for index, length in enumerate((3, 9, 5))]
    judge = families.Judge(path, family)
    for record in engine.generate(requests):
        values = record.values
        tokens = values["token_ids"][:-1]
        expected = judge.routes(tokens)
        np.testing.assert_array_equal(np.sort(values["expert_ids"], -1), np.sort(expected, -1))
        with torch.no_grad():
            logprobs_TV = judge.logits(tokens).log_softmax(-1)
        targets = torch.from_numpy(values["token_ids"][1:].astype(np.int64))
        sampled = values["rollout_logprobs"][1:] != 0
        difference = logprobs_TV.gather(1, targets[:, None])[:, 0].numpy() - values["rollout_logprobs"][1:]
        assert np.abs(difference[sampled]).max() < 1e-5


def test_weights_of_a_checkpoint_with_expert_biases_can_be_swapped_in(tmp_path: Path):
    family = FAMILIES["deepseek_v3"]
    old, new = (families.write_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    model = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32)
    engine = EmbeddedEngine(model, family.spec(), engine_id="e", max_running=1, policy_version=0)
    send(engine, 1, load_file(new / "model.safetensors"))
    judge = families.Judge(new, family)
    (record,) = engine.generate([_request(0, 6)])
    np.testing.assert_array_equal(
        np.sort(record.values["expert_ids"], -1), np.sort(judge.routes(record.values["token_ids"][:-1]), -1)
    )


def _request(index: int, length: int) -> RolloutRequest:
    prompt = np.random.default_rng(index).integers(0, 91, length)
    sampling = SamplingParams(seed=index)
    return RolloutRequest(Lineage(f"r{index}", f"p{index}", "g"), tuple(int(t) for t in prompt), sampling, 8)
