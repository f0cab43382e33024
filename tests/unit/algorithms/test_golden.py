"""Losses, gradients, advantages and corrections against what other implementations compute from the same inputs.

The files are made by `scripts/golden`. Where another implementation deviates from ours, the row here says how, and ours
is compared with loops over plain numbers (`tests/plain_objectives.py`); so is every other case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_objectives import Batch, advantages, loss_and_gradient, weights
from policy_rows import LONGEST, policy_rows, preset, rewarded_batch
from torch import Tensor

from moerl.algorithms.advantages import pass_at_k_advantages
from moerl.algorithms.group_policy import GroupPolicy
from moerl.algorithms.policy import PolicyRows, SampledTokens
from moerl.trainer.losses import Drift

ROOT = Path(__file__).parents[3]
FILES: dict[str, Any] = {file.stem: json.loads(file.read_text()) for file in (ROOT / "tests" / "golden").glob("*.json")}
INTEGERS = ("groups", "alone", "versions")

Ours = tuple[str, dict[str, Any]]
"""A preset, and what is changed in it."""

OFF = {"importance": "off"}
TOKENS = {"reduction": "token_mean", "reduction_length": None}
SEQUENCES = {"reduction": "sequence_mean", "reduction_length": None}
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = CLIP | {"dual_clip": 1.5}
NARROW = {"clip_low": 0.03, "clip_high": 0.04}
WIDE = {"clip_low": 0.4, "clip_high": 0.4}
# TRL and Liger have an upper bound alone, which is the ratio itself.
ABOVE = {"clip_low": 1.0, "clip_high": 0.2}


def cut(level: str, cap: float, floor: float = 0.0) -> dict[str, Any]:
    return {"importance": level, "importance_cap": cap, "importance_floor": floor}


def dropped(level: str, cap: float, floor: float) -> dict[str, Any]:
    return cut(level, cap, floor) | {"importance_outside": "drop"}


SAME: dict[str, Ours] = {
    "liger / grpo, token mean": ("grpo", OFF | CLIP | TOKENS),
    "liger / grpo, sequence mean": ("grpo", OFF | CLIP | SEQUENCES),
    "liger / grpo, constant": ("dr_grpo", OFF),
    "liger / gspo": ("gspo", OFF | NARROW | SEQUENCES),
    "liger / cispo": ("cispo", OFF | ABOVE | TOKENS),
    "liger / sapo": ("sapo", OFF | SEQUENCES),
    "verl / loss: vanilla, token mean": ("grpo", OFF | DUAL | TOKENS),
    "verl / loss: vanilla, sequence mean": ("grpo", OFF | DUAL | SEQUENCES),
    "verl / loss: vanilla, constant": ("dr_grpo", OFF | DUAL | {"reduction_length": LONGEST}),
    # Without a constant it divides by the width that sequences are padded to, 8 here.
    "verl / loss: vanilla, padded width": ("dr_grpo", OFF | DUAL | {"reduction_length": 8}),
    "verl / loss: gspo": ("gspo", OFF | NARROW | SEQUENCES),
    "verl / loss: gspo, token mean": ("gspo", OFF | NARROW | TOKENS),
    "verl / loss: cispo": ("cispo", OFF | CLIP | TOKENS),
    "verl / loss: geo_mean": ("gmpo", OFF | WIDE | SEQUENCES),
    "verl / loss: sapo": ("sapo", OFF | SEQUENCES),
    "verl / correction: truncated, token": ("grpo", DUAL | TOKENS | cut("token", 1.3)),
    "verl / correction: truncated, sequence": ("grpo", DUAL | TOKENS | cut("sequence", 1.3)),
    "verl / correction: icepop, token": ("grpo", DUAL | TOKENS | dropped("token", 1.3, 0.8)),
    "verl / correction: icepop, sequence": ("grpo", DUAL | TOKENS | dropped("sequence", 1.5, 0.5)),
    "verl / weighted: vanilla": ("grpo", DUAL | TOKENS | cut("token", 1.3)),
    "trl / loss: grpo": ("grpo", OFF | CLIP | SEQUENCES),
    "trl / loss: bnpo": ("grpo", OFF | CLIP | TOKENS),
    "trl / loss: dr_grpo": ("dr_grpo", OFF | CLIP),
    "trl / loss: dapo": ("grpo", OFF | CLIP | TOKENS),
    "trl / loss: dapo, two-sided clip": ("grpo", OFF | DUAL | TOKENS),
    "trl / loss: dapo, off-policy mask": ("grpo", OFF | CLIP | TOKENS | {"opsm_delta": 0.05}),
    "trl / loss: gspo": ("gspo", OFF | NARROW | SEQUENCES),
    "trl / loss: gspo, token mean": ("gspo", OFF | NARROW | TOKENS),
    "trl / loss: cispo": ("cispo", OFF | ABOVE | TOKENS),
    "trl / loss: sapo": ("sapo", OFF | SEQUENCES),
    "areal / loss: ppo": ("grpo", OFF | CLIP | TOKENS),
    "areal / loss: ppo, dual clip": ("grpo", OFF | DUAL | TOKENS),
    "areal / loss: ppo, sequence": ("gspo", OFF | NARROW | TOKENS),
    "areal / loss: sapo, token": ("sapo", OFF | TOKENS),
    "areal / loss: decoupled, token clamp": ("grpo", CLIP | TOKENS | cut("token", 1.3)),
    "areal / loss: decoupled, token mask": ("grpo", CLIP | TOKENS | dropped("token", 1.3, 0.8)),
    "areal / loss: decoupled, sequence clamp": ("grpo", CLIP | TOKENS | cut("geometric", 1.1, 0.9)),
    "areal / loss: decoupled, sequence mask": ("grpo", CLIP | TOKENS | dropped("geometric", 1.1, 0.9)),
    "areal / loss: decoupled, dual clip": ("grpo", DUAL | TOKENS | cut("token", 1.3)),
    "areal / loss: decoupled, sequence and clamp": ("gspo", NARROW | TOKENS | cut("token", 1.3)),
}
DEVIATIONS: dict[str, tuple[Ours, str]] = {
    "verl / correction: rejected, geometric": (
        ("grpo", OFF | DUAL | TOKENS | {"sequence_band": 0.1}),
        "divides by the tokens that it keeps",
    ),
    "verl / correction: truncated and rejected": (
        ("grpo", DUAL | TOKENS | cut("token", 1.3) | {"sequence_band": 0.1}),
        "divides by the tokens that it keeps",
    ),
    "verl / weighted: gspo": (
        ("gspo", NARROW | SEQUENCES | cut("token", 1.3)),
        "in its stop-gradient form each token's gradient has the token's own weight; ours has the mean of the response",
    ),
    "verl / weighted: geo_mean": (
        ("gmpo", WIDE | SEQUENCES | cut("token", 1.3)),
        "takes the geometric mean of the weights of a response; ours the arithmetic",
    ),
    "areal / loss: decoupled, sequence and mask": (
        ("gspo", NARROW | TOKENS | dropped("token", 1.3, 0.8)),
        "takes the ratio of a response over the tokens that it keeps",
    ),
}
ADVANTAGES: dict[str, Ours] = {
    "verl / advantages: grpo": ("grpo", {"normalize_std": True}),
    "verl / advantages: grpo, no deviation": ("dr_grpo", {}),
    "verl / advantages: rloo": ("rloo", {}),
}
ADVANTAGE_DEVIATIONS: dict[str, tuple[Ours, str]] = {
    "verl / advantages: grpo, groups of one": (("grpo", {"normalize_std": True}), "a group of one gets its reward"),
    "verl / advantages: rloo, groups of one": (("rloo", {}), "a group of one gets its reward"),
    "verl / advantages: reinforce_plus_plus": (("reinforce_plus_plus", {}), "std over n - 1 tokens, ours n"),
    "verl / advantages: reinforce_plus_plus_baseline": (
        ("reinforce_plus_plus_baseline", {}),
        "std over n - 1 tokens, ours n",
    ),
}
OTHERS = {
    "verl": {"clip_cov", "kl_cov", "dppo", "grpo_passk", "rejected, token", "rejected, sequence", "k3"},
    "trl": {"vespo", "get_"},
    "areal": {"sapo, sequence", "k2 mask", "m2po", "proximal"},
}
"""Cases with these in their names have a test of their own below, or nothing of ours to be compared with."""


def expected(case: str) -> dict[str, Any]:
    package, _, name = case.partition(" / ")
    return FILES[package]["cases"][name]


def inputs(case: str) -> dict[str, Tensor]:
    stored = FILES[case.partition(" / ")[0]]["inputs"]
    return {
        name: torch.tensor(values, dtype=torch.int64 if name in INTEGERS else torch.float64)
        for name, values in stored.items()
    }


def rows_of(case: str) -> PolicyRows:
    found = inputs(case)
    num_sequences, length = found["trainer"].shape
    return policy_rows(
        found["trainer"].flatten().requires_grad_(),
        lengths=[length] * num_sequences,
        proximal_T=found["proximal"].flatten(),
        rollout_T=found["rollout"].flatten(),
        advantages_T=found["advantages"].repeat_interleave(length),
        mask_T=found["mask"].flatten().bool(),
    )


def plain_batch(case: str) -> Batch:
    found = {name: values.numpy() for name, values in inputs(case).items()}
    return Batch(**{name: found[name] for name in ("trainer", "proximal", "rollout", "mask", "advantages")})


def ours(case: str) -> tuple[GroupPolicy, float, Tensor]:
    """The algorithm, its loss, and the gradient [T]."""
    (name, changes), rows = {**SAME, **{key: row for key, (row, _) in DEVIATIONS.items()}}[case], rows_of(case)
    algorithm = preset(name, **changes)
    loss = algorithm.compute_loss(rows).loss
    return algorithm, float(loss.detach()), torch.autograd.grad(loss, rows.trainer_logprobs_T)[0]


def tolerance(case: str, name: str) -> float:
    """AReaL has weights of float32, and TRL's temperatures are; all else differs in the last digits of float64."""
    in_single = (name == "sapo" and case.startswith("trl")) or case.startswith("areal / loss: decoupled")
    return 2e-7 if in_single else 1e-14


