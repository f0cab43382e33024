from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny_moe
import torch
from families import FAMILIES
from ranks import Ranks
from safetensors.torch import load_file

from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.trajectory import ModelSpec
from moerl.models.description import read_model

LENGTHS = (7, 19, 12, 26)
AUX = 0.3
RATE = 1e-3


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("balance") / request.param
    return request.param, families.write_model(path, FAMILIES[request.param], seed=8)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("bias") / "deepseek", FAMILIES["deepseek_v3"], seed=9)


def step(
    layout: Any, path: Path, spec: ModelSpec, batches: list[list[Microbatch]], enforce: bool, options: dict[str, Any]
) -> dict[str, Any]:
    from moerl.trainer.losses import TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(**options), tiny_moe.OPTIMIZER, 8)
    local = batches[layout.data_rank]
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    loss = TextLoss(local, trainer.spec.vocab_size, denominator)
    trainer.score(local, loss, enforce=enforce)
    report = trainer.step(local, loss, enforce=enforce)
    assert report.update is not None
    return {"grad_norm": report.update.grad_norm, "weights": {name: t.clone() for name, t in trainer.export()}}


# --- load-balancing loss ---------------------------------------------------------------------------------------------


def judged_norm(name: str, path: Path, samples: list[TrainSample], *, enforce: bool) -> float:
    """Gradient norm of cross-entropy plus the Switch loss over the rows of all samples, by autograd on transformers."""
    judge = families.Judge(path, FAMILIES[name])
    losses, scores, chosen = [], [], []
    for sample in samples:
        routes = sample.trajectory.expert_ids
        logits_TV = judge.logits(sample.trajectory.token_ids[:-1], routes if enforce else None)
        targets = torch.from_numpy(sample.trajectory.token_ids[1:].astype(np.int64))
        logprobs_T = logits_TV.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        losses.append(-logprobs_T[torch.from_numpy(sample.trajectory.sampled[1:].copy())])
        logits_TLE = torch.stack(judge.router_logits, 1)
        if FAMILIES[name].scores == "sigmoid":
            scores.append(logits_TLE.sigmoid() / logits_TLE.sigmoid().sum(-1, keepdim=True))
        else:
            scores.append(logits_TLE.softmax(-1))
        chosen.append(judge.chosen())
    total = torch.cat(losses).mean()
    scores_TLE, chosen_TLK = torch.cat(scores), torch.cat(chosen)
    num_rows, num_layers, num_experts = scores_TLE.shape
    for layer in range(num_layers):
        counts_E = torch.bincount(chosen_TLK[:, layer].flatten(), minlength=num_experts)
        scale = AUX * num_experts / (chosen_TLK.shape[-1] * num_rows**2)
        total = total + scale * (counts_E * scores_TLE[:, layer].sum(0)).sum()
    total.backward()
    return float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in judge.gradients().values())))


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("enforce", [True, False], ids=["enforced", "natural"])
def test_the_load_balancing_loss_counts_the_rows_that_were_dispatched(
    enforce: bool, recompute: str, model: tuple[str, Path], one_process: Ranks
):
    name, path = model
    spec = FAMILIES[name].spec()
    samples = families.make_samples(spec, 3, LENGTHS)
    batches = tiny_moe.pack(samples, token_budget=80, multiple=16)
    assert [batch.is_pad.any() for batch in batches[0]] == [True]
    options = {"moe_aux_loss_coef": AUX, "recompute": recompute}
    (result,) = one_process.run(step, path, spec, batches, enforce, options)
    assert result["grad_norm"] == pytest.approx(judged_norm(name, path, samples, enforce=enforce), rel=1e-4)


def test_enforced_and_natural_routes_have_different_losses(model: tuple[str, Path]):
    name, path = model
    samples = families.make_samples(FAMILIES[name].spec(), 3, LENGTHS)
    norms = [judged_norm(name, path, samples, enforce=enforce) for enforce in (True, False)]
    assert abs(norms[0] - norms[1]) > 1e-3 * norms[0]


# --- bias of experts -------------------------------------------------------------------------------------------------


def biases(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensors[name] for name in sorted(tensors) if name.endswith("e_score_correction_bias")])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("number", [1, 2])
def test_the_bias_takes_one_step_towards_equal_load_of_enforced_routes(
    number: int, recompute: str, deepseek: Path, one_process: Ranks, two_processes: Ranks
):
    spec = FAMILIES["deepseek_v3"].spec()
    samples = families.make_samples(spec, 4, LENGTHS)
    batches = tiny_moe.pack(samples, num_ranks=number, token_budget=32, multiple=16)
    options = {"expert_bias": "update", "recompute": recompute}
    ranks = two_processes if number == 2 else one_process
    results = ranks.run(step, deepseek, spec, batches, True, options)
    routes = np.concatenate([sample.trajectory.expert_ids for sample in samples])
    counts_LE = torch.stack(
        [torch.from_numpy(np.bincount(routes[:, layer].ravel(), minlength=16)) for layer in range(3)]
    ).double()
    before = biases(load_file(deepseek / "model.safetensors"))
    expected = before + RATE * torch.sign(counts_LE.mean(-1, keepdim=True) - counts_LE).float()
    for result in results:
        torch.testing.assert_close(biases(result["weights"]), expected, rtol=0, atol=1e-7)


def test_a_frozen_bias_keeps_its_bits(deepseek: Path, one_process: Ranks):
    spec = FAMILIES["deepseek_v3"].spec()
    batches = tiny_moe.pack(families.make_samples(spec, 4, LENGTHS))
    (result,) = one_process.run(step, deepseek, spec, batches, True, {})
    original = load_file(deepseek / "model.safetensors")
    assert torch.equal(biases(result["weights"]), biases(original))
    assert not torch.equal(result["weights"]["model.norm.weight"], original["model.norm.weight"])


def skipped_step(layout: Any, path: Path, spec: ModelSpec, batches: list[Microbatch]) -> dict[str, torch.Tensor]:
    """A step whose gradient is not finite."""
    from moerl.trainer.losses import TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(expert_bias="update"), tiny_moe.OPTIMIZER, 8)
    loss = TextLoss(batches, trainer.spec.vocab_size, 1.0)

    def broken(hidden_tH: torch.Tensor, head: Any, microbatch: int) -> Any:
        total, rows = loss(hidden_tH, head, microbatch)
        return total * float("nan"), rows

    report = trainer.step(batches, broken, enforce=True)
    assert report.update is not None
    assert report.update.skipped
    return {name: tensor.clone() for name, tensor in trainer.export()}


def test_a_skipped_update_leaves_the_bias_alone(deepseek: Path, one_process: Ranks):
    spec = FAMILIES["deepseek_v3"].spec()
    (batches,) = tiny_moe.pack(families.make_samples(spec, 4, LENGTHS))
    (weights,) = one_process.run(skipped_step, deepseek, spec, batches)
    assert torch.equal(biases(weights), biases(load_file(deepseek / "model.safetensors")))
