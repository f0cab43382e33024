"""Mistakes of a newcomer: each gives one line that names it, before torch is loaded if it can be known then."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from factories import write_hf_config, write_hf_model
from moerl_runs import Runs
from waiting import run_within

from moerl.config.load import CONFIG_FILE, dump_config, load_config

ROOT = Path(__file__).parents[2]
TINY = "train recipe=tiny"
FEW = "rl.prompts_per_step=4 evaluation.dev_problems=4 evaluation.heldout_problems=4 sft.num_examples=16"
TASK = f"{TINY} task=jsonl {FEW} task.reward_timeout_seconds=5.0"
SUMS = f"{TASK} task.path=sums.jsonl"
REWARD = f"{TASK} task.reward=rewards:good"
MODEL = "train recipe=laptop model=pretrained"
EVAL = "eval model=pretrained"
OWN = "train --config-dir own"

NO_HUB = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}

EARLY = {
    # The command line.
    "trian": "unknown command; seen: trian; expected: one of train, sft,",
    "Train recipe=tiny": "did you mean `moerl train`?",
    "recipe=laptop": "unknown command; seen: recipe=laptop",
    "plan memry": "did you mean `moerl plan memory`?",
    "sglang instal": "did you mean `moerl sglang install`?",
    "train --fast": "unrecognized arguments: --fast",
    "train --recipe=laptop": "keys have no dashes, as in recipe=laptop",
    "train --resume runs/a": "keys have no dashes",
    "train laptop": "override: not an assignment; seen: laptop; expected: key=value; remedy: did you mean model=laptop",
    "train recipe laptop": "did you mean recipe=VALUE?",
    "train resume": "did you mean resume=VALUE?",
    "train --config-dir": "argument --config-dir: expected one argument",
    # Recipes and groups.
    "train recipe=labtop": "recipe: no such option; seen: labtop; expected: one of calculator, code, code_problems,",
    "train recipe=laptop,tiny": "recipe: one run takes one value",
    "train recipe=": "recipe: empty value",
    "train recipe=laptop.yaml": "did you mean laptop?",
    "train model=gpt2": "model: no such option; seen: gpt2; expected: one of laptop, pretrained, tiny",
    "train task=gsm8k": "task: no such option",
    "train rollout=vllm": "rollout: no such option",
    "train algorithm=ppo": "algorithm: no such option; seen: ppo; expected: one of",
    "train --config-dir nowhere recipe=mine": "--config-dir: no such directory; seen: nowhere",
    f"{OWN} recipe=no_package": "make `# @package _global_` the first line of the recipe file",
    f"{OWN} recipe=tab": "configuration files: cannot be composed; seen: while scanning",
    f"{OWN} recipe=misspelt": "algoritm: unknown key; expected: one of",
    # Keys and values.
    f"{TINY} steps=3": "steps: unknown key; expected: one of recipe, seed,",
    f"{TINY} lr=1e-5": "did you mean optimizer.lr or sft.optimizer.lr?",
    f"{TINY} learning_rate=1e-5": "a key of TRL; expected: optimizer.lr",
    f"{TINY} rl.stepps=3": "did you mean rl.steps?",
    f"{TINY} optimizer.lr": "override: not an assignment; seen: optimizer.lr",
    f"{TINY} optimizer.lr=-1": "optimizer.lr: wrong value; seen: -1 (int); expected: greater than 0",
    f"{TINY} optimizer.lr=1e-5x": "optimizer.lr: wrong value; seen: '1e-5x' (str); expected: a valid number",
    f"{TINY} optimizer.lr=nan": "optimizer.lr: wrong value; seen: nan (float); expected: a finite number",
    f"{TINY} optimizer=adam": "optimizer: wrong value; seen: 'adam' (str); expected: an object",
    f"{TINY} rl.steps=0": "rl.steps: wrong value; seen: 0",
    f"{TINY} rl.steps=1e3": "rl.steps: wrong value; seen: 1000.0 (float); expected: a valid integer",
    f"{TINY} rl.steps=null": "rl.steps: wrong value; seen: null",
    f"{TINY} rl.steps=99999999999999999999": "rl.steps: wrong value; seen: 99999999999999999999",
    f"{TINY} rl.group_size=1": "rl.group_size: wrong value",
    f"{TINY} rl.minibatches=3": "rl.minibatches: does not divide rl.prompts_per_step",
    f"{TINY} rl.prompts_per_step=1000": "rl.prompts_per_step: the task has fewer problems; seen: 1000",
    f"{TINY} seed=-1": "seed: wrong value; seen: -1",
    f"{TINY} seed=99999999999999999999999": "seed: wrong value",
    f"{TINY} num_threads=0": "num_threads: wrong value",
    f"{TINY} num_threads=1000000": "num_threads: wrong value; seen: 1000000 (int); expected: less than",
    f"{TINY} rollout.top_k=0": "rollout.top_k: wrong value",
    f"{TINY} rollout.top_p=1.5": "rollout.top_p: wrong value",
    f"{TINY} rollout.temperature=0": "rollout.temperature: greedy samples cannot be trained on",
    f"{TINY} rollout.max_new_tokens=9999": "trainer.microbatch_tokens: does not hold one response",
    f"{TINY} rollout.dtype=fp8": "rollout.dtype: wrong value; seen: 'fp8'",
    f"{TINY} keep_routing.mode=yes": "keep_routing.mode: wrong value; seen: 'yes'",
    f"{TINY} model.architecture.head_dim=7": "rotary embeddings need an even width",
    f"{TINY} model.architecture.experts_per_token=9": "experts_per_token: more than there are experts",
    f"{TINY} model.architecture.num_layers=100000000": "model.architecture.num_layers: wrong value",
    f"{TINY} model.architecture.vocab_size=9999999999": "model.architecture.vocab_size: wrong value",
    f"{TINY} model.tokenizer=folder": "folder: no tokenizer; seen: no such file; expected: tokenizer.json",
    f"{TINY} model.architecture.hidden_size=9999999": "model.architecture: larger than the memory of this machine",
    f"{TINY} parallel.tensor=3": "parallel.tensor: does not divide model.architecture.num_attention_heads",
    f"{TINY} parallel.data=65536": "parallel.data: an optimizer step has fewer sequences than data-parallel ranks",
    f"{TINY} parallel.pipeline=99999999": "parallel.pipeline: wrong value",
    f"{TINY} checkpoint.keep=1": "checkpoint.keep: wrong value",
    f"{TINY} quarantine.max_rate=2": "quarantine.max_rate: wrong value",
    f"{TINY} evaluation.heldout_problems=1000000000": "evaluation.heldout_problems: the task has fewer problems",
    f"{TINY} task.max_terms=99999999999": "task.max_terms: wrong value",
    f"{TINY} task.max_digits=400": "task.max_digits: wrong value",
    f"{TINY} task.path=sums.jsonl": "task.path: not a key of task chain_sum; expected: task=dataset, which has it",
    f"{TINY} rollout.servers=2": "rollout.servers: not a key of rollout embedded",
    "sft recipe=tiny sft.steps=0": "sft.steps: nothing to do",
    # Run directories.
    f"{TINY} run_dir=": "run_dir: empty value",
    f"{TINY} run_dir=\"''\"": "run_dir: wrong value; seen: '' (str); expected: a path of one character or more",
    f"{TINY} run_dir=a=b": "run_dir: the value cannot be read; seen: a=b",
    f"{TINY} run_dir=~/mine": "run_dir: the value cannot be read; seen: ~/mine",
    f"{TINY} run_dir=\"'~/mine'\"": "a path without ~, which the shell leaves as it is behind KEY=; write $HOME",
    f"{TINY} run_dir={'x' * 300}": "a path of names of at most 255 bytes",
    f"{TINY} run_dir=run": "run_dir: holds a run already",
    f"{TINY} run_dir=file": "run_dir: cannot be written; seen: ",
    f"{TINY} run_dir=file/below": "run_dir: cannot be written; seen: ",
    # Going on.
    "train resume=nowhere": "run directory: not there; seen: nowhere",
    "train resume=": "resume: one run directory",
    "train resume=folder": "run directory: holds no run; seen: folder",
    "train resume=run/config.yaml": "remedy: give the directory: run",
    "train resume=broken_run": "broken_run/config.yaml: cannot be read",
    "train resume=empty_run": "empty_run/config.yaml: not the configuration of a run",
    "train resume=run seed=2": "seed: cannot change when a run goes on: weights, the order of prompts",
    "train resume=run rl.stepps=4": "rl.stepps: unknown key",
    "train resume=run rl.steps=x": "rl.steps: wrong value",
    "train resume=run recipe=laptop": "recipe: cannot change when a run goes on",
    "sft resume=run": "resume: the run belongs to another command",
    "eval resume=run": "resume: moerl eval has nothing to go on with",
    # Models.
    "train model=pretrained": "model.path: no value given",
    "train recipe=pretrained": "model.path: no value given",
    "train model=pretrained model.path=model": "recipe: none was chosen for a model that exists",
    "train model.path=model": "model.path and model.architecture: one of them must be given; seen: both",
    f"{MODEL} model.path=Qwen/Qwen3-30B-A3B": "is no directory here, nor is it whole in the cache of the hub",
    f"{MODEL} model.path=./Qwen/Qwen3-30B-A3B": "model.path: not a Hugging Face model directory",
    f"{MODEL} model.path=file": "model.path: not a Hugging Face model directory",
    f"{MODEL} model.path=folder": "model.path: not a Hugging Face model directory",
    f"{MODEL} model.path=no_json": "no_json/config.json cannot be read",
    f"{MODEL} model.path=dense": "unknown mixture-of-experts architecture; seen: model_type='qwen3'",
    f"{MODEL} model.path=odd": "odd/config.json: ",
    f"{MODEL} model.path=model": "model: no weights; seen: no safetensors file",
    f"{EVAL} model.path=cut": "cut/model.safetensors cannot be used; seen: ",
    f"{EVAL} model.path=no_tokenizer": "no_tokenizer: no tokenizer",
    f"{EVAL} model.path=more_layers": "weights and config.json do not fit; seen: ",
    f"{EVAL} model.path=wider": "of shape [4, 8]; expected: [6, 8], by its config.json",
    f"{EVAL} model.path=pickled": "pickled: no weights; seen: pytorch_model.bin, a pickle",
    "eval": "model.path: moerl eval needs trained weights",
    "rollout model=pretrained model.path=nowhere": "model.path: not a Hugging Face model directory",
    "eval model=pretrained model.path=model parallel=ep2": "parallel: moerl eval runs in one process",
    # Tasks and rewards.
    REWARD: "task.path: no value given",
    f"{REWARD} task.path=nowhere.jsonl": "task.path: no such file",
    f"{REWARD} task.path=folder": "task.path: a directory",
    f"{REWARD} task.path=broken.jsonl": "task.path: bad line",
    f"{REWARD} task.path=questions.jsonl": "seen: keys 'question'; expected: 'prompt' among them",
    f"{REWARD} task.path=latin.jsonl": "expected: a JSON object in UTF-8",
    f"{REWARD} task.path=few.jsonl": "the task has fewer problems",
    f"{SUMS} task.reward=good": "task.reward: not the name of a function; seen: 'good'; expected: \"package.module:",
    f"{SUMS} task.reward=rewards.py:good": "task.reward: cannot import rewards.py:good",
    f"{SUMS} task.reward=nowhere:good": "No module named 'nowhere'",
    f"{SUMS} task.reward=rewards:nope": "module 'rewards' has no function 'nope'",
    f"{SUMS} task.reward=rewards:raises": "reward function rewards:raises raised at ",
    f"{SUMS} task.reward=rewards:not_finite": "the result is not finite: nan",
    f"{SUMS} task.reward=rewards:says": "the result is of type str, not a number: 'good'",
    f"{SUMS} task.reward=rewards:takes_one": "takes_one() takes 1 positional argument but 2 were given",
    f"{SUMS} task.reward=rewards:no_reward": "a mapping without 'reward'",
    f"{SUMS} task.reward=rewards:dies": "its process ended by signal SIGSEGV",
    f"{SUMS} task.reward=rewards:hangs task.reward_timeout_seconds=0.2": "gave no answer at ",
    f"{SUMS} task.reward=rewards:good task.response_key=answer": "rows have no demonstration",
    f"{SUMS} task.reward=rewards:good task.heldout_fraction=0.9 task.dev_fraction=0.5": "nothing is left to train on",
    # Servers.
    f"{TINY} rollout=sglang": "SGLang environment ",
    f"{TINY} rollout=sglang_server": "rollout.server: no value given",
    f"{TINY} rollout=sglang_server rollout.server=nowhere.json": "server file ",
    "sglang check --env nowhere": "SGLang environment ",
    "serve --model model --folder served": "model: no weights",
    "serve --model model --folder served --tensor 4 --expert 3": "--expert: no divisor of --tensor",
    "serve": "the following arguments are required: --model, --folder",
    # Plans and tools.
    "plan memory recipe=laptop --gpu-memory-gib -1": "--gpu-memory-gib: invalid positive value",
    "plan memory recipe=pretrained": "model.path: no value given",
    "plan weights resume=run": "resume: a plan is made from a recipe and keys",
    "plan weights recipe=laptop weights.senders=3": "weights.senders: more than there are trainer ranks",
    "export": "the following arguments are required: RUN_DIR, --output",
    "export nowhere --output out": "run directory: not there",
    "export run --output file": "--output: exists already",
    "export run --output out --step newest": "argument --step: invalid int value: 'newest'",
    "verify nowhere.parquet --model model": "DUMP: no rollouts",
    "verify sums.jsonl --model nowhere": "--model: not a Hugging Face model directory",
}
"""By command line behind `moerl`, a part of the error. None of these needs torch."""

LATE = {
    "export run --output out": "checkpoint",
    "verify sums.jsonl --model model": "sums.jsonl",
    f"{TINY} model.architecture.vocab_size=1": "model.architecture.vocab_size",
}
"""The same for what is known only when libraries look at files."""

HELP = [
    *("--help", "plan --help", "sglang --help"),
    *(f"{name} --help" for name in ("train", "eval", "plan memory", "serve", "sglang install", "sglang check")),
    "plan memory recipe=laptop",
]

IN_ONE_PROCESS = """
import contextlib, functools, io, json, shlex, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "megatron"):
            raise RuntimeError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
