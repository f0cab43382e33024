"""Whose routing a step keeps, when that is proved, what natural routing says beside it, and why a proof failed: in
layouts as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks

from moerl.contract.batch import Microbatch
from moerl.contract.trainer import Traced
from moerl.errors import ReplayError, UnprovedError
from moerl.orchestration.replay_report import explained
from moerl.ranks.away import first_error

LENGTHS = (5, 30, 17, 41, 9, 24)
UNCAPTURED = 0.25
TP, PP, CP = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
LAYOUTS = pytest.mark.parametrize(
    ("sizes", "recompute"),
    [
        pytest.param(TP, "none", id="TP2", marks=pytest.mark.slow),
        pytest.param(PP, "none", id="PP2", marks=pytest.mark.slow),
        pytest.param(CP, "none", id="CP2", marks=pytest.mark.slow),
        pytest.param({}, "full", id="DP2-full", marks=pytest.mark.slow),
        pytest.param(TP, "full", id="TP2-full", marks=pytest.mark.slow),
        pytest.param(PP, "full", id="PP2-full"),
        pytest.param({}, "selective", id="DP2-selective", marks=pytest.mark.slow),
    ],
)


def make_samples(seed: int) -> list[Any]:
    return tiny_moe.make_samples(seed, LENGTHS, uncaptured=UNCAPTURED)


def record_scores(trainer: Any) -> list[dict[str, Any]]:
    """Records what every router ranks in its forward calls, with the rows that it ranks, by a spy between hook and
    schedule. Returns the list of records."""
    from moerl.trainer.replay import FORWARD, ReplaySchedule

    seen: list[dict[str, Any]] = []
    original = ReplaySchedule._compare

    def compare(self: Any, hook: Any, rows: Any, scores_tE: Any, own_tK: Any, target_tK: Any) -> None:
        if self.owner is trainer.keep_routing and hook.active[1] == FORWARD:
            seen.append(
                {
                    "layer": hook.moe_layer,
                    "scores": scores_tE.numpy().copy(),
                    "recorded": target_tK.numpy().copy(),
                    "counted": rows.proved_t.numpy().copy(),
                    "live": int((~rows.routed_t & rows.of_map.real_T).sum()),
                }
            )
        original(self, hook, rows, scores_tE, own_tK, target_tK)

    ReplaySchedule._compare = compare
    return seen


# --- natural routing -------------------------------------------------------------------------------------------------


def observe(layout: Any, path: Path, recompute: str) -> dict[str, Any]:
    from moerl.trainer.replay import ReplaySchedule

    trainer = tiny_moe.build(layout, path, recompute=recompute)
    batches, denominator = tiny_moe.shares(trainer, make_samples(31), uncaptured="live")
    original = ReplaySchedule._compare
    seen = record_scores(trainer)
    try:
        report = trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
    finally:
        ReplaySchedule._compare = original
    return {"natural": report.agreement_LS.numpy(), "live": report.live_rows_L.numpy(), "seen": seen}


def brute_force(seen: list[dict[str, Any]]) -> np.ndarray:
    """float64 [L, 5] from logits, row by row."""
    sums = np.zeros((tiny_moe.SPEC.num_moe_layers, 5))
    k = tiny_moe.SPEC.experts_per_token
    for call in seen:
        for scores_E, recorded_K, counted in zip(call["scores"], call["recorded"], call["counted"], strict=True):
            if counted:
                order = np.argsort(-scores_E, kind="stable")
                natural, recorded = set(order[:k].tolist()), set(recorded_K.tolist())
                margin, flips = float(scores_E[order[k - 1]] - scores_E[order[k]]), natural != recorded
                jaccard = len(natural & recorded) / len(natural | recorded)
                sums[call["layer"]] += [1, flips, jaccard, margin * flips, margin * (not flips)]
    return sums


@LAYOUTS
def test_natural_statistics_are_a_brute_force_over_logits_and_those_of_one_process(
    sizes: dict[str, int], recompute: str, untied: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    (alone,) = one_process.run(observe, untied, "none")
    ranks = two_processes.run(observe, untied, recompute, **sizes)
    for results in ([alone], ranks):
        natural = np.sum([result["natural"] for result in results], axis=0)
        np.testing.assert_allclose(natural, brute_force([c for r in results for c in r["seen"]]), rtol=1e-5)
        np.testing.assert_allclose(natural, alone["natural"], rtol=1e-4)
    rows = [sample.trajectory.routed for sample in make_samples(31)]
    routed, live = int(sum(r.sum() for r in rows)), int(sum((~r).sum() for r in rows))
    assert alone["natural"][:, 0].tolist() == [routed] * 4
    assert 0 < alone["natural"][:, 1].sum() < 4 * routed
    assert np.sum([result["live"] for result in ranks], axis=0).tolist() == alone["live"].tolist() == [live] * 4


# --- the trainer's own routing ---------------------------------------------------------------------------------------


def keep_own(layout: Any, path: Path, other: Path, recompute: str) -> dict[str, Any]:
    """Records with the weights of one model and enforces in another, which would have chosen otherwise."""
    from moerl.trainer.losses import Scorer

    first, second = (tiny_moe.build(layout, each, recompute=recompute) for each in (path, other))
    batches, denominator = tiny_moe.shares(first, make_samples(32), uncaptured="live")
    natural = first.score(batches, Scorer(batches, keep_mask=True), enforce=False)
    report, recorded = first.score_and_record(batches, Scorer(batches, keep_mask=True))
    kept = recorded.batches
    # Enforced in the model that chose it, it is what the model does by itself, bit for bit.
    again = first.score(kept, Scorer(kept, keep_mask=True), enforce=True)
    for plain, own, replayed in zip(natural, report.rows, again, strict=True):
        assert torch.equal(plain.logprobs_T, own.logprobs_T)
        assert torch.equal(plain.logprobs_T, replayed.logprobs_T)
    step = second.step(kept, tiny_moe.policy_loss(second, kept, denominator), enforce=True)
    second_natural = step.agreement_LS.numpy()
    # What the update dispatched, row by row, is what the recording pass dispatched.
    traced = second.trace(kept, 0)
    np.testing.assert_array_equal(traced.checksums_rl, recorded.traces[0].checksums_rl)
    np.testing.assert_array_equal(traced.positions, recorded.traces[0].positions)
    changed = [replace(kept[0], expert_ids=np.roll(kept[0].expert_ids, 1, axis=0)), *kept[1:]]
    with pytest.raises(UnprovedError, match="Keep Routing was not proved"):
        second.step(changed, tiny_moe.policy_loss(second, changed, denominator), enforce=True)
    return {
        "verified": step.rows_verified,
        "flips": float(second_natural[:, 1].sum()),
        "rows": float(second_natural[:, 0].sum()),
        "differing": int(sum(rows.layers_differing_T.sum() for rows in report.rows)),
    }


@LAYOUTS
def test_an_update_takes_the_routing_of_the_trainers_own_forward_pass(
    sizes: dict[str, int], recompute: str, untied: Path, tied: Path, two_processes: Ranks
) -> None:
    ranks = two_processes.run(keep_own, untied, tied, recompute, **sizes)
    phases = 1 if recompute == "none" else 2
    # Every row, also those that the sampler did not capture.
    assert sum(result["verified"] for result in ranks) == phases * 4 * (sum(LENGTHS) - len(LENGTHS))
    assert sum(result["flips"] for result in ranks) > 0
    assert sum(result["differing"] for result in ranks) > 0


# --- when it is proved -----------------------------------------------------------------------------------------------


def step_unproved(layout: Any, path: Path) -> None:
    trainer, plain = (tiny_moe.build(layout, path) for _ in range(2))
    batches, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(33, LENGTHS))
    for each, prove in ((trainer, False), (plain, True)):
        report = each.step(batches, tiny_moe.policy_loss(each, batches, denominator), enforce=True, prove=prove)
        assert (report.rows_verified > 0) == prove
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), tiny_moe.exported(plain)) == 0.0
    router = trainer.model.chunks[0].decoder.layers[1].mlp
    # Consumption is counted even so: a layer that dispatches behind the checksum is found.
    router.token_dispatcher.__dict__.pop("dispatch_preprocess")
    with pytest.raises(UnprovedError, match="0 calls"):
        trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True, prove=False)


def test_without_a_proof_the_step_is_the_same_and_calls_are_still_counted(
    untied: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    one_process.run(step_unproved, untied)
    two_processes.run(step_unproved, untied, pipeline=2)


# --- why a proof failed ----------------------------------------------------------------------------------------------


def swap_two_rows(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    expert_ids[[3, 4]] = expert_ids[[4, 3]]
    return replace(batch, expert_ids=expert_ids)


def leave_a_row_to_the_router(batch: Microbatch) -> Microbatch:
    return replace(batch, routed=batch.routed & (np.arange(batch.num_rows) != batch.num_rows - 12))


def explain(layout: Any, path: Path, tamper: Callable[[Microbatch], Microbatch], *, own: bool) -> dict[str, Any]:
    from moerl.ranks.tables import as_words
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(layout, path)
    samples = tiny_moe.make_samples(34, LENGTHS)
    batches, denominator = tiny_moe.shares(trainer, samples)
    traces: Any = ()
    if own:
        _, recorded = trainer.score_and_record(batches, Scorer(batches, keep_mask=True))
        batches, traces = recorded.batches, recorded.traces
    wrong = list(batches)
    last = layout.rank == layout.dims.world_size - 1
    if last:
        wrong[-1] = tamper(wrong[-1])
    before = tiny_moe.exported(trainer)
    with pytest.raises(UnprovedError) as caught:
        trainer.step(wrong, tiny_moe.policy_loss(trainer, wrong, denominator), enforce=True)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), before) == 0.0
    number = len(batches) - 1
    return {
        "error": caught.value,
        "traced": as_words(trainer.trace(wrong, number), layout.rank),
        "recorded": as_words(traces[number], layout.rank) if own else None,
        "wrong": where_it_differs(trainer, batches[-1], wrong[-1]),
        "last": number,
    }


class FakeTrainer:
    """Says what real ranks traced."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        recorded = [rank["recorded"] for rank in ranks if rank["recorded"] is not None]
        self._traced = Traced(
            np.concatenate([rank["traced"] for rank in ranks]), np.concatenate(recorded) if recorded else None
        )
        self.microbatch = -1

    def trace(self, microbatch: int) -> Traced:
        self.microbatch = microbatch
        return self._traced


