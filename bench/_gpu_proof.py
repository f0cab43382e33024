"""Calls of a training step with and without replay and proof: launches, synchronisations, copies. A check of
`gpu_check.py`.

What replay and proof add to the time of a step is measured by the checks ``slice16`` and ``slice128``, which run alone;
numbers of calls do not change if other checks run at the same time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from _gpu_checks import Findings, keep
from _gpu_models import SIZES, write_checkpoint
from _gpu_profile import count_calls
from _measure import Step
from _ranks import as_only_rank
from _report import Result
from _samples import long_tailed_lengths, make_samples, with_routes
from _steps import make_step, make_trainer, natural_routes, num_trained, shares

from moerl.contract.parallel import RankCoordinates

ROWS = {"cuda": 4096, "cpu": 128}
ROW_BUDGET = {"cuda": 1024, "cpu": 96}
MEAN_LENGTH = {"cuda": 200, "cpu": 40}
OFF = "without replay"


def check(device: str) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), device)
        return as_only_rank(_measure, Path(folder), device)


def _measure(layout: RankCoordinates, model: Path, device: str) -> Findings:
    trainer = make_trainer(layout, model, SIZES[device].spec, "bfloat16")
    budget = ROW_BUDGET[device]
    drawn = make_samples(
        SIZES[device].spec, long_tailed_lengths(ROWS[device], MEAN_LENGTH[device], budget - 2, seed=3), seed=4
    )
    samples = with_routes(drawn, natural_routes(trainer, drawn, budget))
    packed, unrouted = (shares(trainer, samples, budget, replay=replay) for replay in (True, False))
    trained = num_trained(samples)
    steps: dict[str, Step] = {
        "with replay and proof": make_step(trainer, packed, trained),
        "with replay, without proof": make_step(trainer, packed, trained, prove=False),
        OFF: make_step(trainer, unrouted, trained),
    }
    for step in steps.values():
        step()
    counted = {name: count_calls(step, device) for name, step in steps.items()}
    results = [Result("microbatches of a step", len(packed), unit="microbatches")]
    for name, calls in counted.items():
        results += calls.results(f"a step {name}")
    on, off = counted["with replay and proof"], counted[OFF]
    for kind in ("synchronisations", "launches", "copies"):
        results.append(
            Result(f"{kind} added by replay and proof", getattr(on, kind) - getattr(off, kind), unit="calls")
        )
    found = Findings(results, texts={"profile": on.table})
    if device == "cuda":
        keep(found)
        # `trainer.megatron={apply_rope_fusion: true}`: the bridge leaves it off for some families.
        trainer.model.config.apply_rope_fusion = True
        steps["with replay and proof"]()
        fused = count_calls(steps["with replay and proof"], device)
        results += fused.results("a step with fused RoPE")
    return found
