"""Samples that are trained per second of CPU time, against TRL's GRPOTrainer, in turns.

`python bench/peers.py MODEL [--steps N] [--json FILE]`, with the directory of the model that both begin with, for
example the `cold_start` of a laptop run. TRL is no dependency of moerl: install it too (`pip install trl`).
Both do GRPO on the laptop's recipe: its prompts, rewards, sampling and batches of 24 prompts x 8 responses, one CPU
thread each. moerl samples with its own precision of the recipe, keeps routing and sampling masks, and proves the replay
at every step; TRL trains and samples in float32, as it is shipped. What moerl measures now and then and TRL does not
is left out: evaluation, and the mismatch with nothing kept. Steps alternate; nothing else should run. The CPU
time is that of the process and of all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from _report import Result, command_line, report

SAMPLES, WARM_UP, GOAL = 24 * 8, 3, 3.0
DRAWS = 2000


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its living descendants."""
    parents: dict[int, tuple[int, float]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    ours, grew = {os.getpid()}, True
    while grew:
        found = {pid for pid, (parent, _) in parents.items() if parent in ours}
        grew, ours = not found <= ours, ours | found
    return sum(parents[pid][1] for pid in ours)


class Gate:
    """Between two steps: tells what the last one cost, and waits for the turn of the next."""

    def __init__(self) -> None:
        self._last: float | None = None

    def step(self, tokens: float) -> None:
        if self._last is not None:
            print(msgspec.json.encode((cpu_seconds() - self._last, tokens)).decode(), flush=True)
        else:
            print("ready", flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._last = cpu_seconds()


def moerl_worker(model: str, folder: str) -> None:
    from moerl.cli import main as moerl
    from moerl.orchestration.batches import Minibatch
    from moerl.orchestration.run import Run

    gate, log = Gate(), Run.log

    def gated(self: Run, stage: str, step: int, metrics: dict[str, float], minibatches: Sequence[Minibatch]) -> None:
        log(self, stage, step, metrics, minibatches)
        gate.step(metrics["response/length_mean"])

    Run.log = gated  # type: ignore[method-assign]
    overrides = [f"model.path={model}", "model.architecture=null", "sft.steps=0", "rl.steps=10000"]
    quiet = ["evaluation.every=0", "evaluation.heldout_problems=1", "evaluation.dev_problems=1"]
    quiet += ["checkpoint.every=0", "mismatch.every=0"]
    moerl(["train", "recipe=laptop", f"run_dir={folder}/run", *overrides, *quiet])


def trl_worker(model: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from moerl.config.load import load_config
    from moerl.contract.trajectory import FinishReason

    # No dependencies of moerl.
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(1)
    config = load_config(["recipe=laptop", f"run_dir={folder}/run"], command="train")
    task, rl, rollout = config.task.open(), config.rl, config.rollout
    by_text = {prompt.text: prompt for prompt in task.prompts("train", 4000)}
    gate, lengths = Gate(), [0.0]

    # TRL calls it with these names.
    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[0] = statistics.mean(map(len, completion_ids))
        pairs = zip(prompts, completions, strict=True)
        return [task.reward(by_text[text], answer, FinishReason.STOP).result()["reward"] for text, answer in pairs]

    class Gated(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.step(lengths[0])

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = trl.GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=rl.prompts_per_step * rl.group_size,
        num_generations=rl.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        learning_rate=config.optimizer.lr,
        beta=0.0,
        max_steps=10000,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=config.seed,
    )
    trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": list(by_text)}),
        processing_class=tokenizer,
        callbacks=[Gated()],
    ).train()


WORKERS: dict[str, Callable[[str, str], None]] = {"moerl": moerl_worker, "trl": trl_worker}


class Peer:
    """One trainer in a process of its own, which does one step for each command."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name = name
        command = [sys.executable, __file__, str(model), "--worker", name, "--folder", str(folder / name)]
        (folder / name).mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._log = folder / f"{name}.log"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=environment,
        )
        self._line("ready")

    def step(self) -> tuple[float, float]:
        """CPU seconds and mean length of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line("["), type=tuple[float, float])

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """95% of the ratio of the sums, by drawing pairs of steps again."""
    draw, pairs = random.Random(0), list(zip(ours, theirs, strict=True))
    ratios = []
    for _ in range(DRAWS):
        drawn = draw.choices(pairs, k=len(pairs))
        ratios.append(sum(pair[1] for pair in drawn) / sum(pair[0] for pair in drawn))
    ratios.sort()
    return ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS)]


def compare(model: Path, steps: int, json_path: Path | None) -> None:
    began = command_line()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(name, model, Path(folder)) for name in WORKERS]
        for step in range(WARM_UP + steps):
            for peer in peers:
                taken[peer.name].append(peer.step())
            print(
                f"step {step + 1} of {WARM_UP + steps}: "
                + ", ".join(f"{n} {t[-1][0]:.2f} s ({t[-1][1]:.0f} tokens)" for n, t in taken.items())
            )
        for peer in peers:
            peer.close()
    seconds = {name: [each[0] for each in steps[WARM_UP:]] for name, steps in taken.items()}
    lengths = {name: statistics.mean(each[1] for each in steps[WARM_UP:]) for name, steps in taken.items()}
    ratio = sum(seconds["trl"]) / sum(seconds["moerl"])
    low, high = ratio_interval(seconds["moerl"], seconds["trl"])
    results = [began]
    for name, values in seconds.items():
        spread = max(values) - min(values)
        results.append(Result(f"{name}: CPU time of a step", statistics.median(values), unit="s", spread=spread))
        results.append(Result(f"{name}: mean response", lengths[name], unit="tokens"))
        results.append(Result(f"{name}: samples", SAMPLES * len(values) / sum(values), unit="/CPU s"))
    results += [
        Result("samples per CPU second, moerl / trl", ratio, f">= {GOAL:g}", ratio >= GOAL, spread=high - low),
        Result("the same, 95% from", low),
        Result("the same, 95% to", high),
    ]
    report(results, json_path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=24, metavar="N")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WORKERS[arguments.worker](str(arguments.model.resolve()), arguments.folder)
    else:
        compare(arguments.model, arguments.steps, arguments.json)


if __name__ == "__main__":
    main()
