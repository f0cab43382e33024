"""``moerl plan run``: step time, idle shares and ages with more or less staleness, before a run asks for a machine.

Simulated around the queue of a run (`moerl.buffer.simulation`), with costs that were fitted to a run
(`moerl.launch.calibration`) or are worked out here from figures of devices. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moerl.batching.cost import sequence_flops
from moerl.buffer.queue import QueueLimits
from moerl.buffer.simulated_turns import Draw, drawn_from, in_turns, long_tailed
from moerl.buffer.simulation import Simulated, SimulatedFleet, StepCosts, simulate
from moerl.config.architecture import describe_model
from moerl.config.engine_memory import cache_token_bytes, engine_needs, pool_tokens
from moerl.config.rollout_checks import require_engine
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.run_memory import GIB, Machine, check_server
from moerl.config.schema import RunConfig
from moerl.launch.calibration import Calibration, calibrate, computes_again, fleet_of
from moerl.launch.plan_weights import PlannedUpdate
from moerl.machine.layouts import as_overrides
from moerl.machine.memory import total_parameters
from moerl.weights.estimate import Bandwidths

PREFILL_EFFICIENCY = 0.5
DECODE_EFFICIENCY = 0.6
"""Share of a device's peak that prefill reaches in operations, and decoding in memory bandwidth."""

STALENESS = (1, 2, 4, 8)
"""Values of `buffer.max_staleness` besides 0 that a plan compares."""
_COLOCATED = "\ncolocated servers sleep while the trainer works: more staleness needs rollout.placement=disaggregated"
_LEGEND = (
    "S, W, N: buffer.max_staleness, buffer.window or when_stale=drop, weights.every. gain: tokens a second over those"
    " without staleness. trainer, engines: share of time that they wait. age: largest and mean, in versions. lost:"
    " share of sampled tokens that are dropped"
)


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of a device, as the user gives them."""

    tflops: float
    """Peak, dense, in the precision of the weights; 10**12 operations per second."""
    memory_gb_per_second: float
    """Bandwidth of its own memory."""
    mfu: float
    """Share of `tflops` that training reaches."""
    memory_gib: float
    """Size of its own memory."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of prompts and responses, if no run is read for them."""

    mean_tokens: float
    """Mean of a response; lengths are log-normal (sigma 1), cut off at `rollout.max_new_tokens`."""
    prompt_tokens: int
    """Tokens of every prompt."""
    turns: int = 1
    """Turns of an episode, which share the tokens of a response equally."""
    tool_seconds: float = 0.0
    """Mean seconds of the environment between two turns, exponentially distributed."""
    tool_tokens: int = 0
    """Tokens that the environment writes between two turns."""

    @property
    def observed_tokens(self) -> int:
        """Tokens that the environment writes in an episode."""
        return (self.turns - 1) * self.tool_tokens


def plan_run(
    config: RunConfig, *, run_dir: Path | None, device: Device, workload: Workload, bandwidths: Bandwidths
) -> int:
    """Prints the plan; returns exit status 0.

    Args:
        run_dir: run to read costs and lengths from; None = work them out from `device` and `workload`.

    Raises:
        ConfigError: `run_dir` cannot be used, or no engine samples.
    """
    require_engine(config.rollout, "moerl plan run")
    console = Console(soft_wrap=True, highlight=False)
    calibration = None if run_dir is None else calibrate(run_dir)
    fleet = fleet_of(config.rollout)
    if calibration is None:
        fleet = fleet_on(config, device, workload.prompt_tokens + workload.observed_tokens + workload.mean_tokens)
        update = PlannedUpdate(config.model, config.parallel, config.weights, config.rollout, bandwidths)
        costs = estimate(config, device, workload, update.seconds)
        console.print(_assumptions(config, device, workload, fleet))
    else:
        costs = calibration.costs
        console.print(
            f"costs of {calibration.num_steps} steps of {run_dir}: {calibration.step_seconds:.2f} s a step as measured,"
            f" lengths of {len(calibration.episodes)} responses in its dumps{_measured_turns(calibration)}"
        )
    console.print(
        f"one token: {1e3 * costs.decode_step:.3g} ms and {1e3 * costs.decode_row:.3g} ms per response; a prompt:"
        f" {1e3 * costs.prefill_row:.3g} ms; training: {costs.train_step:.3g} s and {1e3 * costs.train_token:.3g} ms"
        f" per token; weights: {costs.publish:.3g} s"
    )
    console.print(_table(config, fleet, costs, lambda: _episodes(config, calibration, workload), console))
    return 0


def predict(
    config: RunConfig, limits: QueueLimits, costs: StepCosts, episode: Draw, fleet: SimulatedFleet | None = None
) -> Simulated:
    """Returns what a run of this configuration would do with these slots, costs and episodes.

    Args:
        fleet: engines; None for those of the configuration, if the memory of their devices is no limit.
    """
    return simulate(limits, fleet or fleet_of(config.rollout), costs, group_size=config.rl.group_size, episode=episode)


def fleet_on(config: RunConfig, device: Device, row_tokens: float) -> SimulatedFleet:
    """Returns the engines of a run with as many responses side by side as the caches of their servers hold.

    Args:
        row_tokens: mean tokens of a sequence, prompt included.

    Raises:
        ConfigError: a server could not finish one response.
    """
    fleet, rollout = fleet_of(config.rollout), config.rollout
    if not isinstance(rollout, SGLangRolloutConfig):
        return fleet
    machine = Machine(device.memory_gib * GIB)
    check_server(config, machine)
    engine = engine_needs(rollout, config.trainer, config.task, describe_model(config.model))
    tokens = pool_tokens(rollout, engine, machine.gpu_bytes)
    return replace(fleet, max_running=min(fleet.max_running, max(1, int(tokens / row_tokens))))


