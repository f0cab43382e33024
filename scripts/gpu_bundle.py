"""Packs what `scripts/gpu_check.sh` needs for a GPU machine without a package index:

``scripts/gpu_check.sh --bundle FOLDER --wheel WHEEL [--have NAME ...]``. Runs on a machine with an index, after
`make setup`, with the other machine's Python version and system. Writes FOLDER/site.tar.xz, one folder of packages:

- megatron-bridge and what moerl depends on, copied from this environment, in the locked versions;
- the packages of requirements/gpu.lock: Transformer Engine and its kernels, of which those of sm_90 (H100, H200) are
  kept, and what checks compare with;
- WHEEL: the part of Transformer Engine that is built against the torch of the other machine (docs/gpu_check.md).

--have names packages of that machine; these, and what they alone depend on, are left out. torch always is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.fatbin import trim

ROOT = Path(__file__).parents[1]
RUN_LOCK, GPU_LOCK = ROOT / "requirements" / "run.lock", ROOT / "requirements" / "gpu.lock"
ARCHITECTURES = {90}
ROOTS = ("moerl", "megatron-bridge")
_KERNELS = "transformer_engine/wheel_lib/libtransformer_engine.so"
_UNUSED = "transformer_engine/jax"
_TORCH_PART = "transformer_engine_torch"
_PRESET = 2


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="FOLDER", help="folder of site.tar.xz")
    parser.add_argument("--wheel", type=Path, required=True, help="of transformer_engine_torch")
    parser.add_argument("--have", nargs="+", default=[], metavar="NAME", help="packages of the GPU machine")
    asked = parser.parse_args(arguments)
    try:
        names = closure({"torch", *map(canonicalize_name, asked.have)})
        check_versions(names)
        check_wheel(asked.wheel)
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder) / "site"
            for name in names:
                copy_package(name, site)
            add_gpu_packages(site)
            with zipfile.ZipFile(asked.wheel) as wheel:
                wheel.extractall(site)
            kept = trim(site / _KERNELS, ARCHITECTURES)
            packed = pack(site, asked.bundle)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: no bundle was made: {error}", file=sys.stderr)
        return 1
    sizes = ", ".join(f"sm_{architecture} {size / 2**20:.0f} MiB" for architecture, size in kept.items())
    print(f"{packed}: {packed.stat().st_size / 2**20:.0f} MiB, {len(names)} packages, kernels of {sizes}")
    print("there: mkdir site; tar -xf site.tar.xz -C site")
    print('there: PYTHONPATH="$PWD/site" PYTHON=python3 CHECKOUT/scripts/gpu_check.sh')
    return 0


def closure(have: Collection[str]) -> list[str]:
    """Names of `ROOTS` and of what moerl depends on, sorted, without moerl itself and those of the other machine.

    Dependencies of megatron-bridge are not followed: it declares packages that it does without (`bridge.in`).

    Raises:
        ValueError: a package is not installed.
    """
    found: set[str] = set()
    waiting: list[str] = list(ROOTS)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in have:
            continue
        found.add(name)
        if name != "megatron-bridge":
            waiting += requirements_of(name)
    return sorted(found - {"moerl"})


def requirements_of(name: str) -> Iterator[str]:
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed in {sys.prefix}; run make setup") from None
    for text in declared:
        requirement = Requirement(text)
        # A run needs moerl's extra `train`, whose list has the packages of the extras that it names.
        extras = ("", "train") if name == "moerl" else ("",)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement.name


def check_versions(names: Collection[str]) -> None:
    """Raises `ValueError` if a package is not installed in its locked version."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", RUN_LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    for name in names:
        installed = importlib.metadata.version(name)
        if installed != locked.get(name):
            raise ValueError(f"{name} {installed} is installed, {RUN_LOCK.name} has {locked.get(name)}; run make setup")


def check_wheel(wheel: Path) -> None:
    """Raises `ValueError` if it is none of Transformer Engine's part for torch in the locked release."""
    (version,) = re.findall(r"^transformer-engine==(\S+)", GPU_LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if not wheel.name.startswith(f"{_TORCH_PART}-{version}-") or not zipfile.is_zipfile(wheel):
        raise ValueError(
            f"{wheel} is no wheel of {_TORCH_PART} {version}; build it against the torch of the GPU machine"
            " (docs/gpu_check.md)"
        )


def copy_package(name: str, site: Path) -> None:
    """Copies the files of an installed package, without its commands and bytecode."""
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(distribution.locate_file(file)), target)


def add_gpu_packages(site: Path) -> None:
    """Installs requirements/gpu.lock, every download checked against its hash, and merges it into the folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        options = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile"]
        subprocess.run([*command, *options, "--target", folder, "--requirement", str(GPU_LOCK)], check=True)
        shutil.copytree(folder, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("bin", "__pycache__"))
    shutil.rmtree(site / _UNUSED, ignore_errors=True)


def pack(site: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "site.tar.xz"
    with lzma.open(packed, "wb", preset=_PRESET) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(site, arcname=".")
    return packed


if __name__ == "__main__":
    sys.exit(main())
