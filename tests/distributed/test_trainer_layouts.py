"""Tensor- and expert-parallel trainers are the one-process trainer, cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks
from safetensors.numpy import load_file

from moerl.contract.batch import Microbatch
from moerl.errors import MoerlError, ReplayError

LENGTHS = (5, 30, 17, 41, 9, 24)
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
layouts = pytest.mark.parametrize(("tensor", "expert"), LAYOUTS, ids=["TP2", "EP2", "TP2-EP2"])


def mine(where: Any, batches: list[list[Microbatch]]) -> list[Microbatch]:
    """This rank's microbatches of those packed for two data-parallel ranks; all of them where there is one rank."""
    return batches[where.data_rank] if where.data == 2 else [batch for part in batches for batch in part]


# --- scores and export -----------------------------------------------------------------------------------------------


def score(where: Any, path: Path, batches: list[list[Microbatch]]) -> dict[str, Any]:
    from moerl.trainer.losses import Scorer

    assert (where.tensor * where.data, where.rank == 0) == (where.world_size, where.is_main)
    trainer = tiny_moe.build(where, path, optimizer=None)
    local = mine(where, batches)
    natural = trainer.score(local, Scorer(local, trainer.shard, keep_mask=False), enforce=False)
    enforced = trainer.score(local, Scorer(local, trainer.shard, keep_mask=True, with_full=True), enforce=True)
    differing = [row.layers_differing_T.numpy() for row in enforced]
    return {
        "natural": tiny_moe.by_sample(local, [row.logprobs_T.numpy() for row in natural]),
        "enforced": tiny_moe.by_sample(local, [row.logprobs_T.numpy() for row in enforced]),
        "differing": tiny_moe.by_sample(local, differing),
        "weights": tiny_moe.exported(trainer),
    }


