"""The commands: wires configuration, trainer, task, model, engine and stages. Runs in the controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moerl.buffer.journal import Journal
from moerl.config.checks import check_problems, wanted_problems
from moerl.config.hub_model import show_model
from moerl.config.load import CONFIG_FILE, dump_config, load_resolved
from moerl.config.ranks import RankConfig
from moerl.config.resume import change_note, changed_keys
from moerl.config.run_memory import check_shared_device
from moerl.config.schema import RunConfig
from moerl.contract.files import atomic_file, writing
from moerl.contract.layers import select_layers
from moerl.contract.ports import PolicyEngine, RolloutEngine, Task
from moerl.contract.quarantine import Quarantine
from moerl.contract.sealed import find_damage
from moerl.contract.tokenizer import Tokenizer, num_ids
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import EngineError, closing
from moerl.machine.model_files import INITIAL_MODEL
from moerl.machine.stop_signals import STOPPED, StopRequest
from moerl.models.description import ModelDescription, read_model
from moerl.orchestration import step_metrics
from moerl.orchestration.chat import write_prompts
from moerl.orchestration.ends import describe_ends, read_ends
from moerl.orchestration.engines import MakeProcess, begun_early, dump_source, group_plan, open_engine
from moerl.orchestration.evaluation import Evaluation, evaluate
from moerl.orchestration.groups_ahead import group_source
from moerl.orchestration.history import take_changes
from moerl.orchestration.reporting import Reporter
from moerl.orchestration.rl import STAGE as RL
from moerl.orchestration.rl import RLStage, make_room
from moerl.orchestration.rollouts import (
    Collector,
    EvaluationPlan,
    evaluation_sampling,
    in_request_order,
    sampling_params,
)
from moerl.orchestration.run import Run, RunStoppedError
from moerl.orchestration.scoring import Scoring, open_scorers
from moerl.orchestration.sft import cold_start
from moerl.orchestration.source import Live
from moerl.orchestration.task_texts import TextUse, check_prompts
from moerl.orchestration.trackers import start_trackers
from moerl.telemetry.sinks import METRICS_FILE


def run_train(config: RunConfig, *, resume: bool, stop: StopRequest, started: float, lock: int) -> int:
    """Trains a cold start, if one is configured, then, unless the command is `sft`, by RL; leaves a run directory.

    Args:
        started: begin of the command, by `time.monotonic`.
        lock: descriptor of the lock of the run directory, which the ranks inherit.

    Returns:
        Exit code 0, or `STOPPED`.
    """
    with _open_run(config, resume=resume, lock=lock) as (run, model_path):
        run.started, run.stop = started, stop
        try:
            run.leave_if_told()
            if config.command == "train":
                _train(run, model_path)
            else:
                _train_supervised(run, model_path)
        except RunStoppedError as stopped:
            for failure in getattr(stopped, "__notes__", ()):
                run.reporter.notify(f"WARNING: {failure}")
            return STOPPED
    return 0


def _train(run: Run, model_path: Path) -> None:
    from moerl.ranks.placement import engine_process
    from moerl.rollout.factory import engine_memory

    config = run.config
    with ExitStack() as stack:
        process: MakeProcess = partial(engine_process, RankConfig.of(config))
        if config.sft.steps > 0:
            process = stack.enter_context(begun_early(config, process))
            # In RL a checkpoint replaces all weights of the cold start but those of a reference model.
            for_its_weights = run.position[0] != RL or config.algorithm.reference_kl is not None
            model_path = cold_start(run, model_path, for_its_weights=for_its_weights)
        if not config.rollout.has_engine:
            _train_from_dumps(run, model_path)
            return
        scoring = stack.enter_context(closing(_open_scorers(config, run.tokenizer)))
        run.reporter.begin_part("start of the engine")
        start = replace(run.model, folder=model_path)
        engine = run.unless_stopped(
            # On the stack at once, so that a signal right after the start cannot leave the engine open.
            lambda: stack.enter_context(closing(_open_engine(run, start, -1, process)))
        )
        run.unless_stopped(scoring.start)
        run.leave_if_told()
        assert engine is not None
        served = engine.handshake().spec
        if served != run.model.spec:
            raise EngineError(
                "the engine serves another model than the trainer trains",
                seen=served,
                expected=run.model.spec,
                remedy="start the engine from the model directory of this run",
            )
        collector = _collector(config, model_path, engine, run, scoring)
        if config.rollout.is_colocated:
            # Building and restoring need more memory than servers leave while they sample.
            make_room(engine)
        run.build("rl", model_path, engine)
        journal = Journal(config.run_dir / "journal", run.model.spec)
        prompts = run.task.prompts("train", run.task.size("train"))
        source = group_source(group_plan(config), collector, prompts, RL, journal)
        RLStage(run, source, run.packing(start), config.rl.steps, Live(engine, collector)).train()
        engine_bytes = engine_memory(engine)
        if config.rollout.is_colocated:
            make_room(engine)
        run.trainer.export(config.run_dir / "final_model", model_path)
        run.reporter.finish(run.summary(steps=config.rl.steps, engine_bytes=engine_bytes))


def _train_from_dumps(run: Run, model_path: Path) -> None:
    """Trains on the rollouts of `rollout.path`, with no engine."""
    config = run.config
    run.reporter.begin_part("a look over the dumps")
    source = dump_source(config, run.model, run.quarantine, run.reporter.notify)
    for line in source.describe():
        run.reporter.notify(line)
    run.leave_if_told()
    run.build("rl", model_path)
    packing = run.packing(replace(run.model, folder=model_path))
    RLStage(run, source, packing, source.num_steps, None).train()
    run.trainer.export(config.run_dir / "final_model", model_path)
    run.reporter.finish(run.summary(steps=source.num_steps))


def _open_engine(run: Run, model: ModelDescription, version: int, process: MakeProcess) -> PolicyEngine:
    """Opens the engine by `open_engine`; the run's own servers start on this machine or on its Ray cluster."""
    from moerl.ranks.placement import server_launcher

    launcher = partial(server_launcher, run.config.launch, run.config.rollout)
    return open_engine(run.config, model, version, run.reporter.notify, launcher, process)