def explanation(ranks: list[dict[str, Any]]) -> str:
    """Returns the controller's explanation of the errors of all ranks."""
    trainer, error = FakeTrainer(ranks), first_error([rank["error"] for rank in ranks])
    with pytest.raises(ReplayError) as caught, explained(cast(Any, trainer), tiny_moe.make_samples(34, LENGTHS)):
        raise error
    assert trainer.microbatch == ranks[-1]["last"]
    return str(caught.value)


def where_it_differs(trainer: Any, right: Microbatch, wrong: Microbatch) -> list[tuple[int, int, int]]:
    """(sample, position, MoE layer) whose sets of experts are not the same, by a loop over this rank's rows."""
    from moerl.trainer.replay_rows import routing_slice

    mine = routing_slice(right, trainer.layout)
    samples, positions, pads = right.sample_index[mine], right.position_ids[mine], right.is_pad[mine]
    layers = [hook.moe_layer for hook in trainer.keep_routing.hooks]
    assert right.expert_ids is not None
    assert wrong.expert_ids is not None
    changed = (np.sort(right.expert_ids, -1) != np.sort(wrong.expert_ids, -1)).any(-1)
    return [(int(samples[t]), int(positions[t]), layers[layer]) for t, layer in np.argwhere(changed) if not pads[t]]


