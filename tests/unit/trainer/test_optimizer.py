from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_moe
import torch
from ranks import Ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def step(trainer: Any, seed: int, spoil: float = 1.0) -> Any:
    batches = tiny_moe.pack(tiny_moe.make_samples(seed, (9, 14)))[0]
    loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))

    def spoiled(hidden_tH: Any, head: Any, microbatch: int) -> Any:
        total, rows = loss(hidden_tH, head, microbatch)
        return total * spoil, rows

    return trainer.step(batches, spoiled, enforce=True).update


def skip_and_go_on(layout: Any, path: Path, dtype: str) -> list[Any]:
    """Reports of steps with a gradient that is not finite, between good ones, of which each must be as without them."""
    trainer, plain = (tiny_moe.build(layout, path, dtype=dtype) for _ in range(2))
    skipped = []
    for seed in (41, 42):
        assert step(trainer, seed) == step(plain, seed)
        for spoil in (float("nan"), float("inf")):
            skipped.append(step(trainer, 40, spoil))
            assert tiny_moe.largest_difference(tiny_moe.exported(trainer), tiny_moe.exported(plain)) == 0.0
    assert step(trainer, 43) == step(plain, 43)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), tiny_moe.exported(plain)) == 0.0
    return skipped


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_counted_and_leaves_no_trace(
    dtype: str, untied: Path, one_process: Ranks
) -> None:
    (skipped,) = one_process.run(skip_and_go_on, untied, dtype)
    assert [update.skipped for update in skipped] == [True] * 4
    assert [update.skipped_in_a_row for update in skipped] == [1, 2, 1, 2]
    assert [update.grad_norm for update in skipped] == [0.0] * 4
    assert [update.learning_rate for update in skipped] == pytest.approx([1e-2, 1e-2, 8.5e-3, 8.5e-3])


def gradients_of_the_head(layout: Any, path: Path, sharding: str) -> tuple[list[bool], bool]:
    """For each microbatch of a step, whether autograd got a gradient of the head; and whether kernels get its sum."""
    trainer = tiny_moe.build(layout, path, sharding=sharding)
    weight, made = trainer.model.head_weight(), []
    accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulate.register_prehook(lambda gradients: made.append(gradients[0] is not None))
    step(trainer, 41)
    return made, trainer.head.main_grad_VpH is weight.main_grad


@pytest.mark.parametrize(("sharding", "is_made"), [("off", False), ("on", False), ("overlap", True)])
def test_a_gradient_of_the_head_of_its_own_is_made_only_if_communication_overlaps(
    sharding: str, is_made: bool, untied: Path, one_process: Ranks
) -> None:
    ((made, kernels_add),) = one_process.run(gradients_of_the_head, untied, sharding)
    assert made
    assert set(made) == {is_made}
    assert kernels_add == (not is_made)


def learning_rates(layout: Any, path: Path, options: dict[str, Any], total_steps: int, num_steps: int) -> list[float]:
    optimizer = tiny_moe.OPTIMIZER.model_copy(update=options)
    trainer = tiny_moe.build(layout, path, optimizer=optimizer, total_steps=total_steps)
    return [step(trainer, 43).learning_rate / optimizer.lr for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1}, [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ({"schedule": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.0}, [0.9330, 0.75, 0.5, 0.25, 0.0670, 0.0]),
        ({"schedule": "constant", "warmup_steps": 3, "min_lr_ratio": 0.1}, [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 0, "min_lr_ratio": 0.1}, [1.0, 1.0]),
    ],
)
def test_the_learning_rate_warms_up_from_above_zero_and_decays_to_its_minimum(
    options: dict[str, Any], expected: list[float], untied: Path, one_process: Ranks
) -> None:
    (rates,) = one_process.run(learning_rates, untied, options, 6, len(expected))
    assert rates == pytest.approx(expected, abs=1e-4)


