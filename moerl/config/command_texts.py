"""Texts of `--help` for each command: a summary, what it does, examples. Torch-free; any process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandText:
    """Help text of one command."""

    summary: str
    """One line."""
    text: str
    """Several lines: what the command does and leaves behind."""
    examples: dict[str, str]
    """By command line, what it is for."""
    keys: tuple[str, ...] = ()
    """Keys and sections that matter for the command; empty if all do."""
    first_keys: tuple[str, ...] = ()
    """Keys of a first run, which a help of one screen lists; empty if there is no such help."""


_SAMPLING = ("rollout.dtype", "rollout.max_running", "rollout.max_new_tokens")


COMMANDS = {
    "train": CommandText(
        "post-train a model: cold start if the recipe has one, then reinforcement learning",
        "Builds or loads the model, runs the cold start, trains with reinforcement learning and evaluates on fresh\n"
        "problems. The run directory then holds the resolved config, metrics.jsonl, TensorBoard events, summary.json,\n"
        "checkpoints, rollouts in Parquet, PNG curves and report.html.",
        {
            "moerl train recipe=demo": "two minutes on two idle cores",
            "moerl train recipe=pretrained_small model.path=DIR task.path=my.jsonl task.reward=my_rewards:score": (
                "a small model of your own; recipe=pretrained for a large one"
            ),
            "moerl train resume=runs/wide": "go on after a stop",
            "moerl train recipe=laptop rl.group_size=16 run_dir=runs/wide": "change what you like",
            "moerl train task=jsonl task.path=my.jsonl task.reward=my_rewards:score sft.steps=0"
            " evaluation.dev_problems=10 evaluation.heldout_problems=10": (
                "a task of your own, with some 200 problems and my_rewards.py in the current directory"
            ),
            "moerl train recipe=laptop run_dir=runs/job resume=auto": "start, or go on: for a job that is requeued",
            "moerl train resume=runs/wide rl.steps=160": "make it longer, also when it has finished",
            "moerl train resume=runs/wide parallel.tensor=2": "go on in another parallel layout",
            "moerl train -m recipe=laptop seed=1,2,3 sweep.dir=runs/seeds": "a run for each value; docs/sweeps.md",
        },
        first_keys=(
            *("model.path", "task.path", "task.reward", "rl.steps", "rl.prompts_per_step", "rl.group_size"),
            *("optimizer.lr", "rollout.max_new_tokens", "parallel.expert", "trainer.microbatch_tokens", "run_dir"),
        ),
    ),
    "sft": CommandText(
        "only the cold start: supervised fine-tuning on the task's demonstrations",
        "Builds or loads the model, trains it on demonstrations that the task writes (or your JSONL holds), and\n"
        "saves it as a Hugging Face directory in the run directory.",
        {
            "moerl sft recipe=laptop": "a cold start on its own",
            "moerl sft recipe=laptop sft.steps=800 run_dir=runs/longer": "a longer one",
        },
        keys=(
            *("seed", "run_dir", "num_threads", "model", "parallel", "trainer", "sft", "task"),
            *("evaluation.heldout_problems", "rollout.max_running", "rollout.max_new_tokens", "checkpoint"),
        ),
    ),
    "rollout": CommandText(
        "sample responses from a saved model, score them and write them to Parquet",
        "Samples group_size responses to prompts_per_step prompts, with routing and kept sets, and writes them to the\n"
        "run directory. Nothing is trained.",
        {
            "moerl rollout model=pretrained model.path=DIR": "DIR: a model that a run saved",
            "moerl rollout model=pretrained model.path=DIR rollout.top_p=0.8": "sample more narrowly",
        },
        keys=(
            *("seed", "run_dir", "num_threads", "model.path", "rl.prompts_per_step", "rl.group_size"),
            *(*_SAMPLING, "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
            *("task", "quarantine.max_rate"),
        ),
    ),
    "eval": CommandText(
        "measure a saved model on held-out problems",
        "Answers the held-out problems greedily, and with evaluation.samples=N by N samples each, and prints\n"
        "accuracy, pass@k and majority@k, by set. The run directory holds the numbers and a table of all responses.",
        {
            "moerl eval model=pretrained model.path=DIR": "DIR: a model that a run saved",
            "moerl eval model=pretrained model.path=DIR evaluation.heldout_problems=500": "fewer problems",
        },
        keys=(
            *("run_dir", "num_threads", "model.path", *_SAMPLING, "task.name", "task.path", "task.hub", "task.splits"),
            *("task.prompt", "task.chat_options", "task.rewards", "task.reward", "evaluation.heldout_problems"),
            *("evaluation.samples", "evaluation.temperature", "evaluation.top_p", "evaluation.top_k"),
        ),
    ),
    "plan memory": CommandText(
        "compute the memory of ranks, servers and hosts before you ask for a machine",
        "Prints what the heaviest rank of a layout holds, by component, and what the fullest GPUs and the fullest\n"
        "host hold, servers, checkpoints and copies included; says what does not fit, with a remedy. Starts nothing,\n"
        "needs no GPU; reads only config.json of the model. The status is 1 if something does not fit.",
        {
            "moerl plan memory recipe=pretrained model.path=DIR parallel.expert=8 parallel.data=16": (
                "sixteen devices, of which eight share the experts"
            ),
            "moerl plan memory recipe=laptop parallel.tensor=2 --gpu-memory-gib 24": "smaller devices",
            "moerl plan memory recipe=laptop --gpus-per-node 4 --host-memory-gib 512": (
                "and whether a host holds its part"
            ),
        },
        keys=(
            *("model", "parallel", "trainer", "algorithm.kl_coef", "algorithm.kl_support", "rollout.max_new_tokens"),
            *("sft.steps", "sft.batch_size", "rl.prompts_per_step", "rl.group_size", "rl.minibatches"),
            *("rollout.placement", "rollout.servers", "rollout.tensor", "rollout.expert", "rollout.memory_share"),
            *("rollout.max_running", "rollout.max_pool_tokens", "weights.bucket_bytes"),
        ),
    ),
    "plan weights": CommandText(
        "compute what a weight update sends over which link, and how long it takes",
        "Prints the buckets, the ranks that hand them to engines, the bytes of each and the time at given bandwidths.\n"
        "Starts nothing, needs no GPU; reads only config.json of the model.",
        {
            "moerl plan weights recipe=pretrained model.path=DIR parallel.expert=8": (
                "eight devices that share the experts, one of which sends"
            ),
            "moerl plan weights recipe=pretrained model.path=DIR parallel.expert=8 rollout.servers=4"
            " weights.senders=4": "four of them send to four servers",
            "moerl plan weights recipe=pretrained model.path=DIR parallel.expert=8 weights.transport=disk"
            " weights.senders=8 --engine-gb-per-second 5": "all of them write",
        },
        keys=("model.path", "model.dtype", "parallel", "weights", "rollout.servers", "rollout.server"),
    ),
    "plan run": CommandText(
        "predict step time, idle shares and ages with more or less staleness",
        "Simulates engines and trainer around the real queue, with costs worked out from devices or fitted to a run,\n"
        "and prints a row for each setting of buffer. Starts nothing, needs no GPU.",
        {
            "moerl plan run recipe=pretrained model.path=DIR parallel.expert=8 rollout=sglang rollout.servers=8"
            " rollout.tensor=1 --mean-tokens 4000": "eight devices train, eight sample",
            "moerl plan run recipe=laptop rollout=sglang --mean-tokens 40 --turns 4 --tool-seconds 2"
            " --tool-tokens 10": "episodes of four turns",
            "moerl plan run recipe=laptop --calibrate RUN_DIR": "as fast as a synchronous run was",
        },
        keys=(
            *("model.path", "parallel", "buffer", "rl.prompts_per_step", "rl.group_size", "rollout.max_running"),
            *("rollout.servers", "rollout.tensor", "rollout.max_new_tokens", "weights"),
        ),
    ),
}

STATUS = CommandText(
    "show where a run is and what became of every rollout that it asked for",
    "Reads the run directory alone, while the run goes on or after it ended: whether a process holds it, checkpoints,\n"
    "steps, and the ledger of rollouts by their end: trained, filtered, quarantined, pending.",
    {"moerl status runs/wide": "of a run in this directory"},
)

REPORT = CommandText(
    "write a page on how far sampler and trainer are apart, and why",
    "Reads the metrics of a run directory, while the run goes on or after it ended, and writes one HTML file that\n"
    "needs no network, and the same numbers as report.json: a verdict, the gap split into routing and sampling masks,\n"
    "what was found, metrics over steps and layers. A run writes both itself when it ends. With --compare: one page\n"
    "of several run directories or report.json files, side by side. Of the directory of a sweep: its runs by key.",
    {
        "moerl report runs/wide": "writes runs/wide/report.html and report.json",
        "moerl report --compare runs/wide runs/narrow": "writes comparison.html in this directory",
        "moerl report runs/seeds": "of a sweep: curves and final numbers by key, over seeds",
    },
)

DIAGNOSE = CommandText(
    "find out why a dump's log-probs are not the trainer's, whichever system wrote it",
    "Reads rollout dumps of moerl, slime, miles, NeMo-RL, prime-rl or SGLang, or any other as docs/dump_formats.md\n"
    "says, scores a sample of them with the model, and names the causes of the gap with what each makes of it: routes\n"
    "of another row or layer, lost sampling masks, temperature, stale weights, prompt tokens, one engine apart.\n"
    "A fault may be in all rollouts or in some, which are named. Writes one HTML file that needs no network, the same\n"
    "numbers as JSON, and a table of the rollouts.\n"
    "Exit status: 0 in order, 1 a fault was found, 3 something is unexplained, 2 no diagnosis (the command line or a\n"
    "file is wrong, or a file cannot be read). Weights as a Hugging Face directory: docs/routing_mismatch.md says how.",
    {
        "moerl diagnose runs/wide": "a run: its first rollouts, next to the weights that sampled them",
        "moerl diagnose rollout_12.pt train_12.pt --model policy_11 --temperature 0.8": (
            "slime or miles: rollouts and train data of one step, joined by their tokens"
        ),
        "moerl diagnose train_data_step12.jsonl": "NeMo-RL: both policies are in the dump, no model is needed",
    },
)

SAMPLES = CommandText(
    "show responses of a run: the best and the worst, by set, by step",
    "Reads the dumped rollouts and the tables of evaluations in a run directory, and prints responses with their\n"
    "prompts and rewards, those with the highest and those with the lowest reward first. Episodes are shown as\n"
    "conversations; the weight version that sampled a text is its colour, or is written if there are none.",
    {
        "moerl samples runs/wide": "of the newest dump or evaluation",
        "moerl samples runs/wide --of rollouts/step-000010.parquet --by reward_right --count 5": "of one file",
        "moerl samples runs/wide --set gsm8k --worst": "of one of several sets, the worst alone",
    },
)

EXPORT = CommandText(
    "write the weights of a run's checkpoint as a Hugging Face directory",
    "Reads one checkpoint of a run in one process, whatever layout wrote it, and writes config, tokenizer and\n"
    "safetensors to a new directory. The run may go on meanwhile. Read only run directories that you trust.",
    {
        "moerl export runs/wide --output wide-hf": "the newest checkpoint",
        "moerl export runs/wide --step 40 --output wide-40": "an earlier one",
    },
)

VERIFY = CommandText(
    "compare a run's dumped rollouts with transformers and with the trainer",
    "Replays rollouts with the recorded experts and kept sets through transformers and through the Megatron trainer,\n"
    "one after the other in one process, and compares both with the engine's log-probs: a table per MoE layer and one\n"
    "per trajectory. The status is 1 if two log-probs of a token differ by more than the tolerance.",
    {
        "moerl verify runs/wide/rollouts/step-000001.parquet --model runs/wide/cold_start": "rollouts of version 0",
        "moerl verify runs/wide/rollouts --model wide-40 --version 40": "wide-40: what `moerl export --step 40` wrote",
    },
)

DOCTOR = CommandText(
    "look at an installation and a machine before a run, and say what to mend",
    "Looks at packages, GPUs, servers, keys, sockets, ports, disk and, with keys of a run, at what that run needs.\n"
    "Each look is green, yellow (a run works, and this is worth knowing) or red, with what was seen, what was\n"
    "expected and a remedy. The status is 1 if one is red. Starts no run and leaves nothing behind, but with\n"
    "--shared a small file for each node.",
    {
        "moerl doctor": "of this installation and machine",
        "moerl doctor recipe=laptop rollout=sglang parallel=tp2": "and whether this run would find what it needs",
        "srun -N 4 moerl doctor --shared /scratch/me --nodes 4": (
            "and whether four nodes see one folder, and agree on the time"
        ),
        "moerl doctor --json --port 30000": "for a script, and whether a port is free",
    },
)

WATCH = CommandText(
    "show how a run goes while it goes: rewards, mismatch, coverage, queue, alerts",
    "Reads the run directory alone: the last steps, the mismatch as trained and as a table, rows without captured\n"
    "routing, staleness, queue, rollouts by their end, throughput and time left, and what is alarming. Refreshes as\n"
    "steps come; ends with the run, or by Ctrl-C. Lines instead of a display if there is no terminal.",
    {"moerl watch runs/wide": "until the run ends", "moerl watch runs/wide --once": "as it is now"},
)

CONFORMANCE = CommandText(
    "check any rollout engine against the data contract, and say what passes, what fails and why",
    "Asks an engine for routes, kept sets, log-probs and seeds in the ways in which they go wrong: batches, prefix\n"
    "caches, long prompts, retraction, aborts, resumed answers, turns. ENGINE is http://HOST:PORT of an SGLang\n"
    "server, with our patches or without, the server.json of a `moerl serve`, or embedded:HF_DIR. The status is 1\n"
    "if a check failed. Weights are replaced only with --update-weights, and put back.",
    {
        "moerl conformance runs/serve/server.json": "a server of `moerl serve`",
        "moerl conformance runs/serve/server.json --model HF_DIR": "against transformers, too",
        "moerl conformance http://127.0.0.1:30000 --model HF_DIR": "a server that somebody else started",
        "moerl conformance embedded:HF_DIR --json": "our embedded engine, for a script",
    },
)

LAUNCH_SLURM = CommandText(
    "submit a run as a job of SLURM that is requeued until the run is finished",
    "Checks all that can be known here, renders an sbatch script for `moerl train`, with what --site says of this\n"
    "cluster, and submits it; --dry-run shows the script, the configuration and the plans, and submits nothing.\n"
    "Before its time limit and when it is preempted the run commits a checkpoint, and the job is requeued and goes\n"
    "on; a job that writes no new checkpoint several times in a row ends as failed. Start it on a login node\n"
    "(docs/clusters.md).",
    {
        "moerl launch slurm recipe=laptop --time 1:00:00 --dry-run": "what would be submitted",
        "moerl launch slurm recipe=laptop run_dir=runs/job --time 1:00:00 --site site.yaml": "submit it",
        "moerl launch slurm parallel.data=2 launch.on=ray --nodes 2 --time 1:00:00": "ranks over two nodes, by Ray",
        "moerl launch slurm -m seed=1,2,3 sweep.dir=runs/seeds --time 1:00:00": "a job for each run, then the report",
    },
)

ON_FILES = {
    **{"doctor": DOCTOR, "status": STATUS, "watch": WATCH, "report": REPORT},
    **{"diagnose": DIAGNOSE, "samples": SAMPLES},
    **{"export": EXPORT, "verify": VERIFY, "conformance": CONFORMANCE},
}
"""By command on files or machines, its texts."""
TEXTS = COMMANDS | ON_FILES | {"launch slurm": LAUNCH_SLURM}
"""By command, its texts; `serve` and `moerl sglang` have none."""
