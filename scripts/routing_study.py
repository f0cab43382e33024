"""How far a bfloat16 engine and a float32 trainer are apart, by the routing kept and by the age of the rollouts.

    python scripts/routing_study.py --seeds 1 2 3 --runs runs/routing_study --json study.json --plot study.png

Per seed: a cold start, then `moerl train recipe=routing_study`, whose first rollouts (policy version 0) and checkpoints
are kept. These rollouts are then scored by the weights of k = 0, 1, 2, 4 and 8 updates later, inside the recorded kept
sets, with routing of `keep_routing.mode` off (the scoring weights' own), trainer (that of version 0 in the trainer) and
rollout (the engine's). The floor is the same engine, weights and seeds once more with other sequences side by side.
Keys of `moerl train` given first (`model.architecture.num_experts=32`) hold for all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from moerl.algorithms.arrays import mismatch
from moerl.batching.packing import PackOptions, pack_trajectories
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.disk import read_parquet
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Trajectory
from moerl.diagnostics.colors import BLUE, GREEN, ORANGE
from moerl.diagnostics.plots import INK, QUIET, new_figure, quiet_frame
from moerl.models.description import read_model
from moerl.orchestration.ends import read_ends
from moerl.ranks.libraries import quiet_libraries
from moerl.rollout.factory import embedded_engine
from moerl.rollout.tokenizers import read_tokenizer
from moerl.trainer import groups
from moerl.trainer.losses import Scorer
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer, RowScores

UPDATES = (0, 1, 2, 4, 8)
MODES = ("off", "trainer", "rollout")
MICROBATCH_TOKENS = 8192
SIDE_BY_SIDE = 24
"""Sequences that decode together when the engine runs once more; the run itself decodes all of a step together."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one scoring of the rollouts is from the engine's.

    mode: keep_routing.mode, or "floor". updates: k. routers: share of (token, MoE layer) whose experts are not the
    engine's, of those used; own: of those that the routers would have chosen by themselves. tokens: share of tokens
    with another expert used in some layer. abs_mean, k3: nats. far: share of tokens beyond a factor of 2.
    """

    seed: int
    mode: str
    updates: int
    routers: float
    own: float
    tokens: float
    abs_mean: float
    far: float
    k3: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/routing_study"), help="what is there is used again")
    parser.add_argument("--json", type=Path, help="write every measurement")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of `moerl train`")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    found: list[Distance] = []
    layout = groups.start(rank=0, rendezvous="", dims=ParallelDims(), seed=0)
    for seed in arguments.seeds:
        models = prepare(arguments.runs / f"seed-{seed}", [f"seed={seed}", *arguments.overrides])
        rollouts = read_parquet(arguments.runs / f"seed-{seed}" / "rl" / "rollouts" / "step-000001.parquet")
        found.append(floor(models[0], rollouts, seed))
        found.extend(distances(models, rollouts, layout, seed))
    groups.stop()
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    if arguments.plot:
        draw(found, arguments.plot)
    return 0


def prepare(folder: Path, overrides: Sequence[str]) -> dict[int, Path]:
    """Model directories by updates; whatever is not there yet is trained and exported."""
    common = ["recipe=routing_study", *overrides]
    cold, run = folder / "cold", folder / "rl"
    if not (cold / "cold_start").exists():
        _moerl("sft", *common, "checkpoint.every=0", f"run_dir={cold}")
    if not (run / "summary.json").exists():
        _moerl(
            "train", *common, "model=pretrained", f"model.path={cold / 'cold_start'}", "sft.steps=0", f"run_dir={run}"
        )
    models = {0: cold / "cold_start"}
    for updates in UPDATES[1:]:
        models[updates] = folder / f"version-{updates}"
        if not models[updates].exists():
            _moerl("export", str(run), "--step", str(updates), "--output", str(models[updates]))
    return models


def _moerl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "moerl", *arguments], check=True)


def distances(
    models: dict[int, Path], rollouts: Sequence[Trajectory], layout: RankCoordinates, seed: int
) -> Iterator[Distance]:
    """Every mode by the weights of every k."""
    samples = [TrainSample(t, np.zeros(len(t), np.float32)) for t in rollouts]
    by_engine = pack_trajectories(samples, PackOptions(MICROBATCH_TOKENS), replay=True)
    by_trainer: Sequence[Microbatch] = ()
    for updates, path in models.items():
        trainer = MegatronTrainer(
            replace(read_model(path), spec=rollouts[0].spec), layout, ModelOptions(dtype="float32"), None
        )

        def scored(batches: Sequence[Microbatch], trainer: MegatronTrainer = trainer) -> list[RowScores]:
            return trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True)

        report, recorded = trainer.score_and_record(by_engine, Scorer(by_engine, keep_mask=True))
        by_trainer = by_trainer or recorded.batches
        passes = {
            "off": (recorded.batches, report.rows),
            "trainer": (by_trainer, scored(by_trainer)),
            "rollout": (by_engine, scored(by_engine)),
        }
        for mode in MODES:
            used, rows = passes[mode]
            yield distance(seed, mode, updates, by_engine, used, rows)


def distance(
    seed: int,
    mode: str,
    updates: int,
    batches: Sequence[Microbatch],
    used: Sequence[Microbatch],
    rows: Sequence[RowScores],
) -> Distance:
    """One scoring, compared with the engine. used: the batches with the routing that was enforced or recorded."""
    differing_TL = np.concatenate([_differing(b, u)[b.routed] for b, u in zip(batches, used, strict=True)])
    routed = [torch.from_numpy(batch.routed.copy()) for batch in batches]
    own = [
        r.layers_differing_T[mask].double()
        for r, mask in zip(rows, routed, strict=True)
        if r.layers_differing_T is not None
    ]
    logprobs = torch.cat([r.logprobs_T for r in rows])
    rollout = torch.from_numpy(np.concatenate([batch.rollout_logprobs for batch in batches]))
    mask = torch.from_numpy(np.concatenate([batch.loss_mask for batch in batches]))
    own_share = float(torch.cat(own).mean()) / differing_TL.shape[1]
    return _distance(seed, mode, updates, differing_TL, own_share, _mismatch(logprobs[mask], rollout[mask]))


def _differing(one: Microbatch, other: Microbatch) -> NDArray[np.bool_]:
    assert one.expert_ids is not None
    assert other.expert_ids is not None
    return (np.sort(one.expert_ids, axis=-1) != np.sort(other.expert_ids, axis=-1)).any(-1)


def floor(model: Path, rollouts: Sequence[Trajectory], seed: int) -> Distance:
    """The engine against itself: the rollouts' requests again, up to the first token that came out differently."""
    engine = embedded_engine(
        replace(read_model(model), spec=rollouts[0].spec), dtype="bfloat16", max_running=SIDE_BY_SIDE, version=0
    )
    ends = read_ends(model, read_tokenizer(model), rollouts[0].spec.vocab_size)
    again = {record.rollout_id: record.values for record in engine.generate([_request(t, ends) for t in rollouts])}
    differing, first, second = [], [], []
    for trajectory in rollouts:
        values = again[trajectory.lineage.rollout_id]
        length = min(len(trajectory), len(values["token_ids"]))
        unlike = np.flatnonzero(trajectory.token_ids[:length] != values["token_ids"][:length])
        same = int(unlike[0]) if len(unlike) else length
        ids = (np.sort(each[: same - 1], axis=-1) for each in (trajectory.expert_ids, values["expert_ids"]))
        differing.append((next(ids) != next(ids)).any(-1))
        sampled = trajectory.sampled[:same]
        first.append(torch.from_numpy(trajectory.rollout_logprobs[:same][sampled]))
        second.append(torch.from_numpy(values["rollout_logprobs"][:same][sampled]))
    differing_TL = np.concatenate(differing)
    own = float(differing_TL.mean())
    return _distance(seed, "floor", 0, differing_TL, own, _mismatch(torch.cat(second), torch.cat(first)))


