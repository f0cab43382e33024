"""A run of one rank on the device that tests pretend: nothing is left on the host that a GPU would need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
import torch
from ranks import Ranks
from replay_steps import make_batches, step
from torch import nn

from moerl.batching.packing import PackOptions, pack_text_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import TextSample


def places_of_a_model(layout: Any, path: Path) -> dict[str, str]:
    from pretended_device import pretended_device

    with pretended_device():
        trainer = tiny_moe.build(layout, path, optimizer=None)
        tensors = [
            each for chunk in trainer.model.chunks for each in (*chunk.named_parameters(), *chunk.named_buffers())
        ]
        return {name: str(tensor.device) for name, tensor in tensors}


def test_every_parameter_and_buffer_of_a_model_is_moved_to_the_device(untied: Path, one_process: Ranks) -> None:
    (places,) = one_process.run(places_of_a_model, untied)
    assert any(name.endswith("router.weight") for name in places)
    assert set(places.values()) == {"cpu:0"}


def start_without_the_move(layout: Any, path: Path) -> None:
    from pretended_device import MixedDevicesError, pretended_device

    def stay(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return self

    with pytest.MonkeyPatch.context() as patch, pretended_device():
        patch.setattr(nn.Module, "to", stay)
        with pytest.raises(MixedDevicesError, match=r"broadcast_\.default of tensors on the host"):
            tiny_moe.build(layout, path)


def test_a_model_that_stays_on_the_host_does_not_start(untied: Path, one_process: Ranks) -> None:
    one_process.run(start_without_the_move, untied)


def run_on(around: Callable[[], Any], layout: Any, path: Path, folder: Path, options: dict[str, Any]) -> list[float]:
    """Everything that a run asks of a trainer; per pass the sum of its losses or log-probs."""
    from moerl.trainer.losses import Reference, Scorer, TextLoss

    with around():
        trainer = tiny_moe.build(layout, path, **options)
        batches, texts = make_batches(3), make_texts()
        trained, learned = (tiny_moe.num_trained(each) for each in (batches, texts))
        reference = tiny_moe.build(layout, path, optimizer=None, dtype=options.get("dtype", "float32"))
        hidden = reference.last_hidden(batches, enforce=True)
        scorer = Scorer(batches, True, with_full=True, reference=Reference(reference, hidden, "kept"))
        scored = trainer.score(batches, scorer, enforce=True)
        recorded, routing = trainer.score_and_record(batches, Scorer(batches, keep_mask=True))
        steps = [
            trainer.step(texts, TextLoss(texts, trainer.spec.vocab_size, learned), enforce=False),
            step(trainer, batches),
            trainer.step(routing.batches, tiny_moe.policy_loss(trainer, routing.batches, trained), enforce=True),
        ]
        trainer.trace(batches, 0)
        written = tiny_moe.save(trainer, folder, "0-rl-000003")
        trainer.restore(written)
        steps.append(step(trainer, batches))
        weights = tiny_moe.exported(trainer)
    assert all(report.update is not None and not report.update.skipped for report in steps)
    passes = [[row.logprobs_T for row in scored], [row.logprobs_T for row in recorded.rows]]
    passes += [[row.losses_T for row in report.rows] for report in steps]
    return [float(torch.cat(each).sum()) for each in passes] + [float(sum(abs(w).sum() for w in weights.values()))]


def run_on_a_device(layout: Any, path: Path, folder: Path, options: dict[str, Any]) -> list[list[float]]:
    from contextlib import nullcontext

    from pretended_device import pretended_device

    places = (pretended_device, nullcontext)
    return [run_on(place, layout, path, folder / place.__name__, options) for place in places]


def make_texts() -> list[Any]:
    samples = tiny_moe.make_samples(5, (21, 30, 12))
    texts = [TextSample(each.trajectory.token_ids.copy(), each.trajectory.sampled.copy()) for each in samples]
    return pack_text_for_ranks(texts, 1, PackOptions(48, Padding(total=4)))[0]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "recompute": "full"},
        pytest.param({"dtype": "bfloat16", "sharding": "on", "offload": 0.5}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "sharding": "overlap", "expert_bias": "update"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective", "sharding": "on", "moe_aux_loss_coef": 0.05}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_on_a_device_mixes_no_places_and_gives_the_digits_of_the_host(
    options: dict[str, Any], untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    ((on_device, on_host),) = one_process.run(run_on_a_device, untied, tmp_path, options)
    assert on_device == on_host
