"""Stand-ins for enroot, apptainer and pyxis, and for the commands of SLURM that a job's script calls.

They are shell scripts that keep and drop environment variables as the documentation and the source of the real ones
say, and start the command of an image that is a folder. They mount and isolate nothing.

enroot starts in another folder, keeps nothing but variables of the image and `--env`, and drops ENROOT_*. apptainer
keeps all, none with --cleanenv; variables of the image win, and over them APPTAINERENV_*. srun passes all unless
SLURM_EXPORT_ENV forbids it; with --container-image variables of the image win but over those of --container-env. It
passes signals on to all processes of its tasks, and ends what they leave behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from waiting import eventually, status_of

SCRIPT_SECONDS = 60.0

_ENROOT = """\
printf '%s\\n' "enroot $*" >>"$CALLS"
[ "$1" = start ] || { echo "enroot: $1" >&2; exit 1; }
shift
given=() image=""
while [ $# -gt 0 ]; do
  case $1 in
    --env) case $2 in *=*) given+=("$2") ;; ENROOT_*) ;; *) given+=("$2=${!2}") ;; esac; shift 2 ;;
    --mount) shift 2 ;;
    -*) shift ;;
    *) image=$1; shift; break ;;
  esac
done
cat "$image/greeting" 2>/dev/null
cd / && exec env -i $(cat "$image/environment") "${given[@]}" "$@"
"""

_APPTAINER = """\
printf '%s\\n' "apptainer $*" >>"$CALLS"
[ "$1" = exec ] || { echo "apptainer: $1" >&2; exit 1; }
shift
clean="" image=""
while [ $# -gt 0 ]; do
  case $1 in
    --bind) shift 2 ;;
    --cleanenv) clean=-i; shift ;;
    -*) shift ;;
    *) image=$1; shift; break ;;
  esac
done
given=()
for name in $(compgen -e); do
  case $name in APPTAINERENV_*) given+=("${name#APPTAINERENV_}=${!name}"); unset "$name" ;; esac
done
exec env $clean $(cat "$image/environment") "${given[@]}" "$@"
"""

_SRUN = """\
printf '%s\\n' "srun $*" >>"$CALLS"
image="" named="" workdir=$PWD tasks=1 export=${SLURM_EXPORT_ENV:-ALL}
while [ $# -gt 0 ]; do
  case $1 in
    --container-image=*) image=${1#*=} ;;
    --container-env=*) named=${1#*=} ;;
    --container-workdir=*) workdir=${1#*=} ;;
    --ntasks=*) tasks=${1#*=} ;;
    --export=*) export=${1#*=} ;;
    --*) ;;
    *) break ;;
  esac
  shift
done
kept=()
[ "$export" = ALL ] || kept+=(-i PATH="$PATH" CALLS="$CALLS")
if [ -n "$image" ]; then
  for setting in $(cat "$image/environment"); do
    name=${setting%%=*}
    case ",$named," in *",$name,"*) [ -n "${!name}" ] || kept+=("$setting") ;; *) kept+=("$setting") ;; esac
  done
fi
cd "$workdir" || exit 1
step=()
# Before the first task: it may say that it runs, and be told to stop, at once.
for signal in TERM USR1 USR2; do
  # shellcheck disable=SC2064
  trap "interrupted=1; for task in \\"\\${step[@]}\\"; do kill -$signal -- -\\$task; done" "$signal"
done
for ((task = 0; task < tasks; task++)); do
  setsid env "${kept[@]}" SLURM_PROCID="$task" SLURM_NODEID="$task" "$@" &
  step+=("$!")
done
status=0
for task in "${step[@]}"; do
  # A signal ends `wait` before the task has ended.
  interrupted=1
  while [ "$interrupted" = 1 ]; do interrupted=0; wait "$task"; code=$?; done
  [ "$code" = 0 ] || status=$code
  kill -KILL -- "-$task" 2>/dev/null