def _train_supervised(run: Run, model_path: Path) -> None:
    from moerl.ranks.placement import engine_process

    config, output = run.config, cold_start(run, model_path)

    def measure() -> Evaluation:
        with closing(
            _open_engine(run, replace(run.model, folder=output), 0, partial(engine_process, RankConfig.of(config)))
        ) as engine:
            collector = _collector(config, output, engine, run)
            return evaluate(collector, "heldout", config.evaluation.heldout_problems, version=0)

    heldout = run.unless_stopped(measure)
    run.leave_if_told()
    assert heldout is not None
    run.record_evaluations(0, {"cold_start": heldout})
    run.reporter.finish(run.summary(steps=0))


def run_rollout(config: RunConfig) -> int:
    """Samples `rl.group_size` responses to each of `rl.prompts_per_step` prompts, dumps them for `rollout=dumps`, and
    prints their mean reward, accuracy and length. Returns exit code 0."""
    with _open_reader(config) as (collector, reporter):
        prompts = collector.task.prompts("train", config.rl.prompts_per_step)
        sampling = sampling_params(config.rollout, config.seed)
        requests = collector.requests(prompts, run="rollout", count=config.rl.group_size, sampling=sampling)
        finished = collector.collect(prompts, requests, "rollouts", trainer_version=0, with_filtered=False)
        path = config.run_dir / "rollouts" / "rollouts.parquet"
        trajectories = in_request_order(finished, requests)
        if config.scorers:
            reporter.begin_part("scores")
            with closing(_open_scorers(config, collector.tokenizer)) as scoring:
                trajectories = scoring.of(trajectories)
        collector.dump(path, trajectories)
        metrics = step_metrics.rollout_metrics(trajectories) | collector.take_counts()
        metrics["quarantine/count"] = float(collector.quarantine.num_refused)
        with writing(path.with_suffix(".json")), atomic_file(path.with_suffix(".json")) as file:
            file.write_text(json.dumps(metrics, indent=1) + "\n")
        accuracy = metrics.get("accuracy/mean", float("nan"))
        reporter.notify(f"{len(trajectories)} rollouts, accuracy {accuracy:.3f}, written to {path}")
        reporter.notify(
            f"reward {metrics['reward/mean']:.3f}, {metrics['response/length_mean']:.1f} tokens,"
            f" {metrics['response/truncated']:.0%} cut off, {collector.quarantine.num_refused} refused; to train on"
            f" them: moerl train rollout=dumps rollout.path={path}"
        )
    return 0


