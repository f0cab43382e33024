"""Replay and its proof make the host wait for the device no more often than a step without them. In a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
import torch
from ranks import Ranks
from replay_steps import make_batches

from moerl.algorithms.policy import Sequences


def waits_of_a_step(layout: Any, path: Path, enforce: bool, options: dict[str, Any]) -> tuple[Counter[str], str]:
    from pretended_device import pretended_device

    with pretended_device() as seen:
        trainer = tiny_moe.build(layout, path, **options)
        batches = make_batches(5)
        loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))
        trainer.step(batches, loss, enforce=enforce)
        seen.clear()
        report = trainer.step(batches, loss, enforce=enforce)
    assert (report.rows_verified > 0) == enforce
    return Counter(f"{each.kind} in {each.module}:{each.line}" for each in seen.synchronisations), seen.table()


@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"dtype": "bfloat16"}))],
)
def test_a_step_with_replay_and_proof_waits_as_often_as_one_without(
    options: dict[str, Any], untied: Path, one_process: Ranks
) -> None:
    ((with_proof, table),) = one_process.run(waits_of_a_step, untied, True, options)
    ((without, _),) = one_process.run(waits_of_a_step, untied, False, options)
    print(table)
    assert with_proof == without


def test_nothing_of_replay_and_losses_waits_between_the_first_router_and_the_proof(
    untied: Path, one_process: Ranks
) -> None:
    ((waits, _),) = one_process.run(waits_of_a_step, untied, True, {})
    names = ("replay", "replay_rows", "routers", "losses", "batch_checksums", "model", "balance")
    quiet = (*(f"moerl.trainer.{name}" for name in names), "moerl.kernels", "moerl.algorithms")
    found = {wait.split(" in ")[1] for wait in waits}
    assert [each for each in found if each.startswith(quiet)] == []
    # The proof, and the results of the step behind it.
    assert sum(count for wait, count in waits.items() if "moerl.trainer.transfers" in wait) == 2


def test_a_step_waits_for_no_sum_over_ranks_before_its_first_microbatch(untied: Path, one_process: Ranks) -> None:
    ((waits, table),) = one_process.run(waits_of_a_step, untied, True, {})
    print(table)
    assert [wait for wait in waits if "moerl.trainer.trainer" in wait] == []


def waits_of_the_presets(layout: Any) -> dict[str, list[str]]:
    from policy_rows import PRESETS, policy_rows, preset
    from pretended_device import DEVICE, pretended_device

    lengths = (5, 0, 9, 3)
    found: dict[str, list[str]] = {}
    with pretended_device() as seen:
        for name in PRESETS:
            generator = torch.Generator().manual_seed(1)
            proximal_T, logprobs_T, rollout_T = -torch.rand(3, sum(lengths), generator=generator)
            rows = policy_rows(logprobs_T, lengths=lengths, proximal_T=proximal_T, rollout_T=rollout_T)
            moved = {
                each.name: value.to(DEVICE)
                for each in fields(rows)
                if isinstance(value := getattr(rows, each.name), torch.Tensor)
            }
            moved["trainer_logprobs_T"] = moved["trainer_logprobs_T"].detach().requires_grad_()
            on_device = replace(rows, sequences=Sequences(rows.sequences.num_rows_N.to(DEVICE)), **moved)
            seen.clear()
            preset(name).compute_loss(on_device).loss.backward()
            found[name] = [f"{each.kind} in {each.module}:{each.line}" for each in seen.synchronisations]
            assert seen.num_operations > 10
    return found


def test_no_algorithm_waits_for_the_device(one_process: Ranks) -> None:
    (found,) = one_process.run(waits_of_the_presets)
    assert len(found) > 10
    assert {name: waits for name, waits in found.items() if waits} == {}