TAMPERS = (tiny_moe.shift_rows, tiny_moe.shift_layers, swap_two_rows)


@pytest.mark.parametrize("own", [False, True], ids=["rollout", "trainer"])
@pytest.mark.parametrize(
    ("sizes", "tamper"),
    [
        *(pytest.param(None, each, id=f"one-{each.__name__}") for each in TAMPERS),
        *(
            pytest.param(
                sizes,
                each,
                id=f"{name}-{each.__name__}",
                marks=[pytest.mark.slow] * (each is not TAMPERS[0] or name != "PP2"),
            )
            for name, sizes in {"DP2": {}, "TP2": TP, "PP2": PP, "CP2": CP}.items()
            for each in TAMPERS
        ),
    ],
)
def test_a_failed_proof_names_the_first_row_that_differs(
    sizes: dict[str, int] | None,
    tamper: Callable[[Microbatch], Microbatch],
    own: bool,
    untied: Path,
    one_process: Ranks,
    two_processes: Ranks,
) -> None:
    run = one_process if sizes is None else two_processes
    ranks = run.run(_explain_own if own else _explain_rollout, untied, tamper, **(sizes or {}))
    sample, position, layer = min(ranks[-1]["wrong"])
    rank, microbatch = len(ranks) - 1, ranks[-1]["last"]
    message = explanation(ranks)
    assert f"microbatch {microbatch}, first differing row:" in message
    assert f"rollout rollout-34-{sample}, token {position}, MoE layer {layer} of" in message
    assert f", rank {rank}," in message
    assert f", rank {rank}, microbatch {microbatch}, forward: checksum" in str(ranks[-1]["error"])


