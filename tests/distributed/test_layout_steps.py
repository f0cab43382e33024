"""Further kinds of steps in layouts: several updates per batch, KL to a reference, text, batches that do not fill the
ranks; and steps after something went wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import numpy as np
import pytest
import tiny_moe
import torch
from matrix import Case
from ranks import Ranks

from moerl.batching.packing import PackOptions, pack_text_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import TextSample

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TP, PP, CP, EP = {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
VPP = {"pipeline": 2, "virtual_pipeline": 2}


def cases(*cases: Case) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def compare(found: list[Any], expected: list[Any], advantages: list[float]) -> list[matrix.Total]:
    """The steps of a layout, once they are as close to those of one process as the matrix asks for."""
    steps = matrix.by_step(found)
    matrix.assert_close(steps, matrix.by_step(expected), advantages)
    return steps


# --- several updates per batch ---------------------------------------------------------------------------------------


def update_several_times(layout: Any, path: Path, case: Case) -> list[dict[str, Any]]:
    """Two minibatches, both scored before the first update on either, then trained on twice."""
    from moerl.trainer.losses import Scorer

    trainer = matrix.build(layout, path, case)
    minibatches = [matrix.make_samples(seed) for seed in (111, 112)]
    proximal = []
    for samples in minibatches:
        batches, _ = tiny_moe.shares(trainer, samples, uncaptured="live")
        rows = trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True)
        proximal.append([row.logprobs_T for row in rows])
    return [
        matrix.step(trainer, samples, proximal_logprobs=before)
        for _ in range(2)
        for samples, before in zip(minibatches, proximal, strict=True)
    ]


@cases(Case(2, PP), Case(2, VPP, recompute="full"), Case(2, CP), Case(4, TP | PP, recompute="full"), Case(4, PP | EP))
def test_log_probs_from_before_the_first_update_stay_the_proximal_ones(
    case: Case, untied: Path, one_process: Ranks, processes: Any
) -> None:
    expected = one_process.run(update_several_times, untied, Case(1))
    found = processes(case.processes).run(update_several_times, untied, case, **case.sizes)
    scale = [matrix.mean_advantage(matrix.make_samples(seed)) for seed in (111, 112)]
    steps = compare(found, expected, scale * 2)
    assert [step.clipped for step in steps] == [step.clipped for step in matrix.by_step(expected)]
    assert steps[0].clipped == 0 < steps[3].clipped


def update_with_interpolation(layout: Any, path: Path, case: Case) -> list[dict[str, Any]]:
    """Two minibatches, of which the second is scored by weights that have been updated on the first."""
    from moerl.trainer.losses import Drift

    trainer = matrix.build(layout, path, case)
    drifts = [None, Drift(version=9, updates_per_version=2, since=1)]
    seeds = zip((131, 132), drifts, strict=True)
    return [matrix.step(trainer, matrix.make_samples(seed), drift=drift) for seed, drift in seeds]


@cases(Case(2, CP), Case(4, TP | PP, recompute="full"))
def test_proximal_log_probs_are_interpolated_by_version_as_in_one_process(
    case: Case, untied: Path, one_process: Ranks, processes: Any
) -> None:
    expected = one_process.run(update_with_interpolation, untied, Case(1))
    found = processes(case.processes).run(update_with_interpolation, untied, case, **case.sizes)
    scale = [matrix.mean_advantage(matrix.make_samples(seed)) for seed in (131, 132)]
    steps = compare(found, expected, scale)
    # Without interpolation the ratios of the second would all be 1, as those of the first are.
    assert steps[0].clipped == 0 < steps[1].clipped


# --- KL to a reference -----------------------------------------------------------------------------------------------


def step_with_reference(layout: Any, path: Path, reference_path: Path, case: Case) -> list[dict[str, Any]]:
    from policy_rows import grpo

    from moerl.trainer.losses import Reference

    trainer = matrix.build(layout, path, case)
    reference = tiny_moe.build(layout, reference_path, optimizer=None, recompute=case.recompute)
    steps = []
    for seed in (121, 122):
        samples = matrix.make_samples(seed)
        batches, _ = tiny_moe.shares(trainer, samples, uncaptured="live")
        options = {
            "algorithm": grpo(kl_coef=0.3),
            "reference": Reference(reference, reference.last_hidden(batches, enforce=True), "kept"),
        }
        steps.append(matrix.step(trainer, samples, **options))
    return steps


@cases(Case(2, PP), Case(2, TP), Case(2, CP), Case(2, VPP, recompute="full"), Case(4, TP | PP, recompute="full"))
def test_the_kl_to_a_reference_model_is_that_of_one_process(
    case: Case, tied: Path, untied: Path, one_process: Ranks, processes: Any
) -> None:
    expected = one_process.run(step_with_reference, untied, tied, Case(1))
    (without,) = one_process.run(train_without_reference, untied)
    found = processes(case.processes).run(step_with_reference, untied, tied, case, **case.sizes)
    scale = [matrix.mean_advantage(matrix.make_samples(seed)) for seed in (121, 122)]
    steps = compare(found, expected, scale)
    assert abs(steps[0].loss - without[0]["loss"]) > 1e-2


def train_without_reference(layout: Any, path: Path) -> list[dict[str, Any]]:
    return [matrix.step(matrix.build(layout, path, Case(1)), matrix.make_samples(121))]


# --- text ------------------------------------------------------------------------------------------------------------


def texts() -> list[TextSample]:
    rng = np.random.default_rng(131)
    return [
        TextSample(rng.integers(0, tiny_moe.SPEC.vocab_size, length, dtype=np.int32), np.arange(length) >= length // 3)
        for length in matrix.LENGTHS
    ]


def learn_text(layout: Any, path: Path, case: Case) -> list[dict[str, Any]]:
    from moerl.trainer.losses import TextLoss

    trainer = matrix.build(layout, path, case)
    steps = []
    options = PackOptions(64, Padding.of(layout.dims), count_multiple=layout.dims.microbatch_multiple)
    ranks = pack_text_for_ranks(texts(), layout.dims.data, options)
    denominator = tiny_moe.num_trained([batch for part in ranks for batch in part])
    batches = tiny_moe.mine(trainer, ranks)
    for _ in range(3):
        loss = TextLoss(batches, trainer.model.description.vocab_size, denominator)
        steps.append(matrix.facts(trainer, batches, trainer.step(batches, loss, enforce=False), denominator))
    return steps


@cases(Case(2, {}), Case(2, TP), Case(2, PP), Case(2, VPP, recompute="full"), Case(2, CP), Case(4, CP | TP))
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_supervised_steps_equal_those_of_one_process(
    model: str, case: Case, one_process: Ranks, processes: Any, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    expected = matrix.by_step(one_process.run(learn_text, path, Case(1)))
    found = matrix.by_step(processes(case.processes).run(learn_text, path, case, **case.sizes))
    seen = matrix.errors(found, expected, [1.0] * 3)
    assert seen.logprob <= 1e-5
    assert seen.loss <= 1e-6
    assert seen.grad_norm <= 1e-4
    assert found[2].loss < found[1].loss < found[0].loss


# --- batches that do not fill the ranks ------------------------------------------------------------------------------


def step_on_few(
    layout: Any, path: Path, case: Case, lengths: tuple[int, ...]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Two steps, and how many real rows each microbatch of this rank has."""
    trainer = matrix.build(layout, path, case)
    batches, _ = tiny_moe.shares(trainer, matrix.make_samples(141, lengths), uncaptured="live")
    steps = [matrix.step(trainer, matrix.make_samples(seed, lengths)) for seed in (141, 142)]
    return steps, [int((~batch.is_pad).sum()) for batch in batches]