def our_advantages(case: str, row: Ours) -> tuple[GroupPolicy, list[float], dict[str, Tensor]]:
    found, algorithm = inputs(case), preset(row[0], **row[1])
    groups = found["alone" if "groups of one" in case else "groups"]
    batch = rewarded_batch(found["rewards"].tolist(), groups.tolist(), found["mask"].sum(1).long().tolist())
    return algorithm, algorithm.compute_advantages(batch).tolist(), found


@pytest.mark.parametrize("case", SAME)
def test_losses_and_gradients_are_the_same_elsewhere(case: str) -> None:
    algorithm, loss, gradient_T = ours(case)
    theirs, limit = expected(case), tolerance(case, algorithm.name)
    theirs_T = torch.tensor(theirs["gradient"], dtype=torch.float64).flatten()
    assert loss == pytest.approx(theirs["loss"], rel=0.0, abs=limit)
    torch.testing.assert_close(gradient_T, theirs_T, rtol=0.0, atol=limit)
    assert bool((theirs_T != 0.0).any())


@pytest.mark.parametrize("case", [*SAME, *DEVIATIONS])
def test_losses_and_gradients_are_those_of_loops(case: str) -> None:
    algorithm, loss, gradient_T = ours(case)
    plain_loss, plain_gradient = loss_and_gradient(plain_batch(case), algorithm)
    limit = tolerance("", algorithm.name)
    assert loss == pytest.approx(plain_loss, rel=0.0, abs=limit)
    np.testing.assert_allclose(gradient_T.numpy(), plain_gradient.flatten(), rtol=0.0, atol=limit)


