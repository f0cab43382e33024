"""Installed packages against what moerl asks for and against the lock file. Reads metadata; imports no package."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from moerl.config.placement import check_ray
from moerl.config.trackers import LIBRARIES, check_trackers
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.inputs import Note
from moerl.launch.checks.outcome import Check, green
from moerl.machine.shipped import BRIDGE, shipped_folder

AREA = "packages"
LOCK = "run.lock"
RUN_EXTRAS = ("tasks", "hf", "train")
"""Extras without which no run starts; `train` asks for the others."""
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+?))? *\\?$")
_AGAIN = (
    "install again: `make setup` in a checkout; else `pip install` of the same wheel with its extra `train` in a fresh"
    f" environment, then `pip install --no-deps {BRIDGE}`"
)
_BRIDGE_NAME: str = canonicalize_name(Requirement(BRIDGE).name)


def look_at_packages(facts: Facts) -> str | Note:
    """Looks whether a job that uses this interpreter finds in it what `moerl doctor` asks for on the node, trackers and
    Ray. Raises `ConfigError` if it does not."""
    sinks, launch = facts.config.metrics.sinks, facts.config.launch
    elsewhere = facts.container or facts.python
    if elsewhere:
        more = [name for name in sinks if name in LIBRARIES] + ["Ray"] * (launch.on == "ray")
        return Note(
            f"not looked at from here: what `moerl train` needs{''.join(f', {name}' for name in more)}, in {elsewhere}",
            "packages that can be looked at",
            "nothing: `moerl doctor` looks on the node, before the run starts",
        )
    found = check_pins(own_requirements(), installed_versions())
    if found.level == "red":
        raise ConfigError(
            "python: the job would run in an interpreter that lacks what `moerl train` needs",
            seen=f"{found.seen}, for {sys.executable}",
            expected=found.expected,
            remedy=f"{found.remedy}; or have `python` or `container` of the site file name one that has it; if modules"
            " of the site file bring packages, load them before you submit",
        )
    check_trackers(sinks)
    check_ray(launch)
    return found.seen


def package_checks() -> list[Check]:
    """Looks at the packages of this process's environment."""
    installed, requirements = installed_versions(), own_requirements()
    lock = shipped_folder("requirements") / LOCK
    return [
        check_python(sys.version_info[:2]),
        check_pins(requirements, installed),
        check_chain(requirements, installed),
        check_lock(lock, installed, exact_names(requirements)),
    ]


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed distribution, by normalised name; the one that an import finds first."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # what a broken removal leaves has none
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


def own_requirements() -> list[str]:
    """Returns the packages that a run requires: from pyproject.toml in a checkout, else from the wheel's metadata."""
    project = shipped_folder("pyproject.toml")
    if project.is_file():
        return read_pins(project)
    asked = map(Requirement, importlib.metadata.requires("moerl") or [])
    named = [each for each in asked if any(_applies(each, extra) for extra in ("", *RUN_EXTRAS))]
    # A wheel lists what `train` asks for with the others' packages among it.
    return [*dict.fromkeys(f"{each.name}{_extras(each)}{each.specifier}" for each in named if each.name != "moerl")]


def read_pins(project: Path) -> list[str]:
    """Returns what a run requires of a pyproject.toml: its dependencies, and those of the extras of a run."""
    table = tomllib.loads(project.read_text())["project"]
    extras = [text for name in RUN_EXTRAS for text in table["optional-dependencies"][name]]
    return [*table["dependencies"], *(text for text in extras if Requirement(text).name != "moerl")]


def read_lock(lock: Path) -> dict[str, str]:
    """Returns versions by normalised name, of entries whose marker is true here."""
    found: dict[str, str] = {}
    for line in lock.read_text().splitlines():
        entry = _ENTRY.match(line)
        if entry is None:
            continue
        name, version, marker = entry.group("name", "version", "marker")
        if marker is None or _applies(Requirement(f"{name} ; {marker}")):
            found[canonicalize_name(name)] = version
    return found