def _request(trajectory: Trajectory, ends: tuple[int, ...]) -> RolloutRequest:
    prompt, sampled = trajectory.turns
    assert sampled.sampling is not None
    ids = tuple(trajectory.token_ids[: prompt.end].tolist())
    return RolloutRequest(trajectory.lineage, ids, sampled.sampling, len(trajectory) - prompt.end, ends)


def _mismatch(logprobs: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    return mismatch(logprobs.cpu().numpy(), rollout.numpy())


def _distance(
    seed: int, mode: str, updates: int, differing_TL: NDArray[np.bool_], own: float, sums: dict[str, float]
) -> Distance:
    return Distance(
        seed,
        mode,
        updates,
        routers=float(differing_TL.mean()),
        own=own,
        tokens=float(differing_TL.any(-1).mean()),
        abs_mean=sums["mismatch_abs_mean"],
        far=sums["mismatch_far_share"],
        k3=sums["mismatch_k3"],
    )


def show(found: Sequence[Distance]) -> None:
    """Means over seeds, and the range over seeds of k3."""
    table = Table("k", "mode", "routers used", "own choice", "tokens", "|d|", "beyond ln 2", "k3", "k3, least to most")
    for updates, mode in [(0, "floor"), *((k, mode) for k in UPDATES for mode in MODES)]:
        each = [d for d in found if (d.updates, d.mode) == (updates, mode)]
        mean = {
            name: statistics.mean(getattr(d, name) for d in each)
            for name in ("routers", "own", "tokens", "abs_mean", "far", "k3")
        }
        table.add_row(
            str(updates),
            mode,
            *(f"{mean[name]:.2%}" for name in ("routers", "own", "tokens")),
            f"{mean['abs_mean']:.2e}",
            f"{mean['far']:.3%}",
            f"{mean['k3']:.2e}",
            f"{min(d.k3 for d in each):.2e} to {max(d.k3 for d in each):.2e}",
        )
    Console(width=140).print(table)


def draw(found: Sequence[Distance], path: Path) -> None:
    """Experts that differ, mean difference and k3, by updates; bands are the range over seeds."""
    figure = new_figure(12.0, 4.2)
    charts = (
        ("routers", "Experts that are not the engine's", "share of routers"),
        ("abs_mean", "Mean difference of log-probs", "nats"),
        ("k3", "k3", "nats"),
    )
    colors = {"off": ORANGE, "trainer": GREEN, "rollout": BLUE}
    for axis, (name, title, unit) in zip(figure.subplots(1, 3), charts, strict=True):
        for mode, color in colors.items():
            values = np.array([[getattr(d, name) for d in found if (d.updates, d.mode) == (k, mode)] for k in UPDATES])
            places = range(len(UPDATES))
            axis.fill_between(places, values.min(1), values.max(1), color=color, alpha=0.18, linewidth=0)
            axis.plot(places, values.mean(1), color=color, marker="o", markersize=4, label=mode)
        floors = [getattr(d, name) for d in found if d.mode == "floor"]
        axis.axhline(statistics.mean(floors), color=QUIET, linestyle="--", linewidth=1.2, label="same engine again")
        axis.set_xticks(range(len(UPDATES)), [str(k) for k in UPDATES])
        axis.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=8)
        axis.set_xlabel("updates since the rollouts", color=QUIET)
        axis.set_ylabel(unit, color=QUIET)
        if name != "routers":
            axis.set_yscale("log")
        quiet_frame(axis)
        axis.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
