"""The trainer's memory while servers sample on its devices: weights in host memory, gradients freed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks
from replay_steps import make_batches, step

from moerl.trainer.rest import DeviceMemory


@pytest.mark.parametrize("kept", [True, False])
def test_memory_comes_back_with_its_values_or_with_zeros(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moerl.trainer.rest.SLAB_BYTES", 64)
    flat, other = torch.arange(100.0), torch.ones(3, dtype=torch.bfloat16)
    view, before = flat[20:40].view(4, 5), [flat.clone(), other.clone()]
    memory = DeviceMemory([flat, view, other, torch.empty(0)], kept=kept)
    for _ in range(2):
        memory.give_back()
        memory.give_back()
        assert flat.isnan().all()
        assert other.isnan().all()
        memory.take_back()
        for now, then in zip((flat, other), before, strict=True):
            assert torch.equal(now, then if kept else torch.zeros_like(then))
        assert torch.equal(view, flat[20:40].view(4, 5))
        # What was written since the last time is what is kept.
        flat += 1
        before[0] += 1
        memory.take_back()
        assert float(flat[0]) == (float(before[0][0]) if kept else 1.0)


def work(around: Any, layout: Any, path: Path, folder: Path, options: dict[str, Any], rests: bool) -> list[Any]:
    """Everything that a run asks of a trainer, and of a reference, that rest before each request or never."""
    from moerl.trainer.losses import Scorer

    with around():
        trainer = tiny_moe.build(layout, path, **options)
        reference = tiny_moe.build(layout, path, optimizer=None, dtype=options.get("dtype", "float32"))
        batches, found = make_batches(3), list[Any]()

        def rest() -> None:
            if rests:
                for each in (trainer, reference):
                    each.rest()
                    assert all(bool(p.isnan().all()) for chunk in each.model.chunks for p in chunk.parameters())

        for seed in (11, 12):
            rest()
            found.append(float(reference.last_hidden(batches, enforce=True)[0].sum()))
            found.append(
                float(trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True)[0].logprobs_T.sum())
            )
            rest()
            found.append(step(trainer, make_batches(seed)).update.grad_norm)
            rest()
            found.append(sorted(float(shard.float().sum()) for shard in trainer.shards().values()))
        rest()
        written = tiny_moe.save(trainer, folder, "0-rl-000002")
        step(trainer, make_batches(13))
        rest()
        trainer.restore(written)
        rest()
        trainer.trace(batches, 0)
        rest()
        weights = tiny_moe.exported(trainer)
    return [found, {name: float(np.abs(weight).sum()) for name, weight in weights.items()}]


def work_with_and_without_rest(layout: Any, path: Path, folder: Path, options: dict[str, Any]) -> list[Any]:
    from pretended_device import pretended_device

    never = work(nullcontext, layout, path, folder / "never", options, False)
    return [never, work(pretended_device, layout, path, folder / "rests", options, True)]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "sharding": "on", "offload": 1.0},
        pytest.param({"sharding": "overlap"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trainer_that_rests_before_every_request_gives_the_digits_of_one_that_never_does(
    options: dict[str, Any], untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    ((never, rests),) = one_process.run(work_with_and_without_rest, untied, tmp_path, options)
    assert rests == never
