"""A checkpoint of one parallel layout goes on in another: the same losses, the same moments, the same next steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks

LENGTHS = (5, 30, 17, 41, 9, 24, 33, 12)
NAME = "0-rl-000002"

# Processes, and the sizes that are not 1; what is left is data parallelism.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2-VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "EP2": (2, {"expert": 2}),
    "ETP2": (2, {"tensor": 2, "expert_tensor": 2}),
    "CP2": (2, {"context": 2}),
    "TP2-EP2": (2, {"tensor": 2, "expert": 2}),
    "TP2-PP2-EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "EP4": (4, {"expert": 4}),
}


class Machines:
    """Ranks for every world size that a test asks for."""

    def __init__(self, one: Ranks, two: Ranks, four: Ranks | None = None) -> None:
        self._ranks = {1: one, 2: two, 4: four}

    def run(self, layout: str, function: Any, *args: Any) -> list[Any]:
        num_processes, sizes = LAYOUTS[layout]
        ranks = self._ranks[num_processes]
        assert ranks is not None
        return ranks.run(function, *args, **sizes)


@pytest.fixture
def machines(one_process: Ranks, two_processes: Ranks) -> Machines:
    return Machines(one_process, two_processes)


# --- in a rank -------------------------------------------------------------------------------------------------------


def step(trainer: Any, seed: int) -> float:
    """One update on all samples; the loss, the same on every rank."""
    layout = trainer.layout
    local, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(seed, LENGTHS))
    report = trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)
    counts = layout.is_last_stage and layout.tensor_rank == 0
    loss = torch.tensor([sum(float(row.losses_T.sum()) for row in report.rows) * counts], dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    return loss.item() / denominator


def save_and_go_on(layout: Any, path: Path, folder: Path, sharding: str, dtype: str) -> tuple[list[float], Any]:
    trainer = tiny_moe.build(layout, path, sharding=sharding, dtype=dtype)
    for seed in (1, 2):
        step(trainer, seed)
    tiny_moe.save(trainer, folder, NAME)
    return [step(trainer, seed) for seed in (3, 4)], tiny_moe.exported(trainer)


def load_and_go_on(
    layout: Any, path: Path, folder: Path, sharding: str, dtype: str, again: Path
) -> tuple[list[float], Any]:
    """Loads into a trainer that has been elsewhere; writes what it loaded to `again`; goes on."""
    trainer = tiny_moe.build(layout, path, sharding=sharding, dtype=dtype)
    step(trainer, 7)
    trainer.restore(folder / NAME)
    tiny_moe.save(trainer, again, NAME)
    return [step(trainer, seed) for seed in (3, 4)], tiny_moe.exported(trainer)


def tensors(layout: Any, folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole, under its stored name; vocabularies without their padding."""
    from megatron.core import dist_checkpointing

    found = {}
    for name, tensor in dist_checkpointing.load_plain_tensors(str(folder / NAME)).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        rows = tiny_moe.SPEC.vocab_size if "embedding" in name or "output_layer" in name else None
        found[name] = tensor[:rows].numpy()
    return found


# --- resuming elsewhere ----------------------------------------------------------------------------------------------