def exact_names(requirements: Sequence[str]) -> set[str]:
    """Returns the packages of which exactly one version will do."""
    pinned = {
        canonicalize_name(each.name)
        for each in map(Requirement, requirements)
        if any(part.operator == "==" for part in each.specifier)
    }
    return {*pinned, _BRIDGE_NAME}


def check_python(version: tuple[int, int]) -> Check:
    """Checks that the interpreter has the one version that Megatron-Bridge runs on."""
    seen = ".".join(map(str, version))
    if version == (3, 12):
        return green(AREA, "Python", seen)
    remedy = "make the environment with Python 3.12"
    return Check(AREA, "Python", "red", seen, "3.12, the only one that megatron-bridge runs on", remedy)


def check_pins(requirements: Sequence[str], installed: Mapping[str, str]) -> Check:
    """Checks that every package that moerl asks for is installed, at a version that moerl accepts."""
    asked = map(Requirement, [*requirements, BRIDGE])
    wrong = [each for each in asked if _applies(each) and not _is_met(each, installed)]
    if not wrong:
        torch, core = installed.get("torch", "-"), installed.get("megatron-core", "-")
        seen = f"{len(requirements)} requirements met; torch {torch}, megatron-core {core}"
        return green(AREA, "pins", seen)
    return Check(AREA, "pins", "red", _seen(wrong, installed), ", ".join(map(_wanted, wrong)), _AGAIN)


def check_chain(requirements: Sequence[str], installed: Mapping[str, str]) -> Check:
    """Checks the packages that moerl's packages ask for in turn; Megatron-Bridge's list is left out, as CUDA-only
    packages are in it."""
    wrong: dict[str, Requirement] = {}
    names = set[tuple[str, frozenset[str]]]()
    ahead = [(canonicalize_name(each.name), frozenset(each.extras)) for each in map(Requirement, requirements)]
    while ahead:
        name, extras = ahead.pop()
        if (name, extras) in names or name not in installed:
            continue
        names.add((name, extras))
        for each in _requirements_of(name, extras):
            if not _is_met(each, installed):
                wrong.setdefault(f"{name} asks for {_wanted(each)}", each)
            ahead.append((canonicalize_name(each.name), frozenset(each.extras)))
    if not wrong:
        return green(AREA, "what these need", f"{len({name for name, _ in names})} packages agree")
    return Check(AREA, "what these need", "red", _seen([*wrong.values()], installed), "; ".join(sorted(wrong)), _AGAIN)


def check_lock(lock: Path, installed: Mapping[str, str], exact: set[str]) -> Check:
    """Compares installed versions with the lock file. exact: packages of which another version is a fault, not a
    note."""
    if not lock.is_file():
        return green(AREA, "lock file", f"none at {lock}: a wheel carries none; compared with the wheel's pins alone")
    locked = read_lock(lock)
    other = [name for name, version in locked.items() if name in installed and not _same(installed[name], version)]
    here = sum(name in installed for name in locked)
    if not other:
        return green(AREA, "lock file", f"{here} of its {len(locked)} packages are installed, all as {lock.name} says")
    return Check(
        AREA,
        "lock file",
        "red" if exact & set(other) else "yellow",
        ", ".join(f"{name} {installed[name]}" for name in other),
        ", ".join(f"{name} {locked[name]}" for name in other) + f", as {lock.name} says",
        "`make setup`, which installs from the lock; or `make lock`, if other versions are meant",
    )


def _requirements_of(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    if name == _BRIDGE_NAME:
        return
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        if any(_applies(requirement, extra) for extra in ("", *extras)):
            yield requirement


def _applies(requirement: Requirement, extra: str = "") -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    except UndefinedEnvironmentName:
        return False


def _is_met(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    version = installed.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _same(installed: str, locked: str) -> bool:
    """Returns True for versions that are equal but for a local part (``2.13.0+cpu``), which says how a package was
    built."""
    try:
        return Version(installed).public == Version(locked).public
    except InvalidVersion:
        return installed == locked


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _wanted(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _seen(requirements: Sequence[Requirement], installed: Mapping[str, str]) -> str:
    names = dict.fromkeys(canonicalize_name(each.name) for each in requirements)
    return ", ".join(f"{name} {installed.get(name, 'missing')}" for name in names)
