"""Exit codes of a sandbox."""

from __future__ import annotations

ERROR = 1
"""The program raised, or the tests did."""
PASSED = 90
"""The tests ended, and the program was still there."""
MEMORY = 91
BLOCKED = 92
"""The program did something forbidden."""
NO_SANDBOX = 93
"""This machine has no sandbox. A program can end with this code, too: it counts only if the sandbox did not begin."""
FAILED = 94
"""An assertion of the tests failed."""
UNUSED = 95
"""The tests ended and never asked for anything of the program: they test nothing."""
TIMEOUT = 96
"""The program used up its CPU time."""