def estimate(config: RunConfig, device: Device, workload: Workload, publish_seconds: float) -> StepCosts:
    """Estimates costs on devices of one kind, for trainer and engines alike.

    Training: 3 forward passes' operations (a fourth if log-probs are scored before the update). Decoding: an engine
    reads all weights for every token, and the keys and values of each response. Weights and caches have two bytes a
    number.
    """
    model, trainer_devices = describe_model(config.model), config.parallel.world_size
    engine_devices = getattr(config.rollout, "tensor", 1)
    cost, mean_tokens, prompt_tokens = sequence_flops(model), workload.mean_tokens, workload.prompt_tokens
    mean_rows = prompt_tokens + workload.observed_tokens + mean_tokens
    passes = 4 if config.rl.minibatches > 1 or config.keep_routing.mode == "trainer" else 3
    operations = device.tflops * 1e12
    memory = device.memory_gb_per_second * 1e9 * DECODE_EFFICIENCY * engine_devices
    token = cost.linear / (operations * PREFILL_EFFICIENCY * engine_devices)
    cache_row = (
        engine_devices
        * cache_token_bytes(model, engine_devices, 2)
        * (prompt_tokens + (workload.observed_tokens + mean_tokens) / 2)
    )
    return StepCosts(
        decode_step=2 * total_parameters(model) / memory,
        decode_row=cache_row / memory + token,
        prefill_row=cost(prompt_tokens) / (operations * PREFILL_EFFICIENCY * engine_devices),
        train_step=0.0,
        train_token=passes * cost(round(mean_rows)) / mean_tokens / (operations * device.mfu * trainer_devices),
        publish=publish_seconds,
        recompute_token=token if computes_again(config.rollout, config.weights) else 0.0,
        prefill_token=token,
    )


def _episodes(config: RunConfig, calibration: Calibration | None, workload: Workload) -> Draw:
    """Returns a source of episodes, which begins with the same ones at each call of this function."""
    if calibration is not None:
        return drawn_from(calibration.episodes, config.seed)
    longest = max(1, config.rollout.max_new_tokens - workload.observed_tokens)
    length = long_tailed(workload.mean_tokens, longest, config.seed)
    return in_turns(length, workload.turns, workload.tool_tokens, workload.tool_seconds, config.seed)


def _measured_turns(calibration: Calibration) -> str:
    """Returns what is to be said of episodes; nothing if all have one turn."""
    turns = [turn for episode in calibration.episodes for turn in episode]
    if len(turns) == len(calibration.episodes):
        return ""
    acting = sum(turn.environment_seconds for turn in turns) / len(calibration.episodes)
    return f", of {len(turns) / len(calibration.episodes):.3g} turns and {acting:.3g} s of the environment in the mean"


def _assumptions(config: RunConfig, device: Device, workload: Workload, fleet: SimulatedFleet) -> str:
    asked = config.rollout.max_running
    limit = f" (of {asked}: more do not fit the cache)" if fleet.max_running < asked else ""
    return (
        f"{config.parallel.world_size} devices train ({as_overrides(config.parallel.dims)}), {fleet.engines} engines of"
        f" {getattr(config.rollout, 'tensor', 1)} sample {fleet.max_running} responses each{limit}; a device has"
        f" {device.tflops:g} TFLOP/s, {device.mfu:.0%} of which training reaches, and {device.memory_gb_per_second:g}"
        f" GB/s\nprompts of {workload.prompt_tokens} tokens, responses of {workload.mean_tokens:g} on average,"
        f" log-normal, at most {config.rollout.max_new_tokens}"
        + (
            f"\n{workload.turns} turns, between two of them {workload.tool_tokens} tokens and"
            f" {workload.tool_seconds:g} s of the environment on average"
            if workload.turns > 1
            else ""
        )
    )


def _table(
    config: RunConfig, fleet: SimulatedFleet, costs: StepCosts, episodes: Callable[[], Draw], console: Console
) -> Table:
    """Makes a row for each setting that the placement of engines allows, with the same episodes in all; the setting of
    the configuration is bold."""
    own, per_step, colocated = config.queue_limits(), config.rl.prompts_per_step, config.rollout.is_colocated
    ahead = () if colocated else STALENESS
    settings = [QueueLimits(per_step, staleness) for staleness in (0, *ahead)]
    settings += [QueueLimits(per_step, staleness, 2 * per_step) for staleness in ahead]
    settings += [QueueLimits(per_step, staleness, drops=True) for staleness in ahead]
    legend = _LEGEND + (_COLOCATED if colocated else "")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=legend, caption_justify="left")
    for heading in ("S", "W", "N", "step s", "token/s", "gain", "trainer", "engines", "age", "mean", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = 0.0
    rows = list(dict.fromkeys([*settings, own]))
    for limits in track(rows, "simulating", console=console, transient=True, disable=not console.is_terminal):
        found = predict(config, limits, costs, episodes(), fleet)
        base = base or found.tokens_per_second
        table.add_row(
            str(limits.max_staleness),
            "drop" if limits.drops else str(limits.window),
            str(limits.update_every),
            f"{found.step_seconds:.2f}",
            f"{found.tokens_per_second:.4g}",
            f"{found.tokens_per_second / base:.2f}",
            f"{found.trainer_waits:.0%}",
            f"{found.engines_wait:.0%}",
            str(found.age_max),
            f"{found.age_mean:.2f}",
            f"{found.left_out:.1%}",
            style="bold" if limits == own else "",
        )
    return table
