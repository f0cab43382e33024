"""Programs that try to pass tests without doing what the tests ask, and honest ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cheating_programs import CHEATS, TESTS
from waiting import eventually

from moerl.tasks.rewards.code import run_program

GIB = 1 << 30


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_passes_no_tests(name: str):
    program, tests = CHEATS[name]
    run = run_program(program, "", 1.0 if name == "silence" else 30.0, GIB, tests)
    assert run.outcome in ("failed", "error", "timeout"), run


def test_the_page_on_security_counts_the_ways_to_cheat():
    page = Path("docs/security.md").read_text()
    section = page.partition("## Programs that cheat")[2].partition("\n## ")[0]
    assert sum(map(int, re.findall(r"\| (\d+) \|", section))) == len(CHEATS)
    assert f"[{len(CHEATS)} ways to cheat]" in Path("docs/tasks.md").read_text()


HONEST = {
    "a function": ("def add(a, b): return a + b", TESTS + "assert add(b='x', a='y') == 'yx' and add([1], []) == [1]"),
    "a program that exits when it is done": ("import sys\ndef f(): return 1\nsys.exit()", "assert f() == 1"),
    "a change in place": (
        "def turn(rows):\n    rows.reverse()\n    rows[0][0] = 9\n    rows.append({'a': {1}})",
        "rows = [[1], [2]]\nlast = rows[1]\nturn(rows)\nassert rows == [[9], [1], {'a': {1}}]",
    ),
    "a class": (
        """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, index): return self.items[index]
    def __eq__(self, other): return self.items == other.items
    def __hash__(self): return 1
    def __add__(self, other): return Stack(*self.items, *other.items)
    @property
    def top(self): return self.items[-1]
""",
        """
stack = Stack().push(1).push(2)
assert len(stack) == 2 and list(stack) == [1, 2] and 2 in stack and 5 not in stack and stack[0] == 1 and stack.top == 2
assert stack == Stack(1, 2) and not stack != Stack(1, 2) and stack != Stack(1)
assert isinstance(stack, Stack) and not isinstance(3, Stack)
assert (stack + Stack(3)).items == [1, 2, 3] and {stack} == {Stack(1, 2)}
stack.items = [5]
assert stack.top == 5
""",
    ),
    "errors": (
        """
import json
class Broken(ValueError):
    def __init__(self, why, code):
        super().__init__(why)
        self.code = code
def f(x):
    if x < 0: raise Broken("negative", 7)
    if x == 0: raise KeyError("zero")
    return json.loads("{")
""",
        """
import json
def raised(x):
    try: return f(x)
    except (Broken, KeyError, json.JSONDecodeError) as error: return error
assert raised(-1).code == 7 and str(raised(-1)) == "negative" and isinstance(raised(-1), (Broken, ValueError))
assert raised(0).args == ("zero",) and type(raised(1)) is json.JSONDecodeError
""",
    ),
    "callbacks": (
        """
def apply(f, items): return [f(item) for item in items]
def each(items, out):
    for item in items: out(item)
def adder(n): return lambda x: x + n
""",
        """
import math
got = []
each((i * i for i in range(4)), got.append)
assert got == [0, 1, 4, 9] and apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(math.sqrt, [4]) == [2.0]
assert apply(adder(3), [1]) == [4] and apply(abs, [-1]) == [1] and adder(2)(3) == 5
""",
    ),
    "objects of the tests": (
        """
class Solution:
    def invert(self, root):
        if root: root.left, root.right = self.invert(root.right), self.invert(root.left)
        return root
""",
        """
class Node:
    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right
def flat(node): return node and (node.value, flat(node.left), flat(node.right))
assert flat(Solution().invert(Node(1, Node(2), Node(3, Node(4))))) == (1, (3, None, (4, None, None)), (2, None, None))
""",
    ),
    "iterators, coroutines, managers": (
        """
def count(n):
    for i in range(n): yield i
async def double(x): return x * 2
class Manager:
    def __enter__(self): return 5
    def __exit__(self, *error): self.seen = error[0] is not None
""",
        """
