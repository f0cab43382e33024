"""Golden vectors: what other implementations compute from the same inputs, stored in `tests/golden/` for our tests.

    python -m scripts.golden                    makes all again and compares them with what is stored
    python -m scripts.golden verl trl           those of these packages
    python -m scripts.golden --store verl       stores them

Each package goes into a folder of its own, without its dependencies. Ends with 1 if a number differs, and with 3
if a package could not be installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.golden.inputs import drawn

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "golden"
PACKAGES = ("liger", "verl", "trl", "areal")
DIFFERS, NOT_HAD = 1, 3
TOLERANCE, TOLERANCES = 1e-12, {"areal": 2.0**-21}
"""Relative differences. AReaL computes shares in float32, whose last digits are those of the CPU."""


def main() -> int:
    """The status to exit with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--store", action="store_true", help="write to tests/golden/ instead of comparing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "golden", help="folder for packages")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - set(PACKAGES):
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    if arguments.make is not None:
        write(arguments.packages[0], arguments.make)
        return 0
    worst = 0
    for package in arguments.packages or PACKAGES:
        worst = max(worst, _again(package, arguments.folder, store=arguments.store))
    return worst


def write(package: str, file: Path) -> None:
    """Calls the package, which is importable, and writes what it computes."""
    script: Any = importlib.import_module(f"scripts.golden.{package}")
    name = script.REQUIRES[0].partition("==")[0]
    inputs = drawn()
    stored = {
        "package": name,
        "version": importlib.metadata.version(name),
        "requires": list(script.REQUIRES),
        "command": f"python -m scripts.golden --store {package}",
        "inputs": inputs.stored(),
        "cases": script.cases(inputs),
    }
    file.write_text(_text(stored), encoding="utf-8")


def differences(new: Any, old: Any, tolerance: float = TOLERANCE, where: str = "") -> Iterator[str]:
    """Yields the differences of two files. Numbers are equal if they differ by at most the tolerance."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted(set(new) | set(old)):
            if key in new and key in old:
                yield from differences(new[key], old[key], tolerance, f"{where} / {key}")
            else:
                yield f"{where} / {key}: only {'in the new one' if key in new else 'in the stored one'}"
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for number, (a, b) in enumerate(zip(new, old, strict=True)):
            yield from differences(a, b, tolerance, f"{where}[{number}]")
    elif isinstance(new, float) and isinstance(old, float):
        if not math.isclose(new, old, rel_tol=tolerance, abs_tol=1e-15):
            yield f"{where}: {new}, stored {old}"
    elif new != old:
        yield f"{where}: {new}, stored {old}"


def _again(package: str, folder: Path, *, store: bool) -> int:
    script: Any = importlib.import_module(f"scripts.golden.{package}")
    packages = folder / package
    if error := install(script.REQUIRES, packages):
        print(f"{package}: {', '.join(script.REQUIRES)} could not be had: {error}", file=sys.stderr)
        return NOT_HAD
    file = STORED / f"{package}.json" if store else packages / "golden.json"
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "scripts.golden", package, "--make", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)
    if store:
        return 0
    new, old = (json.loads(each.read_text(encoding="utf-8")) for each in (file, STORED / f"{package}.json"))
    found = list(differences(new, old, TOLERANCES.get(package, TOLERANCE)))
    print("\n".join([f"{package}: {len(found)} differences, {len(new['cases'])} cases", *found[:20]]))
    return DIFFERS if found else 0


def install(requires: Sequence[str], folder: Path, *, alone: bool = True) -> str | None:
    """Installs them if they are not there; the last line of what went wrong, None if nothing did.

    alone: without what they depend on.
    """
    if not requires:
        return None
    mark = folder / "requires.txt"
    if mark.exists() and mark.read_text(encoding="utf-8") == "\n".join(requires):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    installer = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
    command = [*installer, "install", "--quiet", *(["--no-deps"] if alone else []), "--target", str(folder), *requires]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    mark.write_text("\n".join(requires), encoding="utf-8")
    return None


def _text(stored: dict[str, Any]) -> str:
    """JSON with one line for each input and each case."""
    lines = []
    for key, value in stored.items():
        text = json.dumps(value, separators=(",", ":"))
        if key in ("inputs", "cases"):
            each = (f"  {json.dumps(name)}: {json.dumps(part, separators=(',', ':'))}" for name, part in value.items())
            text = "{\n" + ",\n".join(each) + "\n }"
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
