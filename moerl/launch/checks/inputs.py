"""Looks at what a run reads: its model, its data and rewards, and the environment of its servers. Torch-free.

Each look gets `Facts` and returns a line on what it saw, or a `Note` on what it could not see from here. It raises an
error if a run could not work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.config.architecture import describe_model
from moerl.config.checks import check_command, check_model_fits, check_problems, check_run, wanted_problems
from moerl.config.hub_model import hub_model, prepare_model
from moerl.config.rollouts import DumpsRolloutConfig, ServerRolloutConfig, SGLangRolloutConfig
from moerl.diagnostics.dumps.opening import needs_torch
from moerl.diagnostics.dumps.survey import batches, check_fits, survey
from moerl.errors import ConfigError, EngineError
from moerl.launch.checks.facts import Facts
from moerl.launch.servers import refuse_ended
from moerl.machine.hub import missing_weights
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.install import check_server_args, device_of, site_packages
from moerl.rollout.sglang.patches import verify_installation

HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
"""Variables that name the folders in which libraries of the hub keep what they fetch."""


@dataclass(frozen=True, slots=True)
class Note:
    """Finding that is worth knowing, and no fault: mostly of things that cannot be seen from here."""

    seen: str
    """Sentence on the state that the look found."""
    expected: str
    """State in which there would be no note."""
    remedy: str
    """Advice to the user; may say that nothing has to be done."""


def all_of(notes: Sequence[Note]) -> Note:
    """Returns one note that says what several say; at least one."""
    seen, expected, remedies = zip(*((each.seen, each.expected, each.remedy) for each in notes), strict=True)
    return Note("; ".join(seen), "; ".join(expected), "; ".join(remedies))


def look_at_keys(facts: Facts) -> str:
    """Checks the rules between keys."""
    check_run(facts.config)
    return f"recipe {facts.config.recipe}"


def look_at_layout(facts: Facts) -> str:
    """Checks the model's config.json against layout and lengths."""
    check_model_fits(facts.config)
    return f"{facts.config.parallel.world_size} ranks"


def look_at_command(facts: Facts) -> str:
    """Checks what the command needs: libraries of trackers and of Ray, files that keys name, the algorithm."""
    # Packages of a job have a check of their own.
    check_command(facts.config, facts.config.command, looks_at_packages=facts.door != "dry run")
    return f"as `moerl {facts.config.command}` takes it"


def look_at_model(facts: Facts) -> str | Note:
    """Checks files and tensors of the model, and its tokenizer; fetches weights of the hub if that is allowed."""
    model = facts.config.model
    of_hub = hub_model(model)
    missing = [] if of_hub is None or facts.fetches else missing_weights(of_hub.folder)
    if missing:
        return Note(
            f"{len(missing)} files of weights of {model.hub} are not in the cache of the hub",
            "weights that a run finds",
            "none is needed with a network: they are fetched before the run starts",
        )
    prepare_model(model)
    return str(model.path or "the run builds it")


def look_at_cache(facts: Facts) -> str:
    """Checks that this process fetches into the folders that the nodes look in."""
    config = facts.config
    if config.model.hub is None and not config.task.hub_sets:
        return "nothing comes from the hub"
    for name in HUB_VARIABLES:
        there, here = facts.node_variables.get(name), os.environ.get(name)
        if there is not None and there != here:
            raise ConfigError(
                f"{name}: the job looks for files of the hub in another folder than they are fetched to",
                seen=f"{name}={here or ''} here, {there} in the job (environment of --site)",
                expected="the same folder, on a file system that the nodes share",
                remedy=f"export {name}={there} before `moerl launch slurm`",
            )
    return "fetched to where the job looks"


def look_at_data(facts: Facts) -> str | Note:
    """Reads the data: columns, numbers of problems, demonstrations. Fetches data sets of the hub."""
    config, task = facts.config, facts.task()
    check_problems(task, wanted_problems(config))
    learns = config.command in ("train", "sft") and config.sft.steps > 0
    task.check(num_demonstrations=config.sft.num_examples if learns else 0)
    if facts.door == "dry run" and config.task.streams:
        return Note(
            f"{', '.join(config.task.streams)}: streamed, so read over the network by the node, too",
            "a node that reaches the hub",
            "set streaming=false: the set is then fetched from here, before the job is submitted",
        )
    return ", ".join(f"{task.size(split)} {split}" for split in ("train", "dev", "heldout"))


def look_at_rewards(facts: Facts) -> str | Note:
    """Asks for the rewards of one response."""
    task = facts.config.task
    elsewhere = facts.container or facts.python
    untried = [f"{name} runs in {elsewhere}" for name in task.own_functions if elsewhere]
    if facts.door == "dry run":
        untried += [f"{url} is asked from the node" for url in task.judges]
    if untried:
        return Note(
            f"not tried from here: {', '.join(untried)}",
            "rewards that can be tried",
            "nothing: `moerl doctor` tries them on the node, before the run starts",
        )
    if not facts.config.rollout.has_engine:
        return "not asked for: the dumps hold them"
    facts.task().try_rewards()
    return "tried on one response"


