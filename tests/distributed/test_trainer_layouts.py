"""Trainers of two processes are the one-process trainer, cut up; transformers is the judge of their scores."""

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
from moerl.errors import ReplayError

LENGTHS = (5, 30, 17, 41, 9, 24)
LAYOUTS = {
    "TP2": {"tensor": 2},
    "EP2": {"expert": 2},
    "TP2-EP2": {"tensor": 2, "expert": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
}
SLOW = (pytest.mark.slow,)


def pack(seed: int) -> list[list[Microbatch]]:
    """Microbatches for two data-parallel ranks, padded so that any layout of two ranks can cut them."""
    return tiny_moe.pack(tiny_moe.make_samples(seed, LENGTHS), num_ranks=2, sequence=4)


def flat(ranks: list[list[Microbatch]], layout: str) -> list[list[Microbatch]]:
    """All microbatches for the one data-parallel rank of a layout that has no other."""
    return ranks if layout == "EP2" else [[batch for part in ranks for batch in part]]


# --- options of the model --------------------------------------------------------------------------------------------


def train_without_routers(layout: Any, path: Path) -> tuple[dict[str, float], bool]:
    trainer = tiny_moe.build(layout, path, train_router=False, deterministic=True)
    before = tiny_moe.exported(trainer)
    local, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(91, LENGTHS))
    trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
    after = tiny_moe.exported(trainer)
    moved = {name: float(np.abs(after[name] - tensor).max()) for name, tensor in before.items()}
    return moved, trainer.model.chunks[0].config.deterministic_mode


@pytest.mark.parametrize("tensor", [1, 2])
def test_frozen_routers_stay_and_everything_else_moves(
    tensor: int, untied: Path, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue("one_process" if tensor == 1 else "two_processes")
    for moved, deterministic in ranks.run(train_without_routers, untied, tensor=tensor):
        assert deterministic
        routers = {name for name in moved if name.endswith("mlp.gate.weight")}
        assert len(routers) == tiny_moe.SPEC.num_moe_layers
        assert {name for name, change in moved.items() if change == 0} == routers


# --- scores and export -----------------------------------------------------------------------------------------------


def score(layout: Any, path: Path, ranks: list[list[Microbatch]]) -> dict[str, Any]:
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(layout, path, optimizer=None)
    local = tiny_moe.mine(trainer, ranks)
    natural = trainer.score(local, Scorer(local, keep_mask=False), enforce=False)
    enforced = trainer.score(local, Scorer(local, keep_mask=True, with_full=True), enforce=True)
    return {
        "natural": tiny_moe.row_table(trainer, local, [row.logprobs_T for row in natural]),
        "enforced": tiny_moe.row_table(trainer, local, [row.logprobs_T for row in enforced]),
        "differing": tiny_moe.row_table(trainer, local, [row.layers_differing_T for row in enforced]),
        "weights": tiny_moe.exported(trainer),
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(pytest.param("untied", layout, marks=() if layout in ("TP2", "EP2") else SLOW) for layout in LAYOUTS),
        *(pytest.param("tied", layout, marks=[pytest.mark.slow] * (layout != "PP2")) for layout in LAYOUTS),
    ],
)
def test_every_layout_agrees_with_transformers_and_exports_what_it_loaded(
    model: str, layout: str, two_processes: Ranks, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    samples = tiny_moe.make_samples(61, LENGTHS)
    ranks = two_processes.run(score, path, flat(pack(61), layout), **LAYOUTS[layout])
    natural, enforced, differing = (
        tiny_moe.gathered([result[name] for result in ranks]) for name in ("natural", "enforced", "differing")
    )
    judge = tiny_moe.Judge(path)
    for index, sample in enumerate(samples):
        rows = sample.trajectory.sampled[1:]
        with torch.no_grad():
            natural_TV = judge.logits(sample.trajectory.token_ids[:-1])
            forced_TV = judge.logits(sample.trajectory.token_ids[:-1], sample.trajectory.expert_ids)
        open_TV = tiny_moe.support_logprobs(natural_TV, sample, keep_mask=False)
        expected_T = tiny_moe.target_logprobs(open_TV, sample).numpy()
        np.testing.assert_allclose(natural[index][rows], expected_T[rows], rtol=0, atol=1e-5)
        expected_T = tiny_moe.target_logprobs(tiny_moe.support_logprobs(forced_TV, sample), sample).numpy()
        np.testing.assert_allclose(enforced[index][rows], expected_T[rows], rtol=0, atol=1e-5)
        assert differing[index].mean() > 1.0
    assert enforced.keys() == set(range(len(samples)))
    original = load_file(path / "model.safetensors")
    for result in ranks:
        assert result["weights"].keys() == original.keys()
        for name, weights in original.items():
            np.testing.assert_array_equal(result["weights"][name], weights, err_msg=name)


# --- training --------------------------------------------------------------------------------------------------------

AUX = 0.05


def train(layout: Any, path: Path, steps: list[Any], aux: float, recompute: str) -> dict[str, Any]:
    """Steps with Keep Routing, a forward-only pass before each."""
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(layout, path, moe_aux_loss_coef=aux, recompute=recompute)
    losses, norms, differing, verified = [], [], 0, 0
    load = np.zeros(0)
    for ranks in steps:
        denominator = tiny_moe.num_trained([batch for part in ranks for batch in part])
        local = tiny_moe.mine(trainer, ranks)
        trainer.score(local, Scorer(local, keep_mask=True), enforce=True)
        report = trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
        rows = report.rows if tiny_moe.speaks(trainer) else []
        losses.append(sum(float(row.losses_T.double().sum()) for row in rows) / denominator)
        norms.append(report.update.grad_norm)
        differing += sum(int(row.layers_differing_T.sum()) for row in rows)
        verified += report.rows_verified
        load = report.expert_load_LE.numpy()
    return {
        "losses": np.array(losses),
        "norms": norms,
        "weights": tiny_moe.exported(trainer),
        "differing": differing,
        "verified": verified,
        "load": load,
    }


@pytest.mark.parametrize(
    ("aux", "recompute", "layout"),
    [
        *(
            pytest.param(0.0, "none", layout, id=f"plain-{layout}", marks=() if layout in ("PP2", "EP2") else SLOW)
            for layout in LAYOUTS
        ),
        *(
            pytest.param(
                AUX, "full", layout, id=f"aux-recompute-{layout}", marks=() if layout in ("TP2-EP2", "CP2") else SLOW
            )
            for layout in LAYOUTS
        ),
    ],
)
def test_steps_of_every_layout_equal_those_of_one_process(
    aux: float, recompute: str, layout: str, untied: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    steps = [flat(pack(seed), layout) for seed in (71, 72, 73)]
    (expected,) = one_process.run(train, untied, steps, aux, "none")
    ranks = two_processes.run(train, untied, steps, aux, recompute, **LAYOUTS[layout])
    phases = 1 if recompute == "none" else 2
    np.testing.assert_allclose(sum(result["losses"] for result in ranks), expected["losses"], rtol=0, atol=1e-5)
    for result in ranks:
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
        assert tiny_moe.largest_difference(result["weights"], expected["weights"]) < 1e-5
    assert sum(result["differing"] for result in ranks) == expected["differing"] > 0
    assert sum(result["verified"] for result in ranks) == expected["verified"] * phases > 0
    np.testing.assert_array_equal(sum(result["load"] for result in ranks), expected["load"])


# --- refusals --------------------------------------------------------------------------------------------------------


def spoil(batch: Microbatch, kind: str) -> Microbatch:
    from dataclasses import replace

    expert_ids = batch.expert_ids
    assert expert_ids is not None
    changes: dict[str, Any] = {
        "shift": {"expert_ids": np.roll(expert_ids, 1, axis=0)},
        "drop": {"expert_ids": expert_ids[3:]},
        "none": {"expert_ids": None},
        "nan": {"advantages": np.full(batch.num_rows, np.nan, np.float32)},
    }
    return replace(batch, **changes[kind])


def spoil_one_rank(layout: Any, path: Path, ranks: list[list[Microbatch]], kind: str) -> str:
    """One rank alone has something wrong: none may update, and all go on as if nothing had been."""
    trainer, plain = (tiny_moe.build(layout, path) for _ in range(2))
    before = tiny_moe.exported(trainer)
    denominator = tiny_moe.num_trained([batch for part in ranks for batch in part])
    local = tiny_moe.mine(trainer, ranks)
    wrong = [spoil(local[0], kind), *local[1:]] if layout.rank == 1 else local
    loss = tiny_moe.policy_loss(trainer, wrong, denominator)
    if kind == "nan":
        update = trainer.step(wrong, loss, enforce=True).update
        message = f"skipped {update.skipped_in_a_row}" if update.skipped else "applied"
    else:
        with pytest.raises(ReplayError) as caught:
            trainer.step(wrong, loss, enforce=True)
        message = str(caught.value)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), before) == 0.0
    for each in (trainer, plain):
        each.step(local, tiny_moe.policy_loss(each, local, denominator), enforce=True)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), tiny_moe.exported(plain)) == 0.0
    return message


