"""Whatever the layout, the lengths, the rows that were not captured and the recompute mode: what reaches the
dispatchers is what was recorded, and the gradients are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import matrix
import numpy as np
import pytest
import tiny_moe
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from matrix import Case

pytestmark = pytest.mark.timeout(900)

TP, PP, CP, EP = {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
VPP, ETP = PP | {"virtual_pipeline": 2}, TP | {"expert_tensor": 2}
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    *((2, sizes) for sizes in ({}, TP, PP, CP, EP, VPP, ETP)),
    *((4, sizes) for sizes in ({}, TP | PP, TP | VPP, TP | EP, ETP | EP, TP | CP, PP | CP, PP | EP, VPP | EP, CP | EP)),
    *((4, {axis: 4}) for axis in ("tensor", "pipeline", "context", "expert")),
]
SGD = matrix.SGD.model_copy(update={"lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0})
"""An update is the gradient."""

SAMPLE, POSITION, LAYER, PHASE, EXPERTS = range(5)
"""Columns of a table of dispatched rows; experts as bits."""


@dataclass(frozen=True)
class Example:
    """A step: where it runs, and on what."""

    case: Case
    seed: int
    lengths: tuple[int, ...]
    uncaptured: float

    def samples(self) -> list[Any]:
        return tiny_moe.make_samples(self.seed, self.lengths, uncaptured=self.uncaptured)


@st.composite
def examples(draw: st.DrawFn, layouts: Sequence[tuple[int, dict[str, int]]] = LAYOUTS, fewest: int = 1) -> Example:
    processes, sizes = draw(st.sampled_from(layouts))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    case = Case(processes, sizes, recompute=recompute, sharding=draw(st.sampled_from(["off", "on", "overlap"])))
    lengths = draw(st.lists(st.integers(3, 64), min_size=fewest, max_size=8).map(tuple))
    return Example(case, draw(st.integers(0, 2**16)), lengths, draw(st.sampled_from([0.0, 0.3, 0.9])))


def step(layout: Any, path: Path, example: Example) -> dict[str, Any]:
    """One step of this rank: every row that was dispatched, and the gradient by Hugging Face names."""
    from moerl.trainer.routers import RouterHook

    with matrix.sgd():
        case = example.case
        trainer = tiny_moe.build(layout, path, optimizer=SGD, recompute=case.recompute, sharding=case.sharding)
    before = tiny_moe.exported(trainer)
    batches, denominator = tiny_moe.shares(trainer, example.samples(), uncaptured="live")
    parts: list[np.ndarray] = []
    original = RouterHook.before_dispatch

    def before_dispatch(hook: Any, routing_map_tE: Any) -> None:
        assert hook.active is not None
        microbatch, phase = hook.active
        parts.append(dispatched(batches[microbatch], layout, hook.moe_layer, phase, routing_map_tE.numpy()))
        original(hook, routing_map_tE)

    with mock.patch.object(RouterHook, "before_dispatch", before_dispatch):
        report = trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
    after = tiny_moe.exported(trainer)
    return {
        "rows": np.concatenate([np.zeros((0, 5), np.int64), *parts]),
        "gradients": {name: before[name] - after[name] for name in before},
        "verified": report.rows_verified,
    }


def dispatched(batch: Any, layout: Any, layer: int, phase: int, routing_map_tE: np.ndarray) -> np.ndarray:
    """int64 [r, 5]: the rows of one dispatch, pad rows left out."""
    mine = slice(layout.tensor_rank * len(routing_map_tE), (layout.tensor_rank + 1) * len(routing_map_tE))
    bits_t = (routing_map_tE * (1 << np.arange(routing_map_tE.shape[1]))).sum(1)
    places = np.full((len(bits_t), 2), (layer, phase))
    columns = [batch.sample_index[mine, None], batch.position_ids[mine, None], places, bits_t[:, None]]
    return np.concatenate(columns, axis=1)[~batch.is_pad[mine]].astype(np.int64)


def assert_enforced_as_recorded(rows: np.ndarray, samples: Sequence[Any], num_phases: int) -> None:
    """Every row of every sample was dispatched once per layer and phase, captured ones as recorded."""
    rows = rows[np.lexsort(rows.T[::-1])]
    layers, k = tiny_moe.SPEC.num_moe_layers, tiny_moe.SPEC.experts_per_token
    assert len(rows) == num_phases * layers * sum(len(sample.trajectory) - 1 for sample in samples)
    for index, sample in enumerate(samples):
        routed_T, expert_ids_TLK = sample.trajectory.routed, sample.trajectory.expert_ids
        mine = rows[rows[:, SAMPLE] == index]
        seen_TLP = mine[:, EXPERTS].reshape(len(routed_T), layers, num_phases)
        np.testing.assert_array_equal(mine[:, POSITION], np.repeat(np.arange(len(routed_T)), layers * num_phases))
        expected_TL = (1 << expert_ids_TLK.astype(np.int64)).sum(-1)
        np.testing.assert_array_equal(seen_TLP[routed_T], np.repeat(expected_TL[routed_T, :, None], num_phases, 2))
        # A row that is left to the router goes the same way in recompute.
        np.testing.assert_array_equal(seen_TLP[~routed_T, :, 0], seen_TLP[~routed_T, :, -1])
        assert (np.bitwise_count(seen_TLP) == k).all()


def assert_same_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(np.abs(gradient).max())
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-6, err_msg=name)
        if name.endswith("mlp.gate.weight"):
            assert scale > 1e-5, f"{name} has no gradient"
            assert float(np.abs(found[name]).max()) > 1e-5, f"{name} has no gradient"


def check(example: Example, path: Path, processes: Any) -> None:
    alone = Example(Case(1), example.seed, example.lengths, example.uncaptured)
    (one,) = processes(1).run(step, path, alone)
    ranks = processes(example.case.processes).run(step, path, example, **example.case.sizes)
    samples = example.samples()
    for results, phases in (([one], 1), (ranks, example.case.phases)):
        assert_enforced_as_recorded(np.concatenate([each["rows"] for each in results]), samples, phases)
        captured = sum(int(sample.trajectory.routed.sum()) for sample in samples)
        assert sum(each["verified"] for each in results) == phases * tiny_moe.SPEC.num_moe_layers * captured
    for each in ranks:
        assert_same_gradients(each["gradients"], one["gradients"])


def settled(max_examples: int) -> settings:
    """The same examples in every run; few and not made smaller, since a layout takes seconds to start."""
    unsuited = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=unsuited,
        phases=[Phase.explicit, Phase.generate],
    )


@pytest.mark.distributed
@settled(2)
@given(example=examples([(processes, sizes) for processes, sizes in LAYOUTS if len(sizes) > 1], fewest=4))
def test_routing_is_enforced_as_recorded_and_gradients_are_those_of_one_process(
    example: Example, untied: Path, processes: Any
) -> None:
    check(example, untied, processes)


@pytest.mark.distributed
@settled(12)
@given(example=examples())
def test_many_random_steps_enforce_what_was_recorded_with_the_gradients_of_one_process(
    example: Example, tied: Path, processes: Any
) -> None:
    check(example, tied, processes)