def look_at_scorers(facts: Facts) -> str | Note:
    """Asks the servers of scorers whether they are there."""
    config = facts.config
    asked = {name: each for name, each in config.scorers.items() if each.service}
    if not asked or config.command not in ("train", "rollout"):
        return f"{len(config.scorers)}, none behind a server"
    services = ", ".join(each.service for each in asked.values())
    if facts.door == "dry run":
        return Note(
            f"not tried from here: {services} is asked from the node",
            "servers that can be asked",
            "nothing: `moerl doctor` asks them on the node, before the run starts",
        )
    for name, each in asked.items():
        each.reach(f"scorers.{name}")
    return f"{services} answers"


def look_at_dumps(facts: Facts) -> str | Note:
    """Looks over the dumps that a run trains on: format, model, groups and steps."""
    config = facts.config
    if not isinstance(config.rollout, DumpsRolloutConfig):
        return "the run samples"
    path, model = config.rollout.path, describe_model(config.model)
    if facts.door == "dry run" and not path.exists():
        return Note(
            f"{path}: cannot be seen from here",
            "dumps that can be looked over",
            "nothing if the nodes have it: `moerl doctor` looks at it there, before the run starts",
        )
    if needs_torch(path):
        return Note(
            f"{path}: files of torch.save, which are not read before the run starts",
            "dumps that can be looked over",
            "nothing: the run looks over them first",
        )
    found = survey(path, model)
    check_fits(found, model, config.rl, config.trainer, config.algorithm, config.quarantine)
    steps = batches(found, config.rl.prompts_per_step)
    return f"{found.format}: {len(found.groups)} groups for {len(steps)} steps"


def look_at_environment(facts: Facts) -> str | Note:
    """Proves the environment of SGLang servers: its path, release and patches, and its device."""
    rollout = facts.config.rollout
    if not isinstance(rollout, SGLangRolloutConfig):
        return "the run starts no SGLang servers"
    environment = rollout.environment
    if facts.door == "dry run" and (facts.container or not environment.exists()):
        return _unseen_environment(facts, environment)
    device = device_of(environment)
    if device == "cuda" and facts.machine is not None and facts.machine.gpu_bytes is None:
        raise EngineError(
            "rollout.environment: made for GPUs, and the run has none",
            seen=f"{environment}: made for {device}",
            expected="an environment of CPUs, or GPUs",
            remedy="moerl sglang install --device cpu --env DIR, and rollout.environment=DIR; on SLURM gpus_per_node of"
            " the site file asks for GPUs",
        )
    if device == "cpu" and facts.machine is not None and facts.machine.gpu_bytes is not None:
        raise EngineError(
            "rollout.environment: made for CPUs, and the run has GPUs",
            seen=f"{environment}: made for {device}",
            expected="an environment of GPUs, or a run without any",
            remedy="moerl sglang install --device cuda --env DIR, and rollout.environment=DIR; a run without GPUs:"
            " CUDA_VISIBLE_DEVICES= moerl ..., on SLURM a site file without GPUs",
        )
    patches = verify_installation(site_packages(environment))
    check_server_args(environment, rollout.server_args)
    return f"{environment}: sglang {patches.version} for {device}, patches {patches.fingerprint}: as released else"


def _unseen_environment(facts: Facts, environment: Path) -> Note:
    """Returns a note on an environment that only the nodes can have. Raises `ConfigError` if it is not written as an
    absolute path."""
    where = f"in {facts.container}" if facts.container else "on the nodes alone"
    if not Path(facts.as_written).is_absolute():
        raise ConfigError(
            "rollout.environment: no SGLang environment at this path, and no absolute path of the nodes"
            if not facts.container
            else "rollout.environment: servers run in a container, and this is no absolute path in it",
            seen=facts.as_written,
            expected="an environment that can be seen from here, or an absolute path " + where,
            remedy="moerl sglang install --env DIR, and rollout.environment=/absolute/DIR",
        )
    return Note(
        f"{environment}: cannot be seen from here; it has to be {where}",
        "an environment whose patches and release can be proved",
        "nothing: `moerl doctor` looks at it on the node, before the run starts",
    )


def look_at_server_files(facts: Facts) -> str:
    """Reads the files of servers that others run."""
    rollout = facts.config.rollout
    if not isinstance(rollout, ServerRolloutConfig):
        return "the run uses no servers of others"
    for file in rollout.server:
        endpoint = read_endpoint(file)
        if facts.door != "dry run":
            refuse_ended(endpoint)
    return f"{len(rollout.server)}, each with both keys and for its owner alone"