@layouts
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_every_layout_agrees_with_transformers_and_exports_what_it_loaded(
    model: str, tensor: int, expert: int, two_processes: Ranks, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    samples = tiny_moe.make_samples(61, LENGTHS)
    ranks = two_processes.run(score, path, tiny_moe.pack(samples, num_ranks=2), tensor=tensor, expert=expert)
    judge = tiny_moe.Judge(path)
    seen = set()
    for result in ranks:
        for index, logprobs_T in result["natural"].items():
            sample = samples[index]
            rows = sample.trajectory.sampled[1:]
            with torch.no_grad():
                natural_TV = judge.logits(sample.trajectory.token_ids[:-1])
                forced_TV = judge.logits(sample.trajectory.token_ids[:-1], sample.trajectory.expert_ids)
            natural = tiny_moe.support_logprobs(natural_TV, sample, keep_mask=False)
            expected_T = tiny_moe.target_logprobs(natural, sample).numpy()
            np.testing.assert_allclose(logprobs_T[rows], expected_T[rows], rtol=0, atol=1e-5)
            expected_T = tiny_moe.target_logprobs(tiny_moe.support_logprobs(forced_TV, sample), sample).numpy()
            np.testing.assert_allclose(result["enforced"][index][rows], expected_T[rows], rtol=0, atol=1e-5)
            assert result["differing"][index].mean() > 1.0
            seen.add(index)
    assert seen == set(range(len(samples)))
    original = load_file(path / "model.safetensors")
    for result in ranks:
        assert result["weights"].keys() == original.keys()
        for name, weights in original.items():
            np.testing.assert_array_equal(result["weights"][name], weights, err_msg=name)


# --- training --------------------------------------------------------------------------------------------------------

AUX = 0.05


def train(where: Any, path: Path, aux: float, recompute: str) -> dict[str, Any]:
    """Three steps with Keep Routing, a forward-only pass between them, and a checkpoint after the first."""
    from moerl.trainer import layout
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(where, path, moe_aux_loss_coef=aux, recompute=recompute)
    losses, norms, differing, verified = [], [], 0, 0
    for seed in (71, 72, 73):
        batches = tiny_moe.pack(tiny_moe.make_samples(seed, LENGTHS), num_ranks=2)
        denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
        local = mine(where, batches)
        trainer.score(local, Scorer(local, trainer.shard, keep_mask=True), enforce=True)
        report = trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
        loss = torch.tensor([sum(float(row.losses_T.sum()) for row in report.rows)], dtype=torch.float64)
        torch.distributed.all_reduce(loss, group=layout.data_group())
        losses.append(loss.item() / denominator)
        norms.append(report.update.grad_norm)
        differing += sum(int(row.layers_differing_T.sum()) for row in report.rows)
        verified += report.rows_verified
        load = report.expert_load_LE.numpy()
    return {
        "losses": losses,
        "norms": norms,
        "weights": tiny_moe.exported(trainer),
        "differing": differing,
        "verified": verified,
        "load": load,
    }


@layouts
@pytest.mark.parametrize(("aux", "recompute"), [(0.0, "none"), (AUX, "full")], ids=["plain", "aux-recompute"])
def test_steps_of_every_layout_equal_those_of_one_process(
    aux: float, recompute: str, tensor: int, expert: int, untied: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    (expected,) = one_process.run(train, untied, aux, "none")
    ranks = two_processes.run(train, untied, aux, recompute, tensor=tensor, expert=expert)
    phases = 1 if recompute == "none" else 2
    for result in ranks:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
        assert tiny_moe.largest_difference(result["weights"], expected["weights"]) < 1e-5
    # Data-parallel ranks see different rows, tensor-parallel ranks the same.
    replicas = tensor
    assert sum(result["differing"] for result in ranks) == expected["differing"] * replicas
    assert sum(result["verified"] for result in ranks) == expected["verified"] * replicas * phases
    np.testing.assert_array_equal(sum(result["load"] for result in ranks), expected["load"])


# --- refusals --------------------------------------------------------------------------------------------------------


def refuse_one_rank(where: Any, path: Path, kind: str) -> str:
    """One rank alone has something wrong: all must refuse, and go on as if nothing had been."""
    from dataclasses import replace

    trainer, plain = (tiny_moe.build(where, path) for _ in range(2))
    before = tiny_moe.exported(trainer)
    batches = tiny_moe.pack(tiny_moe.make_samples(81, LENGTHS), num_ranks=2)
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    local = mine(where, batches)
    if where.rank == 1:
        expert_ids = local[0].expert_ids
        assert expert_ids is not None
        changed = {
            "shift": {"expert_ids": np.roll(expert_ids, 1, axis=0)},
            "drop": {"expert_ids": expert_ids[3:]},
            "none": {"expert_ids": None},
            "nan": {"advantages": np.full(len(expert_ids), np.nan, np.float32)},
        }[kind]
        local = [replace(local[0], **changed), *local[1:]]
    with pytest.raises(MoerlError if kind == "nan" else ReplayError) as caught:
        trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), before) == 0.0
    local = mine(where, batches)
    for each in (trainer, plain):
        each.step(local, tiny_moe.policy_loss(each, local, denominator), enforce=True)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), tiny_moe.exported(plain)) == 0.0
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "expert", "kind", "messages"),
    [
        (1, 2, "shift", ("on another rank", "rank 1, microbatch 0, forward: checksum")),
        (2, 1, "shift", ("rank 0, microbatch 0, forward: checksum", "rank 1, microbatch 0, forward: checksum")),
        (1, 2, "drop", ("on another rank", "do not match its input rows")),
        (2, 1, "drop", ("on another rank", "do not match its input rows")),
        (1, 2, "none", ("on another rank", "without recorded routing")),
        (1, 2, "nan", ("the gradient is not finite", "the gradient is not finite")),
    ],
)
def test_what_one_rank_refuses_every_rank_refuses(
    tensor: int, expert: int, kind: str, messages: tuple[str, str], untied: Path, two_processes: Ranks
) -> None:
    refusals = two_processes.run(refuse_one_rank, untied, kind, tensor=tensor, expert=expert)
    for refusal, message in zip(refusals, messages, strict=True):
        assert message in refusal
