"""Starts of commands of a job in a container, and the environment variables that arrive there. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.errors import ConfigError
from moerl.launch.slurm.site import Container

PASSED = (
    # The hub, its token included, and the libraries that read it.
    *("HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    # GPUs and what connects them.
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_*", "CUDA_LAUNCH_BLOCKING", "CUDA_CACHE_*", "NVIDIA_*", "NCCL_*", "GLOO_*"),
    *("UCX_*", "TP_SOCKET_IFNAME"),
    # Libraries that compute, and their threads.
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "NVTE_*", "FLASHINFER_*", "SGLANG_*", "SGL_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "NUMBA_*"),
    # The job, its processes, and us.
    *("SLURM_*", "SLURMD_NODENAME", "MASTER_*", "RAY_*", "MOERL_*"),
    # Trackers, and the way out.
    *("WANDB_*", "MLFLOW_*", "TRACKIO_*", "*_proxy", "*_PROXY"),
)
"""Environment variables that commands in a container get, as patterns of a shell's `case`. Those of `environment` of
the site file come with them. Paths of programs and libraries (PATH, LD_LIBRARY_PATH, CUDA_HOME) and HOME are those of
the image."""

# The script runs on the node of the command, and inside of its step of SLURM if it has one: a process has the variables
# of its own node. No value stands on a command line, which everybody on a node can read.
_ENROOT = """\
passed=()
for name in $(compgen -e); do
  case $name in {patterns}) ;; *) continue ;; esac
  case ${{!name}} in *"
"*) echo "error: $name has several lines, and enroot passes one; make it one line, or unset it" >&2; exit 2 ;; esac
  passed+=(--env "$name")
done
exec enroot start "${{passed[@]}}" "$@"
"""
_APPTAINER = """\
for name in $(compgen -e); do
  case $name in {patterns}) export "APPTAINERENV_$name=${{!name}}" ;; esac
done
exec apptainer exec --nv "$@"
"""
_PYXIS = """\
passed=""
for name in $(compgen -e); do
  case $name in {patterns}) passed+=${{passed:+,}}$name ;; esac
done
exec srun --overlap --export=ALL --cpu-bind=none --container-env="$passed" "$@"
"""
_SCRIPTS = {"enroot": _ENROOT, "apptainer": _APPTAINER, "pyxis": _PYXIS}


@dataclass(frozen=True, slots=True)
class CommandPrefixes:
    """Shell text before commands of a job."""

    inside: tuple[str, ...] = ()
    """Words of the shell array `inside`, which the other texts name; empty without a container."""
    here: str = ""
    """Text before a command on this node."""
    step: str = "srun --overlap --export=ALL --cpu-bind=none"
    """Text that starts a step of SLURM, without numbers of nodes and tasks."""
    in_step: str = ""
    """Text before a command in such a step."""


def container_start(container: Container | None, variables: Sequence[str], folders: Sequence[Path]) -> CommandPrefixes:
    """Returns the texts that start commands, in a container if the site has one.

    Args:
        variables: names of the variables that the site file sets.
        folders: absolute paths that the container has to show at the same place; commands run in the first.

    Raises:
        ConfigError: a folder cannot be mounted, because of its name.
    """
    if container is None:
        return CommandPrefixes()
    script = _SCRIPTS[container.runtime].format(patterns="|".join([*PASSED, *variables]))
    words, mounts = ("bash", "-c", script, "inside"), _mounts(container, folders)
    array = '"${inside[@]}"'
    if container.runtime == "pyxis":
        shown = (f"--container-mounts={','.join(mounts)}", f"--container-workdir={folders[0]}")
        inside = (*words, f"--container-image={container.image}", *shown, *container.arguments)
        return CommandPrefixes(inside, f'{array} --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" ', step=array)
    # enroot starts in the home of the image, apptainer in another folder if this one is not mounted.
    option = "--bind" if container.runtime == "apptainer" else "--mount"
    options = [word for mount in mounts for word in (option, mount)]
    inside = (*words, *options, *container.arguments, container.image, "env", f"--chdir={folders[0]}")
    return CommandPrefixes(inside, f"{array} ", in_step=f"{array} ")


def shown_folders(container: Container, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the folders that a container shows. Apptainer shows the home, too, unless a site forbids it.

    Raises:
        ConfigError: as `container_start`.
    """
    home = (Path.home(),) if container.runtime == "apptainer" else ()
    return (*map(_target, _mounts(container, folders)), *home)


def _mounts(container: Container, folders: Sequence[Path]) -> list[str]:
    """Returns the mounts of the site file, and the folders that none of them shows at their own place."""
    mounts = [*container.mounts]
    for folder in folders:
        if any(folder.is_relative_to(_target(mount)) for mount in mounts):
            continue
        if folder == Path(folder.anchor) or {",", ":"} & set(str(folder)):
            raise ConfigError(
                "container: a folder that it cannot mount",
                seen=folder,
                expected="another one than /, and a path without , and :",
                remedy="submit from another directory, or choose another run_dir",
            )
        mounts.append(str(folder))
    return mounts


def _target(mount: str) -> Path:
    """Returns the folder of a mount inside of the container."""
    source, _, target = mount.partition(":")
    return Path(target.partition(":")[0] or source)