done
exit "$status"
"""

_SCONTROL = """\
printf '%s\\n' "scontrol $*" >>"$CALLS"
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "NodeName=$3 NodeAddr=127.0.0.1 x" ;;
esac
"""

_PYTHON = """\
case $2 in moerl|*attempts) name=$2-$3-$SLURM_PROCID ;; *) name=$2-$SLURM_PROCID ;; esac
{ env -0; printf 'PWD_INSIDE=%s\\0' "$(pwd -P)"; } >"SEEN/.$name" && mv "SEEN/.$name" "SEEN/$name"
case "$2 $3" in
  *"attempts begin") echo "SEEN/attempt-001.log" ;;
  *"attempts end") exit "$5" ;;
  "moerl.ranks.on_ray.nodes "*) until [ -e SEEN/ray.scripts.scripts-0 ]; do sleep 0.05; done ;;
  "moerl train") [ ! -e SEEN/long ] || { trap 'exit 75' USR1; touch SEEN/started; while :; do sleep 0.05; done; } ;;
esac
"""


@dataclass(frozen=True)
class StandIns:
    """folder: of the programs and of what they leave behind. image: the folder that is the image."""

    folder: Path
    image: Path

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of a batch shell whose user has exported these variables."""
        mine = {"PATH": f"{self.folder / 'bin'}:{os.defpath}", "CALLS": str(self.folder / "calls")}
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0"}
        return {**job, **variables, **mine}

    def run(self, script: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        """Runs a job's script to its end; returns its status and its output."""
        with self._shell(script, variables) as shell:
            status = status_of(shell, SCRIPT_SECONDS)
        return status, self._output.read_text()

    def stop(self, script: Path, variables: Mapping[str, str]) -> int:
        """Runs a job's script, tells its shell to stop while the run goes on, and returns the status."""
        (self.folder / "seen" / "long").touch()
        with self._shell(script, variables) as shell:
            eventually((self.folder / "seen" / "started").exists)
            shell.send_signal(signal.SIGUSR1)
            return status_of(shell, SCRIPT_SECONDS)

    @property
    def _output(self) -> Path:
        return self.folder / "output"

    @contextlib.contextmanager
    def _shell(self, script: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """The batch shell; at the end its steps end with it, as SLURM has it."""
        with self._output.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", script],
                env=self.environment(variables),
                cwd=script.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield shell
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            status_of(shell, SCRIPT_SECONDS)

    def seen(self, command: str) -> dict[str, str]:
        """Returns the variables of a command of the image."""
        text = (self.folder / "seen" / command).read_text()
        return dict(line.split("=", 1) for line in text.split("\0") if line)

    def commands(self) -> set[str]:
        """Returns the commands of the image that were started, each with the number of its task."""
        seen = self.folder / "seen"
        return {file.name for file in seen.iterdir() if (file.name.startswith(("moerl", "ray")))}

    def calls(self) -> str:
        """Returns the command lines of all stand-ins."""
        return (self.folder / "calls").read_text()


def stand_ins(folder: Path, image_variables: Mapping[str, str]) -> StandIns:
    """Writes the programs and an image whose entrypoint prints a line.

    Args:
        folder: an empty one; its path has no space.
        image_variables: those that the image sets besides PATH; without spaces.
    """
    made = StandIns(folder, folder / "image")
    (folder / "seen").mkdir(parents=True)
    (made.image / "bin").mkdir(parents=True)
    programs = {"enroot": _ENROOT, "apptainer": _APPTAINER, "srun": _SRUN, "scontrol": _SCONTROL}
    for name, text in {**programs, "squeue": "echo RUNNING\n"}.items():
        _write(folder / "bin" / name, text)
    _write(made.image / "bin" / "python", _PYTHON.replace("SEEN", str(folder / "seen")))
    values = {"PATH": f"{made.image / 'bin'}:{os.defpath}", **image_variables}
    (made.image / "environment").write_text("\n".join(f"{name}={value}" for name, value in values.items()) + "\n")
    (made.image / "greeting").write_text("== an image that greets ==\n")
    return made


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)
