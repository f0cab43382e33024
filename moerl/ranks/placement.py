"""Placement of the ranks of a run's trainer, of its servers and engine. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moerl.config.placement import set_ray_variables
from moerl.config.ranks import RankConfig, engine_threads
from moerl.config.rollouts import RolloutConfig
from moerl.config.schema import LaunchConfig
from moerl.contract.ports import Task
from moerl.errors import closing
from moerl.ranks.group import TrainerGroup
from moerl.ranks.in_process import InProcess
from moerl.ranks.port import Ranks
from moerl.ranks.processes import Processes
from moerl.rollout.engine_process.local import EngineProcess, LocalProcess
from moerl.rollout.fleet.backend import ServerLauncher
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ServerOptions
from moerl.tasks.data.task import RowsTask


@contextmanager
def open_trainer(
    config: RankConfig, watch: Callable[[int, int], None], lock: int | None = None
) -> Iterator[TrainerGroup]:
    """Opens the trainer of a run, and closes it after the block. One rank is in this process; several ranks, or one
    that trains while groups are sampled, are processes of this machine; on Ray all are actors.

    Args:
        watch: called when a microbatch begins, with the number of those before it and of all in the pass.
        lock: descriptor of the lock of the run directory; ranks on this machine inherit it.

    Raises:
        CheckpointError: the checkpoint in flight at the end could not be written.
    """
    with closing(TrainerGroup(config, _place(config, watch, lock))) as trainer:
        yield trainer


def server_launcher(
    launch: LaunchConfig, rollout: RolloutConfig, options: ServerOptions, folder: Path, start_seconds: float
) -> ServerLauncher:
    """Returns a launcher of a server of a run whose trainer is open: on this machine, or on a node of its Ray cluster;
    in a colocated run, on the node of the ranks whose devices the server shares.

    Args:
        folder, start_seconds: as in `OwnServer`.

    Raises:
        EngineError: no node has as many ranks as the server has devices.
    """
    if launch.on == "ray":
        from moerl.ranks.on_ray.servers import RemoteServer
        from moerl.ranks.on_ray.shared import ranks_of_server

        return RemoteServer(options, folder, start_seconds, ranks_of_server(options) if rollout.is_colocated else ())
    return OwnServer(options, folder, start_seconds)


def engine_process(config: RankConfig, log: Path) -> EngineProcess:
    """Starts the process of an embedded engine of a run whose trainer is open: on this machine, or on a node of its Ray
    cluster. Its output goes to `log`.

    Raises:
        EngineError: no node of the cluster has room for the process.
    """
    if config.launch.on == "ray":
        from moerl.ranks.on_ray.engines import RemoteProcess

        return RemoteProcess(log, engine_threads(config))
    return LocalProcess(log)


def place_rewards(launch: LaunchConfig, task: Task) -> None:
    """Places the reward processes of a task on all nodes of the Ray cluster of a run whose trainer is open; without Ray
    does nothing."""
    if launch.on == "ray" and isinstance(task, RowsTask) and task.scorer.num_processes:
        from moerl.ranks.on_ray.rewards import RewardHosts

        task.scorer.place(RewardHosts(task.scorer.num_processes).child)


def _place(config: RankConfig, watch: Callable[[int, int], None], lock: int | None) -> Ranks:
    if config.launch.on == "ray":
        # Imported here: Ray is an extra, and reads its variables as it is imported.
        set_ray_variables(config.launch)
        from moerl.ranks.on_ray.actors import Actors

        return Actors(config, watch)
    # While the ranks train, the controller collects samples: in one process each would wait for the interpreter.
    if config.parallel.world_size > 1 or config.buffer.max_staleness > 0:
        return Processes(config, watch, lock)
    return InProcess(config, watch)
