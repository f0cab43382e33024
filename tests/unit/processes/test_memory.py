"""Freed memory, which stays with the process: counted in pages that the system had to give again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
if sys.argv[1] == "kept":
    from moerl.processes.memory import keep_freed_memory
    assert keep_freed_memory()

def work():
    blocks = [bytearray(40 << 20), bytearray(5 << 20)]
    return sum(map(len, blocks))

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages(how: str) -> int:
    out = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
    return int(out.stdout)


def test_large_blocks_are_used_again_without_the_system() -> None:
    assert _pages("kept") < 1000
    assert _pages("given back") > 5 * (40 << 20) // 4096 // 2