from moerl.cli import main
from moerl.config import help_text

# Whoever gets as far as the task says what its recipe sets, which takes longest of all.
help_text.recipe_values = functools.cache(help_text.recipe_values)
ended = {}
for line in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(output):
        try:
            status = main(shlex.split(line))
        except BaseException as error:
            status = repr(error)
    ended[line] = (status, output.getvalue())
json.dump(ended, sys.stdout)
"""
"""Runs command lines one after the other; importing torch is an error."""

REWARDS = """
import os
import time

def good(row, response): return 0.5
def raises(row, response): return row["nope"]
def not_finite(row, response): return float("nan")
def says(row, response): return "good"
def takes_one(row): return 1.0
def no_reward(row, response): return {"accuracy": 1.0}
def dies(row, response): os.kill(os.getpid(), 11)
def hangs(row, response): time.sleep(600)
"""


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_damaged_models(here: Path) -> None:
    for name in ("cut", "no_tokenizer", "more_layers", "wider", "pickled"):
        (here / name).mkdir()
        write_hf_model(here / name, max_position_embeddings=512)
    write_hf_model(here / "wider", moe_intermediate_size=6, max_position_embeddings=512)
    shutil.copy2(here / "cut" / "model.safetensors", here / "wider" / "model.safetensors")
    write_hf_model(here / "more_layers", num_hidden_layers=3, max_position_embeddings=512)
    shutil.copy2(here / "cut" / "model.safetensors", here / "more_layers" / "model.safetensors")
    with (here / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    (here / "no_tokenizer" / "tokenizer.json").unlink()
    (here / "pickled" / "model.safetensors").rename(here / "pickled" / "pytorch_model.bin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's directory: what is right has a plain name, the rest is wrong in one way each."""
    here = tmp_path_factory.mktemp("newcomer")
    (here / "file").write_text("text\n")
    (here / "folder").mkdir()
    write_hf_config(here / "model", max_position_embeddings=512)
    write_damaged_models(here)
    write_hf_config(here / "odd", num_attention_heads=0)
    write_hf_config(here / "dense")
    (here / "dense" / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 32}')
    (here / "no_json").mkdir()
    (here / "no_json" / "config.json").write_text("{")
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(12) for b in range(12)]
    write_rows(here / "sums.jsonl", sums)
    write_rows(here / "few.jsonl", sums[:5])
    write_rows(here / "questions.jsonl", [{"question": "1+1="}] * 9)
    (here / "broken.jsonl").write_text(json.dumps(sums[0]) + "\n{not json\n")
    (here / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (here / "rewards.py").write_text(REWARDS)
    recipes = here / "own" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "no_package.yaml").write_text("recipe: no_package\n")
    (recipes / "tab.yaml").write_text("# @package _global_\nrecipe: tab\nalgorithm:\n\tsteps: 3\n")
    (recipes / "misspelt.yaml").write_text("# @package _global_\nrecipe: misspelt\nalgoritm: {steps: 3}\n")
    for name, text in {
        "run": dump_config(load_config(["recipe=tiny"], command="train")),
        "broken_run": "seed: [1\n",
        "empty_run": "",
    }.items():
        (here / name).mkdir()
        (here / name / CONFIG_FILE).write_text(text)
    return here


def test_help_a_plan_and_every_early_mistake_need_no_torch_and_each_mistake_is_named(folder: Path) -> None:
    before = files(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **NO_HUB}
    with TemporaryFile("w+") as asked:
        json.dump([*HELP, *EARLY], asked)
        asked.seek(0)
        done = run_within([sys.executable, "-c", IN_ONE_PROCESS], 600, stdin=asked, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert [line for line in HELP if ended[line] != [0, ""]] == []
    wrong = {line: ended[line] for line, part in EARLY.items() if not is_named(ended[line][0], ended[line][1], part)}
    assert wrong == {}
    assert files(folder) == before


@pytest.mark.parametrize("line", LATE)
def test_a_mistake_that_libraries_find_is_named(line: str, folder: Path, forked: Runs) -> None:
    finished = forked.run(*shlex.split(line), cwd=folder)
    assert is_named(finished.status, finished.output, LATE[line]), finished.output


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_named(status: int | str, output: str, part: str) -> bool:
    """True where the output is one error in one line that holds `part`, besides notes and what a run says."""
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    return status in (1, 2) and len(errors) == 1 and part in errors[0] and "Traceback" not in output


def test_there_are_enough_rows() -> None:
    assert len(EARLY) + len(LATE) >= 75