@pytest.mark.parametrize("case", DEVIATIONS)
def test_a_deviation_is_still_one(case: str) -> None:
    _, loss, gradient_T = ours(case)
    theirs_T = torch.tensor(expected(case)["gradient"], dtype=torch.float64).flatten()
    assert abs(loss - expected(case)["loss"]) > 1e-3 or float((gradient_T - theirs_T).abs().max()) > 1e-3


@pytest.mark.parametrize("case", [case for case, (_, why) in DEVIATIONS.items() if why.startswith("divides")])
def test_with_the_denominator_of_verl_rejected_tokens_leave_the_same_loss(case: str) -> None:
    _, loss, gradient_T = ours(case)
    theirs, mask_NT = expected(case), inputs(case)["mask"]
    more = float(mask_NT.sum()) / sum(map(sum, theirs["mask"]))
    assert more > 1.0
    assert loss * more == pytest.approx(theirs["loss"], rel=1e-12)
    theirs_T = torch.tensor(theirs["gradient"], dtype=torch.float64).flatten()
    torch.testing.assert_close(gradient_T * more, theirs_T, rtol=1e-12, atol=1e-15)


CORRECTED = [case for case in (*SAME, *DEVIATIONS) if {"weights", "mask"} & set(expected(case))]


@pytest.mark.parametrize("case", CORRECTED)
def test_weights_and_masks_are_the_same_elsewhere(case: str) -> None:
    algorithm, _, _ = ours(case)
    theirs, trained_NT = expected(case), inputs(case)["mask"]
    found_NT = algorithm.weights(rows_of(case)).reshape(trained_NT.shape) * trained_NT
    weights_NT = torch.tensor(theirs.get("weights", trained_NT.tolist()), dtype=torch.float64)
    expected_NT = weights_NT * torch.tensor(theirs.get("mask", 1.0))
    torch.testing.assert_close(found_NT, expected_NT, rtol=0.0, atol=tolerance(case, algorithm.name))
    np.testing.assert_allclose(found_NT.numpy(), weights(plain_batch(case), algorithm), rtol=0.0, atol=1e-14)
    assert len(found_NT.unique()) > 1


