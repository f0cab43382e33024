"""The server's own environment: made, patched and proved. Runs wherever servers will run; needs no GPU by itself.

On GPUs the environment holds what SGLang pins. On CPU it holds what a CPU server imports, and stand-ins for two
packages that exist for CUDA only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moerl.config.passed_on import SERVER_ARGS, SERVER_KEYS, fixed_argument
from moerl.errors import EngineError
from moerl.processes.host import run_command
from moerl.rollout.sglang.patches import (
    DEFAULT_RELEASE,
    apply_patches,
    read_patches,
    release_folder,
    stamped,
    verify_patches,
)

DEVICES = ("cuda", "cpu")
_COMPILED = ("sglang", "torch", "transformers")
"""Packages of which servers import thousands of files."""

_PROBE = "import sys, json; print(json.dumps([*sys.version_info[:2]]))"
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# By name, with underscores, the field that it sets. A file of options takes these two kinds alone.
_ARGUMENTS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
kinds = argparse._StoreAction, argparse._StoreTrueAction
actions = [action for action in parser._actions if isinstance(action, kinds)]
names = {name.lstrip("-").replace("-", "_"): each.dest for each in actions for name in each.option_strings}
print(json.dumps(names))
"""


def install(environment: Path, device: str, python: str | None = None, version: str = DEFAULT_RELEASE) -> bool:
    """Makes the environment, or finishes one that was begun; patches SGLang and proves it.

    One with the patches of another version of moerl gets the release and the patches anew.

    Args:
        environment: its folder.
        device: cuda or cpu.
        python: interpreter to make it with; by default the first of `pythons` that runs.
        version: release of SGLang.

    Returns:
        False if everything was there already.

    Raises:
        EngineError: no interpreter, a package that cannot be installed, another release, or a patch that does not fit.
    """
    if device not in DEVICES:
        raise EngineError("SGLang environment: device", seen=device, expected=f"one of {', '.join(DEVICES)}")
    patches = read_patches(version)
    seen, expected = _read_marker(environment), {"sglang": version, "device": device}
    if seen is not None and seen != expected:
        raise EngineError(
            f"SGLang environment {environment}: made for something else",
            seen=seen,
            expected=expected,
            remedy=f"choose another folder with --env DIR, or --version {seen['sglang']} --device {seen['device']}",
        )
    if seen is not None:
        site = site_packages(environment)
        if stamped(site) == patches.fingerprint:
            verify_patches(site, patches)
            return False
        # So that the release is installed and patched afresh.
        _marker(environment).unlink()
        for folder in (*site.glob("sglang-*.dist-info"), site / "sglang"):
            shutil.rmtree(folder, ignore_errors=True)
    interpreter = find_python(python, version)
    if not (environment / "bin" / "python").exists():
        _run([interpreter, "-m", "venv", "--without-pip", str(environment.absolute())], "make the environment")
    for arguments in _packages(device, version):
        # Bytecode for what servers import alone, below.
        pip = [interpreter, "-m", "pip", "--python", str(python_of(environment)), "install", "--no-compile", "--quiet"]
        _run([*pip, *arguments], "install " + " ".join(arguments))
    site = site_packages(environment)
    if device == "cpu":
        for folder in (release_folder(version) / "cpu" / "stand_ins").iterdir():
            shutil.copytree(folder, site / folder.name, dirs_exist_ok=True)
    apply_patches(site, patches)
    # Else every process of every server compiles thousands of files, if the environment says to write no bytecode.
    compiled = [str(site / name) for name in _COMPILED if (site / name).is_dir()]
    compiling = ["-m", "compileall", "-q", "-j", "0", "-x", "/testing/", *compiled]
    _run([str(python_of(environment)), "-W", "ignore", *compiling], "compile " + ", ".join(_COMPILED))
    _marker(environment).write_text(json.dumps({"sglang": version, "device": device}) + "\n")
    return True


def python_of(environment: Path) -> Path:
    """Returns the environment's interpreter."""
    return environment.absolute() / "bin" / "python"


def device_of(environment: Path) -> str:
    """Returns the device that `moerl sglang install` made an environment for: cuda or cpu.

    Raises:
        EngineError: it is not there, or was not finished.
    """
    made = _read_marker(environment)
    if made is None:
        raise EngineError(
            f"SGLang environment {environment}: not there",
            expected="an environment made by `moerl sglang install`",
            remedy=f"moerl sglang install --env {environment}, with --device cpu if there is no GPU",
        )
    return made["device"]


def site_packages(environment: Path) -> Path:
    """Returns the folder of the environment's packages.

    Raises:
        EngineError: it has no interpreter that runs.
    """
    python = python_of(environment)
    if not python.exists():
        raise EngineError(
            f"SGLang environment {environment}: not there",
            expected="an environment made by `moerl sglang install`",
            remedy=f"moerl sglang install --env {environment}",
        )
    # A run asks, too, when it starts its servers.
    return Path(_run([str(python), "-I", "-c", _SITE], "find its packages", is_spared=True).strip())


