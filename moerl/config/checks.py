"""Rules between configuration fields, checked before anything starts. Any process.

`check_run` holds for every `RunConfig`; `check_command` adds what one command needs, files included. Each rule
names the dotted path, the value seen, the value expected and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable

from moerl.config.architecture import check_model, describe_architecture, describe_model
from moerl.config.passed_on import check_passed_on, passed_on_notes
from moerl.config.placement import check_placement, check_ray
from moerl.config.rollout_checks import check_dumps, check_engine, check_experts_of_server, check_scores
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.config.trackers import check_trackers
from moerl.contract.ports import Task
from moerl.contract.trajectory import MAX_KEPT_IDS
from moerl.errors import ConfigError
from moerl.machine.layouts import LayoutLoad, layout_problems, propose
from moerl.machine.memory import host_bytes, total_parameters
from moerl.machine.model_files import INITIAL_MODEL, check_tokenizer
from moerl.models.description import ModelDescription, read_model

COMMANDS = ("train", "sft", "rollout", "eval")

LARGE_MODEL_PARAMETERS, LARGE_MODEL_MAX_LR = 10**9, 1e-5
"""A learning rate above this, for a model of at least so many parameters, is ten times what public recipes take."""


def check_run(config: RunConfig) -> None:
    """Checks the rules that hold for every command. Raises `ConfigError` at the first that is broken."""
    check_model(config.model)
    longest = config.rollout.max_new_tokens
    if longest >= config.trainer.microbatch_tokens:
        raise ConfigError(
            "trainer.microbatch_tokens: does not hold one response with its prompt",
            seen=config.trainer.microbatch_tokens,
            expected=f"> rollout.max_new_tokens = {longest}",
            remedy="raise trainer.microbatch_tokens or lower rollout.max_new_tokens",
        )
    _check_stages(config)
    if config.model.architecture is None:
        _check_layout(config, None)
    else:
        _check_sizes(config, describe_architecture(config.model.architecture))
    config.queue_limits()
    check_engine(config.rollout, config.buffer)
    check_dumps(config.command, config.rollout, config.rl)
    check_scores(config.command, config.rollout, config.algorithm, config.scorers)
    _check_colocated(config)
    check_experts_of_server(config.rollout, None)
    _check_weights(config)
    _check_metrics(config)
    check_passed_on(config.trainer, config.rollout)
    config.trainer.check(steps=config.rl.steps, is_colocated=config.rollout.is_colocated)
    check_placement(config.launch)
    config.task.check(sft_steps=config.sft.steps)


def check_command(config: RunConfig, command: str, *, looks_at_packages: bool = True) -> None:
    """Checks what `command` (one of `COMMANDS`) needs beyond `check_run`; looks at the files that are named.

    Args:
        looks_at_packages: this interpreter must have the packages of trackers and of Ray.

    Raises:
        ConfigError: The command cannot run with this configuration.
    """
    if command == "train" and config.rollout.temperature == 0.0:
        raise ConfigError(
            "rollout.temperature: greedy samples cannot be trained on",
            seen=0.0,
            expected="> 0",
            remedy="set rollout.temperature=1.0",
        )
    if command == "sft" and config.sft.steps == 0:
        raise ConfigError(
            "sft.steps: nothing to do", seen=0, expected=">= 1", remedy="set sft.steps, for example sft.steps=400"
        )
    if command in ("rollout", "eval"):
        _check_reader(config, command)
    if looks_at_packages:
        check_trackers(config.metrics.sinks)
        check_ray(config.launch)
    check_model_fits(config)
    _check_room_to_build(config)
    # A run that goes on has a copy, with the model that it built.
    if config.model.tokenizer is not None and not (config.run_dir / INITIAL_MODEL).exists():
        check_tokenizer(config.model.tokenizer, "model.tokenizer")
    config.task.check_files()
    if command in ("train", "rollout"):
        vocab_size = None if config.model.path is None else describe_model(config.model).vocab_size
        for name, scorer in config.scorers.items():
            scorer.check_files(f"scorers.{name}", vocab_size)
    if command == "train":
        config.algorithm.check(group_size=config.rl.trained_size, minibatches=config.rl.minibatches)


def check_model_fits(config: RunConfig) -> None:
    """Checks a model directory against the layout and the lengths. Raises `ConfigError`."""
    if config.model.path is not None:
        _check_sizes(config, read_model(config.model.path))


def _check_room_to_build(config: RunConfig) -> None:
    """Checks that this machine can hold a model to build, which one process makes in float32."""
    if config.model.architecture is None:
        return
    needed = 4 * total_parameters(describe_architecture(config.model.architecture))
    memory = host_bytes()
    if needed > memory:
        raise ConfigError(
            "model.architecture: larger than the memory of this machine",
            seen=f"{needed / 2**30:,.0f} GiB of float32 weights, {memory / 2**30:,.0f} GiB of memory",
            expected="a model that fits",
            remedy="lower its sizes, or start from a directory: model=pretrained model.path=DIR",
        )


def config_notes(config: RunConfig) -> list[str]:
    """Returns notes for the user on a configuration that is allowed; one line each, to be printed and logged."""
    notes = passed_on_notes(config.trainer, config.rollout)
    rollout = config.rollout
    cuts = rollout.top_p < 1.0 or rollout.min_p > 0.0 or rollout.top_k is not None
    if cuts and rollout.top_k is None:
        notes.append(f"rollout.top_k is null while top_p or min_p cut: top_k = {MAX_KEPT_IDS} is in force")
    if cuts and not config.keep_sampling_mask.enabled:
        notes.append(
            "keep_sampling_mask.enabled is false while sampling is truncated: every log-ratio is off by the log of"
            " the kept mass; good for a comparison only"
        )
    if config.command == "train" and config.model.path is not None and config.optimizer.lr > LARGE_MODEL_MAX_LR:
        parameters = total_parameters(read_model(config.model.path))
        if parameters >= LARGE_MODEL_PARAMETERS:
            notes.append(
                f"optimizer.lr = {config.optimizer.lr:g} is high for a model of {parameters / 1e9:.1f}B parameters;"
                " public recipes train such models with 1e-06 (recipe=pretrained)"
            )
    return notes


def _check_layout(config: RunConfig, sizes: ModelDescription | None) -> None:
    """Checks that Megatron can run the layout with this model and the work of a step. sizes: None = not known yet."""
    load = layout_load(config) if sizes is not None else None
    dims = config.parallel.dims
    problems = layout_problems(dims, sizes, load)
    if not problems:
        return
    first, others = problems[0], [problem.key for problem in problems[1:]]
    remedy = f"change {first.key}"
    if sizes is not None and (near := propose(dims, sizes, load)):
        remedy = f"the nearest that work: {near}"
    raise ConfigError(
        f"{first.key}: {first.what}",
        seen=first.seen,
        expected=first.expected,
        remedy=remedy + (f" (also wrong: {', '.join(dict.fromkeys(others))})" if others else ""),
    )


def layout_load(config: RunConfig) -> LayoutLoad:
    """Returns the load of the layout: the token budget of a microbatch, and the sequences of the smallest optimizer
    step."""
    rl, sft = config.rl, config.sft
    steps = []
    if config.command != "sft":
        steps.append(rl.prompts_per_step * rl.trained_size // rl.minibatches)
    if sft.steps > 0:
        steps.append(sft.batch_size)
    return LayoutLoad(config.trainer.microbatch_tokens, min(steps, default=sft.batch_size))


def _check_sizes(config: RunConfig, sizes: ModelDescription) -> None:
    """Checks that the layout fits the model, and that the longest response leaves room for a prompt."""
    _check_layout(config, sizes)
    check_experts_of_server(config.rollout, sizes)
    longest = config.rollout.max_new_tokens
    if longest >= sizes.max_positions:
        where = sizes.where("max_positions" if sizes.folder is None else "max_position_embeddings")
        raise ConfigError(
            "rollout.max_new_tokens: the model has no room for a prompt and this many tokens",
            seen=longest,
            expected=f"< {where} = {sizes.max_positions}",
            remedy="lower rollout.max_new_tokens" + (f" or raise {where}" if sizes.folder is None else ""),
        )


def _check_colocated(config: RunConfig) -> None:
    rollout = config.rollout
    if not isinstance(rollout, SGLangRolloutConfig) or not rollout.is_colocated:
        return
    if config.buffer.max_staleness:
        raise ConfigError(
            "buffer.max_staleness: colocated servers sleep while the trainer works, nothing runs ahead",
            seen=f"max_staleness {config.buffer.max_staleness}, rollout.placement colocated",
            expected="0",
            remedy="set buffer.max_staleness=0, or rollout.placement=disaggregated",
        )
    if rollout.memory_share is None:
        raise ConfigError(
            "rollout.memory_share: what a colocated server may take, the trainer cannot have",
            seen="null",
            expected="the share of each GPU's memory that the trainer can do without, for example 0.4",
            remedy="set rollout.memory_share; `moerl plan memory` says what the trainer needs",
        )
    devices, ranks = rollout.servers * rollout.tensor, config.parallel.world_size
    if devices > ranks:
        raise ConfigError(
            "rollout.servers: more devices than the trainer has, whose devices they share",
            seen=f"{rollout.servers} servers of {rollout.tensor}, {ranks} ranks of the trainer",
            expected=f"at most {ranks} devices",
            remedy="choose smaller rollout.servers or rollout.tensor, or rollout.placement=disaggregated",
        )


def _check_weights(config: RunConfig) -> None:
    senders, ranks = config.weights.senders, config.parallel.world_size
    if senders > ranks:
        raise ConfigError(
            "weights.senders: more than there are trainer ranks",
            seen=senders,
            expected=f"at most {ranks}",
            remedy="one sender for each link to the engines is enough",
        )
    if senders > 1 and config.weights.transport == "direct" and config.rollout.engine == "embedded":
        raise ConfigError(
            "weights.senders: the embedded engine takes weights from one rank",
            seen=f"weights.senders = {senders}, weights.transport = direct, rollout = embedded",
            expected="1",
            remedy="set weights.senders=1, weights.transport=disk, or rollout=sglang",
        )


def _check_metrics(config: RunConfig) -> None:
    sinks = config.metrics.sinks
    if "jsonl" not in sinks:
        raise ConfigError(
            "metrics.sinks: jsonl is missing, which a run that goes on and its reports read",
            seen=f"[{','.join(sinks)}]",
            expected="jsonl, and others as you like",
            remedy=f"set metrics.sinks=[{','.join(['jsonl', *sinks])}]",
        )
    if len(set(sinks)) < len(sinks):
        raise ConfigError(
            "metrics.sinks: one comes twice",
            seen=f"[{','.join(sinks)}]",
            expected="each once",
            remedy=f"set metrics.sinks=[{','.join(dict.fromkeys(sinks))}]",
        )


def _check_stages(config: RunConfig) -> None:
    rl = config.rl
    if config.keep_routing.reference == "trainer" and config.keep_routing.mode != "trainer":
        raise ConfigError(
            "keep_routing.reference: the trainer's routing is not recorded",
            seen=f"reference = trainer, mode = {config.keep_routing.mode}",
            expected="keep_routing.mode = trainer",
            remedy="set keep_routing.mode=trainer, or keep_routing.reference=rollout",
        )
    if config.algorithm.interpolates_proximal and config.keep_routing.mode == "trainer":
        raise ConfigError(
            "algorithm.proximal: the pass that records the trainer's routing computes the proximal log-probs anyway",
            seen="proximal = interpolated, keep_routing.mode = trainer",
            expected="proximal = pass",
            remedy="set algorithm.proximal=pass, or keep_routing.mode=rollout",
        )
    if rl.keep is not None and rl.keep >= rl.group_size:
        raise ConfigError(
            "rl.keep: not fewer than are sampled",
            seen=f"keep = {rl.keep}, group_size = {rl.group_size}",
            expected=f"< {rl.group_size}",
            remedy="raise rl.group_size, usually to twice rl.keep, or set rl.keep=null",
        )
    if rl.prompts_per_step % rl.minibatches:
        raise ConfigError(
            "rl.minibatches: does not divide rl.prompts_per_step",
            seen=f"minibatches = {rl.minibatches}, prompts_per_step = {rl.prompts_per_step}",
            expected=f"a divisor of {rl.prompts_per_step}",
            remedy="make rl.prompts_per_step a multiple of rl.minibatches",
        )
    sft = config.sft
    if sft.steps > 0 and sft.batch_size > sft.num_examples:
        raise ConfigError(
            "sft.batch_size: more than there are demonstrations",
            seen=sft.batch_size,
            expected=f"<= sft.num_examples = {sft.num_examples}",
            remedy="lower sft.batch_size or raise sft.num_examples",
        )


def _check_reader(config: RunConfig, command: str) -> None:
    """Checks that `rollout` and `eval` have a model to read, and one process."""
    if config.model.path is None:
        raise ConfigError(
            f"model.path: moerl {command} needs trained weights",
            seen="null",
            expected="a Hugging Face directory",
            remedy="add model=pretrained model.path=DIR, for example a directory that a run saved",
        )
    if config.parallel.world_size != 1:
        raise ConfigError(
            f"parallel: moerl {command} runs in one process",
            seen=f"{config.parallel.world_size} processes",
            expected=1,
            remedy="add parallel=single",
        )


def check_problems(task: Task, wanted: Iterable[tuple[str, str, int]]) -> None:
    """Raises `ConfigError` if the task has fewer problems than are `wanted` of it; the remedy lists all keys."""
    lacking = [(key, count, split, task.size(split)) for key, split, count in wanted if count > task.size(split)]
    if not lacking:
        return
    key, count, split, size = lacking[0]
    settings = " ".join(f"{key}={size}" for key, _, _, size in lacking)
    raise ConfigError(
        f"{key}: the task has fewer problems",
        seen=count,
        expected=f"at most {size}, the problems of its {split} split",
        remedy="give the task more problems" + (f", or add {settings}" if all(each[3] for each in lacking) else ""),
    )


def wanted_problems(config: RunConfig) -> list[tuple[str, str, int]]:
    """Returns (configuration key, split, number of problems) that a command asks of the task. Without an engine no
    problem is sampled or measured."""
    command, has_engine, evaluation = config.command, config.rollout.has_engine, config.evaluation
    problems = {
        ("rl.prompts_per_step", "train", config.rl.prompts_per_step): has_engine and command in ("train", "rollout"),
        ("sft.num_examples", "train", config.sft.num_examples): config.sft.steps > 0 and command in ("train", "sft"),
        ("evaluation.dev_problems", "dev", evaluation.dev_problems): has_engine and command == "train",
        ("evaluation.heldout_problems", "heldout", evaluation.heldout_problems): has_engine and command != "rollout",
    }
    return [each for each, is_wanted in problems.items() if is_wanted]