def run_eval(config: RunConfig) -> int:
    """Measures accuracy on the held-out problems, greedily and by samples, with its interval. Returns exit code 0."""
    with _open_reader(config) as (collector, reporter):
        heldout = evaluate(collector, "heldout", config.evaluation.heldout_problems, version=0)
        reporter.evaluated(0, {"final": heldout}, {})
        if "accuracy" in heldout.scores:
            accuracy, low, high = heldout.scores["accuracy"]
            reporter.notify(f"  accuracy {accuracy:.3f}, with 95 % certainty in [{low:.3f}, {high:.3f}]")
        reporter.notify(f"the numbers are in {config.run_dir / METRICS_FILE}")
    return 0


# --- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open_run(config: RunConfig, *, resume: bool, lock: int) -> Iterator[tuple[Run, Path]]:
    """Opens the task, the trainer's ranks and the run; yields the run and the model directory that it starts from."""
    from moerl.ranks.placement import open_trainer, place_rewards
    from moerl.rollout.tokenizers import new_tokenizer
    from moerl.trainer.new_model import build_model

    _prepare_libraries(config)
    if not resume:
        _write_config(config)
    with closing(config.task.open()) as task, _make_reporter(config) as reporter:
        reporter.notify(f"run directory: {config.run_dir}")
        show_model(config.model, reporter.notify)
        if config.model.path is not None:
            # Errors of the texts are raised before ranks start.
            _check_texts(config, task, config.model.path, reporter)
        model_path = config.model.path or config.run_dir / INITIAL_MODEL
        to_build = None
        if config.model.architecture is not None and find_damage(model_path) is not None:
            to_build = config.model.architecture, new_tokenizer(config.model, task)
        _check_device(config)
        reporter.notify("starting Megatron")
        reporter.begin_part("start of Megatron and the model")
        with open_trainer(RankConfig.of(config), reporter.within, lock) as trainer:
            place_rewards(config.launch, task)
            if to_build is not None:
                build_model(*to_build, config.seed, model_path)
            if config.model.path is None:
                _check_texts(config, task, model_path, reporter)
            tokenizer, model = _read_model(model_path)
            reporter.notify(describe_ends(read_ends(model_path, tokenizer, model.spec.vocab_size), tokenizer))
            run = Run(config, trainer, task, tokenizer, model, reporter)
            if resume:
                _load_latest(run)
            yield run, model_path


def _prepare_libraries(config: RunConfig) -> None:
    from moerl.ranks.libraries import quiet_libraries, set_threads

    quiet_libraries()
    set_threads(config.num_threads)


def _make_reporter(config: RunConfig) -> Reporter:
    """Makes the reporter of a run, and starts its trackers."""
    trackers = start_trackers(config.metrics, config.run_dir, config.model_dump(mode="json"))
    title, tensorboard = f"{config.recipe}, seed {config.seed}", "tensorboard" in config.metrics.sinks
    return Reporter(config.run_dir, title, tensorboard=tensorboard, trackers=trackers)


def _read_model(folder: Path) -> tuple[Tokenizer, ModelDescription]:
    """Reads the tokenizer of a model directory, and the model, which has as many ids as the tokenizer."""
    from moerl.rollout.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(folder)
    return tokenizer, read_model(folder).with_vocabulary(num_ids(tokenizer))


def _open_scorers(config: RunConfig, tokenizer: Tokenizer) -> Scoring:
    from moerl.rollout.tokenizers import read_tokenizer

    return open_scorers(config.scorers, config.run_dir / "logs", tokenizer, read_tokenizer)