def _explain_rollout(layout: Any, path: Path, tamper: Callable[[Microbatch], Microbatch]) -> dict[str, Any]:
    return explain(layout, path, tamper, own=False)


def _explain_own(layout: Any, path: Path, tamper: Callable[[Microbatch], Microbatch]) -> dict[str, Any]:
    return explain(layout, path, tamper, own=True)


@pytest.mark.parametrize(
    ("sizes", "own"),
    [
        pytest.param(None, False, id="one"),
        pytest.param(None, True, id="one-trainer"),
        pytest.param({}, False, id="DP2", marks=pytest.mark.slow),
        pytest.param(TP, False, id="TP2"),
        pytest.param(CP, False, id="CP2", marks=pytest.mark.slow),
    ],
)
def test_a_captured_row_that_is_left_to_the_router_is_reported_as_that(
    sizes: dict[str, int] | None, own: bool, untied: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    run = one_process if sizes is None else two_processes
    ranks = run.run(_explain_own if own else _explain_rollout, untied, leave_a_row_to_the_router, **(sizes or {}))
    message = explanation(ranks)
    assert f"microbatch {ranks[-1]['last']}, first differing row: rollout rollout-34-" in message
    assert "captured, but marked afterwards as left to the router" in message
    assert "with 1 row left to the router" in str(ranks[-1]["error"])


def spoil_on_one_rank(layout: Any, path: Path, expert: int) -> str:
    trainer = tiny_moe.build(layout, path)
    batches, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(35, LENGTHS))
    if layout.rank == 1:
        assert batches[0].expert_ids is not None
        expert_ids = batches[0].expert_ids.copy()
        expert_ids[1, -1, :] = expert
        batches = [replace(batches[0], expert_ids=expert_ids), *batches[1:]]
    before = tiny_moe.exported(trainer)
    with pytest.raises(ReplayError) as caught:
        trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), before) == 0.0
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "expert", "message"),
    [({}, 3, "repeats an expert"), (TP, 3, "repeats an expert"), ({}, 8, "does not exist")],
    ids=["DP2", "TP2", "DP2-outside"],
)
def test_experts_that_no_row_can_have_are_refused_on_every_rank(
    sizes: dict[str, int], expert: int, message: str, untied: Path, two_processes: Ranks
) -> None:
    first, second = two_processes.run(spoil_on_one_rank, untied, expert, timeout_seconds=60, **sizes)
    assert message in second
    assert "on another rank" in first


def drop_on_one_rank(layout: Any, path: Path) -> str:
    trainer = tiny_moe.build(layout, path)
    batches, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(35, LENGTHS))
    if layout.rank == 1:
        batches = [replace(batches[0], expert_ids=None), *batches[1:]]
    with pytest.raises(ReplayError) as caught:
        trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
    return str(caught.value)


def test_a_rank_without_routing_leaves_no_other_waiting_for_an_explanation(untied: Path, two_processes: Ranks) -> None:
    first, second = two_processes.run(drop_on_one_rank, untied, timeout_seconds=60)
    assert "on another rank" in first
    assert "without recorded routing" in second