def test_the_off_policy_mask_is_that_of_trl() -> None:
    case = "trl / get_off_policy_mask"
    mask_NT = inputs(case)["mask"]
    found_NT = preset("grpo", **OFF, opsm_delta=0.05).weights(rows_of(case)).reshape(mask_NT.shape)
    assert found_NT[:, 0].long().tolist() == expected(case)["mask"]
    assert set(expected(case)["mask"]) == {0, 1}


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_are_the_same_elsewhere(case: str) -> None:
    _, found, _ = our_advantages(case, ADVANTAGES[case])
    assert found == pytest.approx(expected(case)["advantages"], rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("case", [*ADVANTAGES, *ADVANTAGE_DEVIATIONS])
def test_advantages_are_those_of_loops(case: str) -> None:
    row = ADVANTAGES[case] if case in ADVANTAGES else ADVANTAGE_DEVIATIONS[case][0]
    algorithm, found, given = our_advantages(case, row)
    groups = given["alone" if "groups of one" in case else "groups"].tolist()
    num_tokens = [int(count) for count in given["mask"].sum(1)]
    plain = advantages(given["rewards"].numpy(), groups, num_tokens, algorithm)
    assert found == pytest.approx(plain, rel=1e-7, abs=1e-7)
    if case in ADVANTAGE_DEVIATIONS:
        assert found != pytest.approx(expected(case)["advantages"], abs=1e-3)


def gradient_of(case: str, algorithm: GroupPolicy, rows: PolicyRows) -> tuple[float, Tensor, Tensor]:
    """Our loss, our gradient and theirs."""
    tokens = SampledTokens(rows.advantages_T[rows.loss_mask_T], rows.rollout_logprobs_T[rows.loss_mask_T])
    rows = replace(rows, totals=replace(rows.totals, facts=algorithm.batch_facts(tokens)))
    loss = algorithm.compute_loss(rows).loss
    theirs_T = torch.tensor(expected(case)["gradient"], dtype=torch.float64).flatten()
    return float(loss.detach()), torch.autograd.grad(loss, rows.trainer_logprobs_T)[0], theirs_T


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("clip_cov", CLIP | {"cov_share": 0.9, "cov_low": 0.1, "cov_high": 0.8}),
        ("kl_cov", {"cov_share": 0.2, "cov_coef": 0.7}),
    ],
)
def test_covariances_choose_the_tokens_that_verl_chooses(case: str, changes: dict[str, Any]) -> None:
    """Takes the trainer's log-probs for the sampler's, as verl does. In clip_cov every eligible token is left out."""
    rows = rows_of(f"verl / loss: {case}")
    rows = replace(rows, rollout_logprobs_T=rows.trainer_logprobs_T.detach())
    algorithm = preset(case, **OFF, **TOKENS, **changes)
    loss, gradient_T, theirs_T = gradient_of(f"verl / loss: {case}", algorithm, rows)
    assert loss == pytest.approx(expected(f"verl / loss: {case}")["loss"], rel=0.0, abs=1e-14)
    torch.testing.assert_close(gradient_T, theirs_T, rtol=0.0, atol=1e-14)
    _, without_T, _ = gradient_of("verl / loss: kl_cov", preset("grpo", **OFF, **TOKENS, **CLIP), rows)
    assert bool((without_T != gradient_T).any())