def _check_device(config: RunConfig) -> None:
    """Raises `ConfigError` if the first rank and an embedded engine do not fit on the first GPU of this machine."""
    from moerl.rollout.host import gpu_bytes

    device_bytes = gpu_bytes()
    if device_bytes is not None:
        check_shared_device(config, device_bytes)


def _check_texts(config: RunConfig, task: Task, model_path: Path, reporter: Reporter) -> None:
    """Writes the prompts that are messages, and checks all texts against tokenizer and model. Raises `ConfigError`."""
    tokenizer, model = _read_model(model_path)
    write_prompts(task, tokenizer, config.task, reporter.notify)
    use = text_use(config, model.max_positions)
    check_problems(task, use.problems)
    check_prompts(task, tokenizer, use)


def text_use(config: RunConfig, max_positions: int) -> TextUse:
    """Returns the use that the command of a run makes of the texts of its task. max_positions: those of the model."""
    task, problems, length = config.task.name, wanted_problems(config), config.rollout.max_new_tokens
    return TextUse(config.command, task, problems, config.sft, config.seed, length, max_positions)


def _load_latest(run: Run) -> None:
    """Loads the state of the run that goes on, and notes the keys that were changed for it."""
    run.load_latest()
    config, (stage, step) = run.config, run.position
    changed = changed_keys(load_resolved(config.run_dir / CONFIG_FILE), config)
    changes = [(each, change_note(each, config.optimizer, config.sft.optimizer)) for each in changed]
    take_changes(config.run_dir, changes, stage, step, run.reporter)
    _write_config(config)
    (config.run_dir / SUMMARY_FILE).unlink(missing_ok=True)


def _write_config(config: RunConfig) -> None:
    """Stores the resolved configuration; a kill leaves the file whole, or the run could not go on."""
    with writing(config.run_dir / CONFIG_FILE), atomic_file(config.run_dir / CONFIG_FILE) as path:
        path.write_text(dump_config(config))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Parts of a command that only reads a model; `_collector` gets them in place of a `Run`."""

    task: Task
    tokenizer: Tokenizer
    model: ModelDescription
    quarantine: Quarantine
    reporter: Reporter


def _collector(
    config: RunConfig, model_path: Path, engine: RolloutEngine, run: Run | _Reading, scoring: Scoring | None = None
) -> Collector:
    handshake = engine.handshake()
    layers = select_layers(handshake, run.model.num_layers, run.model.moe_layers)
    ends = read_ends(model_path, run.tokenizer, handshake.spec.vocab_size)
    length, notify, watch = config.rollout.max_new_tokens, run.reporter.notify, run.reporter.within
    sampling = evaluation_sampling(config.evaluation, config.rollout, config.seed)
    plan = EvaluationPlan(config.run_dir / "evaluations", config.evaluation.samples, sampling)
    options = config.task.template_options
    return Collector(
        *(engine, run.task, run.tokenizer, run.quarantine, length, layers, ends, notify, watch, plan, options),
        episode=config.episode,
        scoring=scoring or Scoring({}),
    )


@contextmanager
def _open_reader(config: RunConfig) -> Iterator[tuple[Collector, Reporter]]:
    """Opens the engine of a command that only reads a model, without trainer; yields its collector and reporter."""
    _prepare_libraries(config)
    assert config.model.path is not None
    _write_config(config)
    tokenizer, model = _read_model(config.model.path)
    ends = describe_ends(read_ends(config.model.path, tokenizer, model.spec.vocab_size), tokenizer)
    quarantine = Quarantine(config.run_dir / "quarantine", config.quarantine.max_rate, spec=model.spec)
    with ExitStack() as stack:
        task = stack.enter_context(closing(config.task.open()))
        reporter = stack.enter_context(_make_reporter(config))
        show_model(config.model, reporter.notify)
        _check_texts(config, task, config.model.path, reporter)
        _check_device(config)
        reporter.begin_part("start of the engine")
        engine = stack.enter_context(closing(open_engine(config, model, 0, reporter.notify)))
        reporter.notify(ends)
        reporter.begin_part("responses")
        reading = _Reading(task, tokenizer, model, quarantine, reporter)
        yield _collector(config, config.model.path, engine, reading), reporter
