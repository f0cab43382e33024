"""Dumps that other systems' own code writes, stored in `tests/golden/dumps/` for the tests of `moerl diagnose`.

    python -m scripts.foreign_dumps SOURCES            writes those of all systems again
    python -m scripts.foreign_dumps SOURCES slime      those of one

SOURCES is a folder with a checkout of each system: slime, miles, nemo_rl, prime_rl. Each system's samples, traces or
batches are made and written by its own functions, from the same conversations (`scripts.foreign_dumps.drawn`), in a
process of its own. What they import along the way is installed into build/foreign_dumps/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.foreign_dumps.drawn import conversations, stored
from scripts.golden.__main__ import install

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "golden" / "dumps"
SYSTEMS = ("slime", "miles", "nemo_rl", "prime_rl")


def main() -> None:
    """Writes the dumps of all that were named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", type=Path, metavar="SOURCES", help="folder with a checkout of each system")
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    if arguments.here:
        [system] = arguments.systems
        script: Any = importlib.import_module(f"scripts.foreign_dumps.{system}")
        script.write(conversations(), STORED / system)
        return
    STORED.mkdir(parents=True, exist_ok=True)
    (STORED / "drawn.json").write_text(json.dumps(stored()) + "\n", encoding="utf-8")
    for system in arguments.systems or SYSTEMS:
        _write(system, arguments.sources)


def _write(system: str, sources: Path) -> None:
    script: Any = importlib.import_module(f"scripts.foreign_dumps.{system}")
    packages = ROOT / "build" / "foreign_dumps" / system
    if error := install(script.REQUIRES, packages, alone=not getattr(script, "WITH_DEPENDENCIES", False)):
        sys.exit(f"{system}: {', '.join(script.REQUIRES)} could not be had: {error}")
    shutil.rmtree(STORED / system, ignore_errors=True)
    (STORED / system).mkdir(parents=True)
    path = [*(str(sources.resolve() / each) for each in script.SOURCES), str(packages)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    command = [sys.executable, "-m", "scripts.foreign_dumps", str(sources), system, "--here"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, check=True)
    print("\n".join(str(file.relative_to(ROOT)) for file in sorted((STORED / system).rglob("*.*"))))


if __name__ == "__main__":
    main()
