"""A SLURM of its own for tests: munged, slurmctld and a slurmd for each emulated node, on loopback, without systemd.

All state lies in one folder; the daemons are children of the test process and end with it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from moerl_runs import ENVIRONMENT
from waiting import eventually, is_alive, run_within, status_of

from moerl.processes.parent import die_with

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "shellcheck")
START_SECONDS = 60.0
COMMAND_SECONDS = 60.0
JOB_SECONDS = 300.0

_CONFIG = """\
ClusterName=moerl-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# SLURM holds a requeued job back for as long as credentials of its steps are valid, two minutes unless told.
AuthInfo=socket={state}/munge.socket,cred_expire=10
CryptoType=crypto/munge
SlurmctldPort={controller_port}
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={state}/completed.txt
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
# Nodes that do not answer are down after this time.
SlurmdTimeout=20
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr={address} Port={node_ports} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes={nodes} Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes={nodes} MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """The daemons, and commands of SLURM that talk to them.

    Args:
        state: an empty folder; its path is short enough for a socket in it.
        num_nodes: emulated nodes, called n1, n2 and so on
        address: of this machine, where nodes find each other

    Attributes:
        environment: what commands of SLURM need.
    """

    def __init__(self, state: Path, num_nodes: int, address: str = "127.0.0.1") -> None:
        self.state, self.nodes = state, [f"n{number}" for number in range(1, num_nodes + 1)]
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**ours, **ENVIRONMENT, "SLURM_CONF": str(state / "slurm.conf")}
        self.environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._address = address
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Returns once all nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        names = f"n[1-{len(self.nodes)}]" if len(self.nodes) > 1 else "n1"
        (self.state / "controller").mkdir()
        (self.state / "slurm.conf").write_text(
            _CONFIG.format(
                host=host,
                user=getpass.getuser(),
                state=self.state,
                address=self._address,
                controller_port=ports[0],
                nodes=names,
                node_ports=f"[{','.join(map(str, ports[1:]))}]",
            )
        )
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        eventually(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"), START_SECONDS)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kills the daemon of a node and all steps of this cluster, as a loss of power does; others have no jobs.

        Returns once these processes have ended.
        """
        killed = [each for pid in (self._daemons[node].pid, *self._step_daemons()) for each in _family(pid)]
        for pid in killed:
            _kill(pid)
        self._daemons[node].wait()
        eventually(lambda: not any(map(is_alive, killed)))

    def close(self) -> None:
        """Ends jobs and daemons."""
        try:
            if "slurmctld" in self._daemons:
                self.call("scancel", "--user", getpass.getuser(), check=False)
                eventually(lambda: not self.call("squeue", "--noheader", check=False).strip(), 60.0)
        finally:
            for name in [*self.nodes, "slurmctld", "munged"]:
                if name in self._daemons:
                    _end(self._daemons[name])
            self._ends.close()

    def call(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Runs a command and returns its stdout; `check` requires status 0."""
        done = run_within(command, COMMAND_SECONDS, env=self.environment, cwd=cwd)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def sbatch(self, *arguments: str, cwd: Path | None = None) -> str:
        """The id of a job that this submits."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd).strip()

    def node_states(self) -> dict[str, str]:
        """By name; empty where the controller does not answer."""
        rows = self.call("sinfo", "--Node", "--noheader", "--format=%N %t", check=False).split("\n")
        return dict(row.split() for row in rows if row)

    def job(self, job: str) -> dict[str, str]:
        """Returns the fields of ``scontrol show job``; of arrays, each task has an id of its own."""
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(field.split("=", 1) for field in re.split(r"\s+(?=[A-Za-z:/]+=)", text.strip()) if "=" in field)

    def wait_for(self, job: str, *states: str, seconds: float = JOB_SECONDS) -> dict[str, str]:
        """The job once it is in one of the states; fails at once where it ended in another."""
        self.wait_until(lambda: self.job(job)["JobState"] in (*states, *_ENDS), job, seconds)
        found = self.job(job)
        assert found["JobState"] in states, f"{found}\n{self.logs()}"
        return found

    def wait_until(self, condition: Callable[[], bool], job: str, seconds: float = JOB_SECONDS) -> None:
        """Until the condition holds; fails at once where the job ended as failed."""
        try:
            eventually(lambda: condition() or self.job(job)["JobState"] == "FAILED", seconds)
            assert condition()
        except AssertionError as error:
            raise AssertionError(f"gave up: {self.job(job)}\n{self.logs()}") from error

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(self.state.glob("*.log")))

    def _start_munge(self) -> None:
        key = self.state / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.state.chmod(0o755)
        files = {name: self.state / f"munge.{name}" for name in ("socket", "seed", "pid")}
        self._start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"),
            *(f"--seed-file={files['seed']}", f"--pid-file={files['pid']}", "--num-threads=2"),
            f"--log-file={self.state / 'munged.log'}",
        )
        eventually(files["socket"].exists, START_SECONDS)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        output = self._ends.enter_context((self.state / f"{name}.output.log").open("ab"))
        self._daemons[name] = subprocess.Popen(
            [_program(program), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The test process may be killed, and then closes nothing.
            preexec_fn=partial(die_with, os.getpid()),
        )

    def _step_daemons(self) -> list[int]:
        """Daemons of steps, which are no children of their node's; known by the configuration that they inherited."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_step = (folder / "cmdline").read_bytes().startswith(b"slurmstepd:")
                if is_step and f"SLURM_CONF={self.state}/".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # ended meanwhile, or another user's
                continue
        return found


_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


def missing_programs() -> list[str]:
    """Programs that these tests need and this machine lacks."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    """Daemons lie where only root's PATH leads."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


def _program(name: str) -> str:
    found = _find(name)
    assert found is not None, f"{name} is not installed"
    return found


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _family(root: int) -> list[int]:
    """A process and its descendants."""
    family = [root]
    for pid in family:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                family += map(int, task.read_text().split())
            except OSError:  # ended meanwhile
                continue
    return family


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        status_of(daemon, 20.0)
    except AssertionError:
        daemon.kill()
        daemon.wait()