def rates_after_loading(layout: Any, path: Path, schedule: str) -> tuple[list[float], list[float]]:
    """Learning rates of steps 3 and 4 of a run of 4 steps, and of one that was planned with 2 and made longer."""
    optimizer = tiny_moe.OPTIMIZER.model_copy(update={"schedule": schedule, "warmup_steps": 0})
    planned, long, longer = (
        tiny_moe.build(layout, path, optimizer=optimizer, total_steps=total_steps) for total_steps in (2, 4, 4)
    )
    for seed in (41, 42):
        step(planned, seed)
        step(long, seed)
    longer.optimizer.load_progress(planned.optimizer.progress())
    first, second = ([step(trainer, seed).learning_rate for seed in (43, 44)] for trainer in (long, longer))
    return first, second


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_run_that_is_made_longer_goes_on_with_the_learning_rate_of_a_long_run(
    schedule: str, untied: Path, one_process: Ranks
) -> None:
    ((long, longer),) = one_process.run(rates_after_loading, untied, schedule)
    assert longer == long


def clipped_and_not(layout: Any, path: Path) -> list[tuple[float, float]]:
    """(reported norm, norm of what reached the optimizer) with and without clipping."""
    out = []
    for clip_grad in (0.05, 0.0):
        trainer = tiny_moe.build(layout, path, optimizer=tiny_moe.OPTIMIZER.model_copy(update={"clip_grad": clip_grad}))
        reported = step(trainer, 44).grad_norm
        squares = sum(
            float((gradient.astype("float64") ** 2).sum()) for gradient in tiny_moe.gradients(trainer).values()
        )
        out.append((reported, squares**0.5))
    return out


def test_gradients_are_clipped_to_the_global_norm(untied: Path, one_process: Ranks) -> None:
    (((reported, clipped), (free, unclipped)),) = one_process.run(clipped_and_not, untied)
    assert clipped == pytest.approx(0.05, rel=1e-3)
    assert reported == pytest.approx(free, rel=1e-6)
    assert free == pytest.approx(unclipped, rel=1e-5)
    assert free > 0.05


class CountsReads(TorchDispatchMode):
    """Counts values that the host reads from tensors, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def scale_by_tensor(chunk: int, overflow: Any, lists: list[list[Any]], factor: Any) -> None:
    """Clips as Transformer Engine does: the factor stays a tensor."""
    for before, after in zip(*lists, strict=True):
        after.copy_(before * factor)


def norm_of_all(chunk: int, overflow: Any, lists: list[list[Any]], per_tensor: bool) -> tuple[Any, None]:
    """Computes the norm as Transformer Engine does: it stays a tensor, float32 [1]."""
    return torch.stack([each.norm() for each in lists[0]]).norm().view(1), None


def reads_of_an_update(layout: Any, path: Path) -> tuple[int, float, float]:
    """Values read by an update; its norm, and that of the plain way to clip."""
    from megatron.core.optimizer import clip_grads

    trainer, plain = (tiny_moe.build(layout, path) for _ in range(2))
    for each in (trainer, plain):
        step(each, 41)
    expected = step(plain, 42).grad_norm
    megatron = trainer.optimizer.megatron
    counter = CountsReads()
    update, inner = trainer.optimizer.update, megatron.step_with_ready_grads

    def counted() -> Any:
        with counter:
            return update()

    def uncounted() -> Any:
        # The optimizer of a CPU reads the number of its step, that of Transformer Engine does not.
        number, success = counter.number, inner()
        counter.number = number
        return success

    trainer.optimizer.update, megatron.step_with_ready_grads = counted, uncounted
    own = {"l2_norm_impl": norm_of_all, "multi_tensor_scale_tensor_impl": scale_by_tensor}
    with mock.patch.multiple(clip_grads, **own):
        norm = step(trainer, 42).grad_norm
    return counter.number, norm, expected


def test_an_update_reads_two_values_from_the_device(untied: Path, one_process: Ranks) -> None:
    """One before it, which decides whether it happens, and the norm after it."""
    ((num_reads, norm, expected),) = one_process.run(reads_of_an_update, untied)
    assert num_reads == 2
    assert norm == pytest.approx(expected, rel=1e-6)


class Fusing(nn.Linear):
    """A layer that adds gradients up inside of its product if it is told so, as those of Transformer Engine do."""

    fuse_wgrad_accumulation = False


def test_layers_of_transformer_engine_alone_add_gradients_up_inside_of_products() -> None:
    from moerl.trainer.optimizer import fuse_gradients

    model = nn.ModuleDict({"experts": Fusing(2, 2), "head": nn.Linear(2, 2), "embedding": nn.Embedding(2, 2)})
    fuse_gradients(model)
    told = {name: getattr(module, "fuse_wgrad_accumulation", None) for name, module in model.items()}
    assert told == {"experts": True, "head": None, "embedding": None}