import asyncio
items = count(2)
assert list(count(3)) == [0, 1, 2] and next(items) == 0 and next(items) == 1 and next(items, None) is None
assert asyncio.run(double(4)) == 8
manager = Manager()
with manager as value: assert value == 5
assert manager.seen is False
""",
    ),
    "unittest": (
        "def add(a, b): return a + b",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n"
        "unittest.main()",
    ),
    "numpy": (
        "import numpy as np\ndef double(x): return np.asarray(x) * 2\ndef sort(x): x.sort()",
        "a = np.array([2, 1])\nsort(a)\nassert np.allclose(double([1, 2]), [2, 4]) and a.tolist() == [1, 2]",
    ),
    "values of many types": (
        "def same(x): return x",
        """
import datetime
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
for value in (
    None, True, -5, 10**400, 0.1, float("inf"), 1j, "\\ud800", b"x", bytearray(b"y"), range(1, 9, 2), (1, (2,)),
    {1: {2}}, frozenset({1}), deque([1]), OrderedDict(b=1, a=2), Counter("aab"), Decimal("1.50"), Fraction(1, 3), int,
    ValueError, datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4), datetime.time(5),
    datetime.timedelta(-1, 5, 7),
):
    assert same(value) == value and type(same(value)) is type(value), value
""",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes_its_tests(name: str):
    program, tests = HONEST[name]
    run = run_program(program, "", 30.0, GIB, tests)
    assert run.outcome == "passed", run


@pytest.mark.parametrize(
    "tests", ["def check(candidate):\n    assert candidate(1) == 1\n", "assert True", "x = len([])"]
)
def test_tests_that_use_nothing_of_the_program_are_an_error_of_the_row(tests: str):
    with pytest.raises(ValueError, match="the tests use nothing of the program"):
        run_program("def f(x): return 1", "", 30.0, GIB, tests)


def test_failed_tests_say_the_line():
    run = run_program("def f(): return 1", "", 30.0, GIB, "x = f()\nassert x == 2, x")
    assert run.said == "AssertionError: 1, in line 2 of the tests: assert x == 2, x"


SIGNALS = """
import ctypes, fcntl, os, termios
refused = []
def attempt(name, call, *arguments):
    try: call(*arguments)
    except PermissionError: refused.append(name)
readable, writable = os.pipe()
libc = ctypes.CDLL(None, use_errno=True)
attempt("owner", fcntl.fcntl, readable, 8, os.getppid())
attempt("owner_ex", fcntl.fcntl, readable, 15, bytes(8))
attempt("signal", fcntl.fcntl, readable, 10, 9)
attempt("async", fcntl.fcntl, readable, fcntl.F_SETFL, 0x2000)
attempt("lease", fcntl.fcntl, readable, 1024, 0)
attempt("notify", fcntl.fcntl, os.open(".", os.O_RDONLY), 1026, 1)
attempt("fioasync", fcntl.ioctl, readable, 0x5452, bytes(4))
attempt("fiosetown", fcntl.ioctl, readable, 0x8901, bytes(4))
attempt("siocspgrp", fcntl.ioctl, readable, 0x8902, bytes(4))
attempt("setsid", os.setsid)
attempt("setpgid", os.setpgid, 0, 0)
if libc.prctl(1, 0, 0, 0, 0) < 0: refused.append("pdeathsig")
os.set_blocking(readable, False)
fcntl.fcntl(os.dup(readable), fcntl.F_GETFL)
fcntl.lockf(open("lock", "w"), fcntl.LOCK_EX)
print(*refused)
"""


def test_a_program_cannot_have_signals_sent_for_it_nor_leave_its_group():
    run = run_program(SIGNALS, "", 30.0, GIB)
    assert run.outcome == "passed", run
    assert run.output.split() == [
        *("owner", "owner_ex", "signal", "async", "lease", "notify", "fioasync", "fiosetown", "siocspgrp"),
        *("setsid", "setpgid", "pdeathsig"),
    ]


def test_a_program_is_gone_when_its_time_is_over(tmp_path: Path):
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef f():\n    while True: time.sleep(1)"
    )
    before = set(os.listdir("/proc"))
    assert run_program(program, "", 1.0, GIB, "f()").outcome == "timeout"
    eventually(lambda: not _sandboxes_of(os.getpid(), before), 10.0)


def _sandboxes_of(starter: int, before: set[str]) -> list[str]:
    """Returns sandboxes that a process has started, by their command lines."""
    found: list[str] = []
    for name in filter(str.isdigit, set(os.listdir("/proc")) - before):
        try:
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"rewards.sandbox" in word for word in words) and str(starter).encode() in words:
            found.append(name)
    return found
