"""Start of a sandbox (`moerl.tasks.rewards.sandbox`).

    main PROGRAM TESTS FOLDER STATUS PARENT SECONDS MEMORY

PROGRAM and TESTS are files with Python, read before anything is forbidden; TESTS is empty if there are none. FOLDER is
the folder that may be written to. STATUS is a descriptor that gets a byte once everything is forbidden, PARENT the
process id of the starter. Each process may take SECONDS of CPU time and MEMORY bytes. The exit code is one of
`moerl.tasks.rewards.sandbox.outcomes`; without tests it is 0 if the program ends
well. A program can end its process with any code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from moerl.tasks.rewards.sandbox.limits import Limits, NoSandboxError, restrict
from moerl.tasks.rewards.sandbox.outcomes import NO_SANDBOX
from moerl.tasks.rewards.sandbox.program import execute, serve


def main(arguments: list[str]) -> None:
    """Runs a program, and its tests. Returns only if the program of standard streams has come to its end."""
    program, tests, folder, status, parent, seconds, memory_bytes = arguments
    sys.argv = [program]
    text = _read(program)
    os.chdir(folder)
    limits = Limits(folder, float(seconds), int(memory_bytes))
    if tests:
        _judge(text, tests, int(status), int(parent), limits)
    _restrict(limits, int(parent))
    os.write(int(status), b"1")
    os.close(int(status))
    code, said, _ = execute(text)
    if code:
        with contextlib.suppress(Exception):  # the program may have put anything there
            sys.stdout.flush()
        _end(code, said)
    # The interpreter ends as usual: it waits for threads, calls exit handlers, flushes.


def _judge(text: str, tests: str, status: int, parent: int, limits: Limits) -> NoReturn:
    from moerl.tasks.rewards.sandbox.testing import judge

    of_program, of_tests = os.pipe(), os.pipe()
    starter = os.getpid()
    program = os.fork()
    if program == 0:
        for descriptor in (status, of_program[0], of_tests[1]):
            os.close(descriptor)
        _restrict(limits, starter)
        os.write(of_program[1], b"1")
        serve(of_tests[0], of_program[1], text)
        os._exit(0)
    os.close(of_program[1])
    os.close(of_tests[0])
    text_of_tests = _read(tests)
    # Libraries of the tests must not find what a program has put there.
    os.environ.update(HOME="/nonexistent", TMPDIR="/nonexistent")
    _restrict(limits, parent)
    if os.read(of_program[0], 1) != b"1":
        # The program's process has said why.
        os._exit(NO_SANDBOX)
    os.write(status, b"1")
    code, said = judge(of_program[0], of_tests[1], program, text_of_tests)
    _end(code, said)


def _restrict(limits: Limits, parent: int) -> None:
    try:
        restrict(limits, parent)
    except (NoSandboxError, OSError) as error:
        _end(NO_SANDBOX, str(error))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _end(code: int, said: str) -> NoReturn:
    try:
        os.write(2, said.encode(errors="replace")[-4096:])
    finally:
        os._exit(code)