def server_arguments(environment: Path) -> dict[str, str]:
    """Returns the arguments that a file of options of the environment's SGLang takes: by each name of one, with
    underscores, the field that it sets. Several names can set one field.

    Raises:
        EngineError: SGLang cannot be imported there.
    """
    python = str(python_of(environment))
    said = _run([python, "-I", "-W", "ignore", "-c", _ARGUMENTS], "list SGLang's arguments", is_spared=True)
    return json.loads(said.splitlines()[-1])


def check_server_args(environment: Path, passed: Mapping[str, Any]) -> None:
    """Checks that the release has arguments of these names, and that none of them is another name of one that is
    refused. Takes seconds: the environment's interpreter imports SGLang.

    Raises:
        EngineError: it has not, or one is; or the arguments cannot be listed.
    """
    if not passed:
        return
    known = server_arguments(environment)
    refused = {field: name for name, field in known.items() if name in SERVER_KEYS or fixed_argument(name)}
    for name, value in passed.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise EngineError(
                f"{SERVER_ARGS}.{name}: SGLang in {environment} has no such argument",
                seen=value,
                expected="one that `python -m sglang.launch_server --help` lists, with underscores",
                remedy=f"did you mean {near[0]}?" if near else "leave it away",
            )
        if known[name] in refused:
            raise EngineError(
                f"{SERVER_ARGS}.{name}: another name of {refused[known[name]]}, which cannot be passed on",
                seen=value,
                expected="no value",
                remedy="leave it away",
            )


def pythons(version: str) -> list[str]:
    """Returns the interpreters that a release runs on, the preferred one first."""
    return (release_folder(version) / "pythons.txt").read_text().split()


def find_python(named: str | None, version: str = DEFAULT_RELEASE) -> str:
    """Finds an interpreter of a version that the release runs on.

    Raises:
        EngineError: there is none, or the named one is not.
    """
    suitable = pythons(version)
    for candidate in [named] if named else _candidates(suitable):
        try:
            probe = [candidate, "-I", "-c", _PROBE]
            major, minor = json.loads(run_command(probe).stdout)
        except (OSError, ValueError):
            continue
        if f"python{major}.{minor}" in suitable:
            return os.path.abspath(shutil.which(candidate) or candidate)
    raise EngineError(
        "SGLang environment: no Python that runs it",
        seen=named or ", ".join(_candidates(suitable)),
        expected=" or ".join(suitable),
        remedy="name one: moerl sglang install --python PATH",
    )


def _candidates(suitable: Sequence[str]) -> Iterator[str]:
    yield from (name for name in suitable if shutil.which(name))
    yield sys.executable
    for name in suitable:
        yield from map(str, Path.home().glob(f".pyenv/versions/{name.removeprefix('python')}*/bin/python"))


def _packages(device: str, version: str) -> list[list[str]]:
    """Returns the arguments of `pip install`, one call after the other."""
    if device == "cuda":
        return [[f"sglang=={version}"]]
    folder = release_folder(version) / "cpu"
    return [["-r", str(folder / "requirements.txt")], ["--no-deps", "-r", str(folder / "packages.txt")]]


def _marker(environment: Path) -> Path:
    return environment / "moerl-sglang.json"


def _read_marker(environment: Path) -> dict[str, str] | None:
    """Returns release and device that the environment was finished for; None if it was not.

    Raises:
        EngineError: the file holds something else.
    """
    marker = _marker(environment)
    if not marker.is_file():
        return None
    try:
        seen = json.loads(marker.read_text())
        return {"sglang": str(seen["sglang"]), "device": str(seen["device"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EngineError(
            f"SGLang environment {environment}: {marker.name} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected="what `moerl sglang install` writes",
            remedy=f"rm {marker}, then moerl sglang install --env {environment}",
        ) from error


def _run(command: Sequence[str], purpose: str, *, is_spared: bool = False) -> str:
    """Returns what a command writes to its standard output."""
    try:
        # Elsewhere: `python -m` looks for modules in the current directory first.
        done = run_command(command, is_spared=is_spared, folder="/")
    except OSError as error:
        raise EngineError(
            f"SGLang environment: could not {purpose}",
            seen=f"{command[0]}: {error.strerror}",
            expected="a program that runs",
            remedy="install into a fresh folder: moerl sglang install --env DIR",
        ) from error
    if done.returncode != 0:
        raise EngineError(
            f"SGLang environment: could not {purpose}",
            seen=(done.stderr or done.stdout).strip()[-1500:],
            expected="status 0",
            remedy="read the message; run the same command again when it is solved",
        )
    return done.stdout