def check_few(case: Case, lengths: tuple[int, ...], path: Path, one_process: Ranks, processes: Any) -> list[list[int]]:
    """Real rows per rank and microbatch, once the steps are those of one process."""
    expected = one_process.run(step_on_few, path, Case(1), lengths)
    found = processes(case.processes).run(step_on_few, path, case, lengths, **case.sizes)
    scale = [matrix.mean_advantage(matrix.make_samples(seed, lengths)) for seed in (141, 142)]
    compare([steps for steps, _ in found], [steps for steps, _ in expected], scale)
    return [rows for _, rows in found]


@cases(
    Case(2, {}, sharding="overlap"),
    Case(2, EP, recompute="full"),
    Case(4, TP | EP, recompute="full"),
    Case(4, PP),
    Case(4, CP, sharding="on"),
)
def test_a_rank_without_sequences_takes_part_and_adds_nothing(
    case: Case, untied: Path, one_process: Ranks, processes: Any
) -> None:
    rows = check_few(case, (23,), untied, one_process, processes)
    assert min(sum(counts) for counts in rows) == 0 < max(sum(counts) for counts in rows)


@cases(Case(2, VPP), Case(2, VPP, recompute="full", sharding="overlap"), Case(4, VPP | EP, recompute="selective"))
def test_an_interleaved_schedule_gets_its_microbatches_in_whole_rounds(
    case: Case, untied: Path, one_process: Ranks, processes: Any
) -> None:
    # Three, or one per data-parallel rank, would do.
    lengths = (60, 61, 62) if case.processes == 2 else (60, 61)
    rows = check_few(case, lengths, untied, one_process, processes)
    assert {len(counts) for counts in rows} == {4 if case.processes == 2 else 2}
    assert min(min(counts) for counts in rows) == 0


