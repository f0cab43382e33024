"""What Keep Routing and Keep Sampling Mask cost a training step: both on, with proof, against both off.

`python bench/step_overhead.py [--json FILE]`. The laptop recipe's model and 192 real rollouts from the embedded engine;
forward, backward, proof and update on one process and one thread, in alternating turns. The baseline is the same step
with the trainer's own routing and full-vocabulary scores. Ratios are of the least disturbed turns, since other load on
the machine only ever adds time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _report import Result, json_argument, report

from moerl.algorithms.grpo import GRPO
from moerl.buffer.packing import PackOptions, pack_trajectories
from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.contract.batch import Microbatch
from moerl.contract.quarantine import Quarantine
from moerl.orchestration.models import build_model, make_engine, read_spec, read_tokenizer
from moerl.orchestration.rollouts import Collector, sampling_params, with_advantages
from moerl.tasks.registry import make_task, make_tokenizer
from moerl.trainer import layout
from moerl.trainer.losses import PolicyGradientLoss, Scorer
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer

REPEATS = 9
GOAL = 1.05


def rollouts(config: RunConfig, folder: Path) -> tuple[Path, list[Microbatch], MegatronTrainer]:
    """A fresh model, packed rollouts of it, and its trainer."""
    task = make_task(config.task)
    assert config.model.architecture is not None
    path = folder / "model"
    build_model(config.model.architecture, make_tokenizer(task, 512), config.seed, path)
    tokenizer = read_tokenizer(path)
    spec = read_spec(path, tokenizer)
    engine = make_engine(path, spec, dtype="bfloat16", max_running=192, version=0)
    collector = Collector(engine, task, tokenizer, Quarantine(folder / "quarantine", 0.0, spec=spec), 40)
    prompts = task.prompts("train", config.algorithm.prompts_per_step)
    sampling = sampling_params(config.rollout, config.seed)
    requests = collector.requests(
        prompts, run="bench", count=config.algorithm.group_size, sampling=sampling, prefixes={}
    )
    samples = with_advantages(list(collector.collect(prompts, requests, trainer_version=0, prefixes={})), GRPO())
    batches = pack_trajectories(samples, PackOptions(config.trainer.microbatch_tokens), replay=True)
    where = layout.start(rank=0, world_size=1, rendezvous="", tensor=1, expert=1, seed=config.seed)
    return path, batches, MegatronTrainer(path, spec, where, ModelOptions(), config.optimizer, total_steps=1000)


def seconds_in_turns(functions: list[Callable[[], object]]) -> list[list[float]]:
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(REPEATS + 1):
        for function, own in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            if turn:
                own.append(time.perf_counter() - start)
    return taken


def main() -> None:
    json_path = json_argument(__doc__)
    torch.set_num_threads(1)
    config = load_config(["recipe=laptop"], command="train")
    with tempfile.TemporaryDirectory() as folder:
        _, batches, trainer = rollouts(config, Path(folder))
        num_tokens = float(sum(batch.loss_mask.sum() for batch in batches))

        def step(*, routing: bool, mask: bool) -> Callable[[], object]:
            loss = PolicyGradientLoss(Scorer(batches, trainer.shard, keep_mask=mask), GRPO(), num_tokens, routing)
            return lambda: trainer.step(batches, loss, enforce=routing)

        cases = {
            "neither": step(routing=False, mask=False),
            "routing kept and proved": step(routing=True, mask=False),
            "sampling mask kept": step(routing=False, mask=True),
            "both": step(routing=True, mask=True),
        }
        taken = dict(zip(cases, seconds_in_turns(list(cases.values())), strict=True))
        layout.stop()
    base = min(taken["neither"])
    num_rows = sum(batch.num_rows for batch in batches)
    results = [Result(f"step, neither ({num_rows} rows)", base, unit="s", spread=max(taken["neither"]) - base)]
    for name in list(cases)[1:]:
        ratio = min(taken[name]) / base
        spread = (max(taken[name]) - min(taken[name])) / base
        results.append(Result(f"{name} / neither", ratio, f"<= {GOAL}", ratio <= GOAL, "ratio", spread))
    report(results, json_path)


if __name__ == "__main__":
    main()