@pytest.mark.parametrize(
    ("case", "divergence", "low", "high", "cap"),
    [
        ("dppo_tv", "tv", 0.05, 0.08, 1.5),
        ("dppo_kl", "kl", 0.01, 0.02, 1.5),
        ("dppo_tv, no truncation", "tv", 0.05, 0.08, 20.0),
    ],
)
def test_dppo_leaves_the_gradient_of_verl(case: str, divergence: str, low: float, high: float, cap: float) -> None:
    """Whose loss is another with the same gradient, and which cuts the ratio itself, where we cut w alone."""
    rows = rows_of(f"verl / loss: {case}")
    rows = replace(rows, rollout_logprobs_T=rows.proximal_logprobs_T)
    settings = {"divergence": divergence, "divergence_low": low, "divergence_high": high}
    _, gradient_T, theirs_T = gradient_of(f"verl / loss: {case}", preset("dppo", **OFF, **TOKENS, **settings), rows)
    cut_T = (rows.trainer_logprobs_T.detach() - rows.proximal_logprobs_T).exp() > cap
    torch.testing.assert_close(gradient_T[~cut_T], theirs_T[~cut_T], rtol=0.0, atol=1e-14)
    left_out_T = (gradient_T == 0.0) & rows.loss_mask_T
    assert 2 < int(left_out_T.sum()) < int(rows.loss_mask_T.sum())


def test_pass_at_k_of_a_whole_group_is_that_of_verl() -> None:
    case = "verl / advantages: grpo_passk, no deviation"
    found = inputs(case)
    ours_B = pass_at_k_advantages(found["rewards"], found["groups"], k=len(found["rewards"]))
    assert ours_B.tolist() == pytest.approx(expected(case)["advantages"], rel=1e-6, abs=1e-6)


def test_proximal_log_probs_are_interpolated_as_by_areal() -> None:
    """It knows updates by versions alone, one to a batch; tokens of the version after the batch there are none."""
    case = "areal / proximal: loglinear"
    found = inputs(case)
    drift = Drift(version=4, updates_per_version=1, since=1)
    ours_NT = drift.proximal(found["trainer"], found["rollout"], found["versions"])
    theirs_NT = torch.tensor(expected(case)["logprobs"], dtype=torch.float64)
    known_NT = (found["versions"] <= 4) & found["mask"].bool()
    # Its shares are of float32.
    torch.testing.assert_close(ours_NT[known_NT], theirs_NT[known_NT], rtol=0.0, atol=1e-6)
    assert int(known_NT.sum()) > 20


def test_every_stored_case_is_of_a_table() -> None:
    compared = {*SAME, *DEVIATIONS, *ADVANTAGES, *ADVANTAGE_DEVIATIONS}
    stored = {f"{package} / {name}" for package, file in FILES.items() for name in file["cases"]}
    assert compared <= stored
    rest = {case for case in stored - compared if not any(part in case for part in OTHERS[case.partition(" / ")[0]])}
    assert not rest


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(FILES))
def test_the_vectors_are_made_again(package: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.golden", package, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(f"no network, or no such package: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