# --- nothing is left over --------------------------------------------------------------------------------------------


class InterruptionError(Exception):
    pass


def disturb(trainer: Any, kind: str) -> None:
    """Something that must leave no trace."""
    from moerl.trainer.losses import Scorer

    batches, denominator = tiny_moe.shares(trainer, matrix.make_samples(151), uncaptured="live")
    if kind == "scores":
        trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True)
        trainer.last_hidden(batches, enforce=True)
        return
    if kind == "evaluation":
        trainer.score(batches, Scorer(batches, keep_mask=True, with_full=True), enforce=False)
        tiny_moe.exported(trainer)
        return
    loss = tiny_moe.policy_loss(trainer, batches, denominator)

    def failing(hidden_tH: Any, head: Any, microbatch: int) -> Any:
        if microbatch == 1:
            raise InterruptionError
        return loss(hidden_tH, head, microbatch)

    for run in (trainer.score, trainer.step):
        with pytest.raises(InterruptionError):
            run(batches, failing, enforce=True)


def step_disturbed(layout: Any, path: Path, case: Case, kind: str) -> None:
    """Steps with and without the disturbance before each are the same, bit for bit."""
    disturbed, plain = (matrix.build(layout, path, case, adam=True) for _ in range(2))
    before = tiny_moe.exported(plain)
    for seed in (152, 153):
        disturb(disturbed, kind)
        samples = matrix.make_samples(seed)
        first, second = (matrix.step(trainer, samples) for trainer in (disturbed, plain))
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert tiny_moe.largest_difference(tiny_moe.exported(disturbed), tiny_moe.exported(plain)) == 0.0
    assert tiny_moe.largest_difference(tiny_moe.exported(plain), before) > 1e-3


@cases(
    Case(1, recompute="full"),
    Case(2, {}, sharding="overlap"),
    Case(2, EP, recompute="full", sharding="overlap"),
    Case(2, TP, recompute="full", sharding="overlap"),
    Case(2, PP, recompute="full"),
    Case(2, VPP, recompute="full", sharding="overlap"),
    Case(2, CP, recompute="selective", sharding="on"),
)
@pytest.mark.parametrize("kind", ["scores", "evaluation", "exception"])
def test_nothing_is_left_over_for_the_next_step(kind: str, case: Case, untied: Path, processes: Any) -> None:
    if kind == "exception" and "pipeline" in case.sizes:
        pytest.skip("an exception on the last stage ends the job: the other stages wait for it")
    processes(case.processes).run(step_disturbed, untied, case, kind, **case.sizes)


# --- rows that are routed live ---------------------------------------------------------------------------------------


def routing_maps(layout: Any, path: Path, case: Case) -> tuple[int, int]:
    """(dispatches compared, experts that differ) between forward and recompute, uncaptured rows among them."""
    from moerl.trainer.replay import ReplaySchedule

    trainer = matrix.build(layout, path, case)
    maps: dict[tuple[int, int, int], torch.Tensor] = {}
    observe = ReplaySchedule.observe

    def keep(self: Any, hook: Any, routing_map_tE: torch.Tensor) -> None:
        microbatch, phase = hook.active
        maps[hook.index, microbatch, phase] = routing_map_tE.clone()
        observe(self, hook, routing_map_tE)

    ReplaySchedule.observe = keep
    try:
        matrix.step(trainer, matrix.make_samples(161))
    finally:
        ReplaySchedule.observe = observe
    forward = {key[:2]: each for key, each in maps.items() if key[2] == 0}
    again = {key[:2]: each for key, each in maps.items() if key[2] == 1}
    assert forward.keys() == again.keys()
    return len(again), sum(int((each != again[key]).sum()) for key, each in forward.items())


@cases(
    Case(1, recompute="full"),
    Case(1, recompute="selective"),
    Case(2, VPP, recompute="full"),
    Case(4, TP | PP | EP, recompute="selective"),
)
def test_rows_left_to_the_router_go_the_same_way_in_recompute(case: Case, untied: Path, processes: Any) -> None:
    for compared, differing in processes(case.processes).run(routing_maps, untied, case, **case.sizes):
        assert compared > 0
        assert differing == 0