def check_resuming(machines: Machines, source: str, target: str, path: Path, tmp_path: Path, sharding: str) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    losses, weights = machines.run(source, save_and_go_on, path, first, sharding, "float32")[0]
    for there, found in machines.run(target, load_and_go_on, path, first, sharding, "float32", again):
        np.testing.assert_allclose(there, losses, rtol=0, atol=1e-6)
        assert tiny_moe.largest_difference(found, weights) < 1e-5
    (expected,), (stored,) = (machines.run("one", tensors, folder) for folder in (first, again))
    assert any("exp_avg_sq" in name for name in expected)
    assert tiny_moe.largest_difference(stored, expected) == 0.0


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("TP2", "EP2"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("one", "TP2"), ("TP2", "one"), ("EP2", "one")]),
    ],
)
def test_a_run_goes_on_in_another_layout(
    source: str, target: str, untied: Path, tmp_path: Path, machines: Machines
) -> None:
    check_resuming(machines, source, target, untied, tmp_path, "off")


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("float32", "TP2-EP2"),
        ("bfloat16", "EP2"),
        *(pytest.param("float32", each, marks=pytest.mark.slow) for each in ("TP2", "EP2")),
        *(pytest.param("bfloat16", each, marks=pytest.mark.slow) for each in ("TP2", "TP2-EP2")),
    ],
)
def test_in_its_own_layout_a_run_goes_on_bit_for_bit(
    layout: str, dtype: str, untied: Path, tmp_path: Path, machines: Machines
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    expected = machines.run(layout, save_and_go_on, untied, first, "off", dtype)
    for (there, found), (losses, weights) in zip(
        machines.run(layout, load_and_go_on, untied, first, "off", dtype, again), expected, strict=True
    ):
        assert there == losses
        assert tiny_moe.largest_difference(found, weights) == 0.0


def save_and_load_without_pickle(layout: Any, path: Path, folder: Path, sharding: str) -> float:
    """Saves and loads while whatever would pickle an object for another rank fails."""
    trainer = tiny_moe.build(layout, path, sharding=sharding)
    step(trainer, 1)
    saved = tiny_moe.exported(trainer)
    c10d = "torch.distributed.distributed_c10d"
    forbidden = AssertionError("an object crosses the network")
    with (
        mock.patch(f"{c10d}._object_to_tensor", side_effect=forbidden),
        mock.patch(f"{c10d}._tensor_to_object", side_effect=forbidden),
    ):
        tiny_moe.save(trainer, folder, NAME)
        tiny_moe.save(trainer, folder, NAME)
        trainer.restore(folder / NAME)
    return tiny_moe.largest_difference(tiny_moe.exported(trainer), saved)


@pytest.mark.parametrize(
    ("layout", "sharding"),
    [("EP2", "on"), *(pytest.param(each, "off", marks=pytest.mark.slow) for each in ("TP2", "PP2"))],
)
def test_nothing_pickled_goes_from_rank_to_rank(
    layout: str, sharding: str, untied: Path, tmp_path: Path, machines: Machines
) -> None:
    assert machines.run(layout, save_and_load_without_pickle, untied, tmp_path, sharding) == [0.0, 0.0]


def random_numbers(layout: Any, path: Path, folder: Path, *, load: bool) -> list[float]:
    """Returns the random numbers that this rank draws next, after it saved or loaded a checkpoint."""
    trainer = tiny_moe.build(layout, path)
    torch.manual_seed(100 + layout.rank)
    if load:
        trainer.restore(folder / NAME)
    else:
        torch.manual_seed(200 + layout.rank)
        tiny_moe.save(trainer, folder, NAME)
    return torch.rand(3).tolist()


def after_saving(layout: Any, path: Path, folder: Path) -> list[float]:
    return random_numbers(layout, path, folder, load=False)


def after_loading(layout: Any, path: Path, folder: Path) -> list[float]:
    return random_numbers(layout, path, folder, load=True)


def test_random_states_come_back_in_the_layout_that_wrote_them_and_stay_as_they_were_in_another(
    untied: Path, tmp_path: Path, machines: Machines
) -> None:
    saved = machines.run("TP2", after_saving, untied, tmp_path)
    assert machines.run("TP2", after_loading, untied, tmp_path) == saved
    assert saved[0] != saved[1]
    elsewhere = machines.run("EP2", after_loading, untied, tmp_path)
    assert not any(numbers in saved for numbers in elsewhere)


@pytest.fixture(scope="module")
def all_machines(one_process: Ranks, two_processes: Ranks) -> Iterator[Machines]:
    four = Ranks(4)
    yield Machines(one_process, two_processes, four)
    four.close()


MATRIX = [
    # Each layout into one process and back.
    *((name, "one", "off") for name in LAYOUTS if name not in ("one", "TP2", "EP2")),
    *(("one", name, "off") for name in LAYOUTS if name not in ("one", "TP2")),
    ("TP2-PP2-EP2", "EP4", "off"),
    ("EP4", "TP2-PP2-EP2", "off"),
    ("PP2", "PP2-VPP2", "off"),
    ("CP2", "TP2", "off"),
    # Optimizer state split over data-parallel ranks.
    ("DP2", "one", "on"),
    ("one", "DP2", "on"),
    ("DP2", "DP2", "on"),
    ("EP2", "TP2-EP2", "on"),
    ("CP2", "EP2", "overlap"),
    ("TP2-PP2-EP2", "EP4", "on"),
    ("EP4", "PP2-VPP2", "overlap"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "target", "sharding"), MATRIX)
def test_a_run_goes_on_in_any_other_layout(
    source: str, target: str, sharding: str, untied: Path, tmp_path: Path, all_machines: Machines
) -> None:
    check_resuming(all_machines, source, target, untied, tmp_path, sharding)


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "target"), [("PP2", "one"), ("one", "PP2-VPP2"), ("TP2-PP2-EP2", "EP4")])
def test_shared_embeddings_are_stored_once(
    source: str, target: str, tied: Path, tmp_path: Path, all_machines: Machines
) -> None:
    check_resuming(all_machines, source, target, tied, tmp_path, "off")