@pytest.mark.parametrize(
    ("layout", "kind", "messages"),
    [
        ("EP2", "shift", ("on another rank", "rank 1, microbatch 0, forward: checksum")),
        pytest.param(
            "TP2",
            "shift",
            ("rank 0, microbatch 0, forward: checksum", "rank 1, microbatch 0, forward: checksum"),
            marks=SLOW,
        ),
        pytest.param(
            "CP2",
            "shift",
            ("rank 0, microbatch 0, forward: checksum", "rank 1, microbatch 0, forward: checksum"),
            marks=SLOW,
        ),
        pytest.param(
            "PP2", "shift", ("on another rank", "layer 3, rank 1, microbatch 0, forward: checksum"), marks=SLOW
        ),
        pytest.param("EP2", "drop", ("on another rank", "do not match its input rows"), marks=SLOW),
        pytest.param("TP2", "drop", ("on another rank", "do not match its input rows"), marks=SLOW),
        pytest.param("PP2", "drop", ("on another rank", "do not match its input rows"), marks=SLOW),
        ("EP2", "none", ("on another rank", "without recorded routing")),
        pytest.param("EP2", "nan", ("skipped 1", "skipped 1"), marks=SLOW),
        ("PP2", "nan", ("skipped 1", "skipped 1")),
    ],
)
def test_what_one_rank_has_wrong_keeps_every_rank_from_updating(
    layout: str, kind: str, messages: tuple[str, str], untied: Path, two_processes: Ranks
) -> None:
    found = two_processes.run(spoil_one_rank, untied, flat(pack(81), layout), kind, **LAYOUTS[layout])
    for text, message in zip(found, messages, strict=True):
        assert message in text
