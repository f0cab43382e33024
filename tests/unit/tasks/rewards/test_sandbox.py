"""Programs that try to pass tests without doing what the tests ask, and honest ones."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from moerl.tasks.rewards.code import run_program

GIB = 1 << 30

TESTS = """
import math
assert add(1, 2) == 3
assert abs(add(0.1, 0.2) - 0.3) < 1e-9
assert math.isclose(add(1, 1), 2)
assert 3 == add(2, 1)
assert add(1, 2) in (3,)
assert [add(1, 2)] == [3]
assert isinstance(add(1, 1), int)
"""
WRONG = "def add(a, b): return 0\n"

ALL_OR_NOTHING = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0
    __add__ = __rsub__ = __radd__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __bool__(self): return True
    def __hash__(self): return 3
    __class__ = int
def add(a, b): return Any()
"""

FORGED = """
import json, os
def forge(*messages):
    data = b"".join(len(json.dumps(each)).to_bytes(4, "big") + json.dumps(each).encode() for each in messages)
    for descriptor in range(3, 64):
        try: os.write(descriptor, data)
        except OSError: pass
"""

CHEATS = {
    "exit, before anything is defined": ("exit()", TESTS),
    "sys.exit(0)": ("import sys\n" + WRONG + "sys.exit(0)", TESTS),
    "os._exit(0)": ("import os\nos._exit(0)", TESTS),
    "os._exit with the code of success": ("import os\nos._exit(90)", TESTS),
    "exit in the function": ("import sys\ndef add(a, b): sys.exit(0)", TESTS),
    "os._exit in the function": ("import os\ndef add(a, b): os._exit(90)", TESTS),
    "an exit of its own": ("class End(SystemExit): pass\ndef add(a, b): raise End(0)", TESTS),
    "an exit that tests catch": ("import os\ndef f(): os._exit(0)", "try: f()\nexcept: pass"),
    "an exit that tests expect to be an error": ("import os\ndef f(): os._exit(0)", "try: f()\nexcept Exception: pass"),
    "an interrupt": (
        "def f(): raise KeyboardInterrupt",
        "try:\n    f()\n    assert False\nexcept ValueError: pass",
    ),
    "the end of an iteration": ("def ok(x): raise StopIteration", "assert all(map(ok, [1, 2, 3]))"),
    "atexit": ("import atexit, os\natexit.register(os._exit, 90)\n" + WRONG, TESTS),
    "a thread": (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), os._exit(90))).start()\n"
        "def add(a, b): time.sleep(0.3)",
        TESTS,
    ),
    "an object that equals everything": (ALL_OR_NOTHING, TESTS),
    "a number that equals everything": (
        "class Number(int):\n"
        "    __eq__ = lambda self, other: True\n"
        "    __sub__ = lambda self, other: 0\n"
        "    __hash__ = int.__hash__\n"
        "def add(a, b): return Number(7)",
        TESTS,
    ),
    "it within a list": (ALL_OR_NOTHING, "assert [add(1, 2)] == [3] or add(1, 2) == 3"),
    "a difference of nothing": (ALL_OR_NOTHING, "assert abs(add(0.1, 0.2) - 0.3) < 1e-9"),
    "an object that learns what it is asked for": (
        "class Learner:\n"
        "    def __init__(self): self.seen = []\n"
        "    def __contains__(self, item):\n"
        "        self.seen.append(item)\n"
        "        return True\n"
        "    def __len__(self): return len(self.seen)\n"
        "    def __iter__(self): return iter(list(self.seen))\n"
        "def f(): return Learner()",
        "found = f()\nfor each in (5, 7): assert each in found\nassert len(found) == 2 and sorted(found) == [5, 7]",
    ),
    "builtins": (
        "import builtins\n"
        "builtins.AssertionError = type('Error', (BaseException,), {})\n"
        "builtins.abs = lambda x: 0\n"
        "builtins.isinstance = lambda *a: True\n" + WRONG,
        TESTS,
    ),
    "names of builtins": ("def abs(x): return 0\ndef add(a, b): return 3", "assert abs(add(1, 1) - 2) < 1e-9"),
    "modules": (
        "import math, sys\nmath.isclose = lambda *a: True\nsys.modules['math'] = None\n" + WRONG,
        "import math\nassert math.isclose(add(1, 1), 2)",
    ),
    "a module that the program imports": (
        "import math\nmath.isclose = lambda *a: True\n" + WRONG,
        "assert math.isclose(add(1, 1), 2)",
    ),
    "unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = lambda *a: None\n" + WRONG,
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n",
    ),
    "objects of the interpreter": (
        "import gc\n"
        "def add(a, b):\n"
        "    for each in gc.get_objects():\n"
        "        if isinstance(each, dict) and 'PASSED' in each: each.update(FAILED=90, ERROR=90)\n"
        "    return 0",
        TESTS,
    ),
    "stack frames": (
        "import sys\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        frame.f_globals.update(FAILED=90, ERROR=90, judge=lambda *a: (90, ''))\n"
        "        frame = frame.f_back\n"
        "    return 0",
        TESTS,
    ),
    "hooks": (
        "import sys, threading\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\n"
        "import ctypes\nctypes.pythonapi.PyErr_Clear()\n" + WRONG,
        TESTS,
    ),
    "memory": ("import ctypes\ndef add(a, b): ctypes.memset(0, 0, 8)", TESTS),
    "forged answers": (FORGED + "forge(['ended', 0, ''], *[['value', None]] * 50)\n" + WRONG, TESTS),
    "a forged end": (FORGED + "forge(['ended', 90, ''])\n" + WRONG, TESTS),
    "a forged missing end": (FORGED + "forge([])\n" + WRONG, TESTS),
    "a function of the system as a value": ("import os\ndef make(n): return os._exit", "assert make(90)(90) == 180"),
    "exec as a value": ("def make(n): return exec", "assert make(1)('import os; os._exit(90)') == 2"),
    "the globals of a callback": (
        "def run(f):\n    f.__globals__.clear()\n    return 1",
        "assert run(lambda: 1) == 2",
    ),
    "the frame of a generator": (
        "def run(items):\n    items.gi_frame.f_globals.clear()\n    return 1",
        "assert run(x for x in [1]) == 2",
    ),
    "methods of an object of the tests": (
        "def f(checker):\n    checker.check = lambda x: None\n    return 0",
        "class Checker:\n    def check(self, x): assert x == 3\nchecker = Checker()\nchecker.check(f(checker))",
    ),
    "the text of the tests": (
        "found = []\n"
        "for name in ('../tests.py', '../in', '/proc/self/mem', '/proc/self/environ', '/proc/self/fd/3'):\n"
        "    try: found.append(open(name).read())\n"
        "    except OSError: pass\n"
        "if found: print(found)\n"
        "def add(a, b): return 0 if not found else a + b",
        TESTS,
    ),
    "a signal to the tests": (
        "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\n" + WRONG,
        TESTS,
    ),
    "a file for libraries of the tests": (
        "import os\nopen('math.py', 'w').write('isclose = lambda *a: True')\n"
        "open('numpy.py', 'w').write('allclose = lambda *a: True')\n" + WRONG,
        "import numpy, math\nassert math.isclose(add(1, 1), 2) and numpy.allclose(add(1, 1), 2)",
    ),
    "depth": (
        "def f():\n    found = []\n    for _ in range(10**5): found = [found]\n    return found",
        "assert f() == 1",
    ),
    "a value in itself": ("def f():\n    found = []\n    found.append(found)\n    return found", "assert f() == 1"),
    "size": ("def f(): return 'x' * (1 << 25)", "assert f() == 1"),
    "a number of a million digits": ("def f(): return 1 << (1 << 22)", "assert f() == 1"),
    "silence": ("import time\ndef f(): time.sleep(100)", "assert f() == 1"),
}


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
    deadline = time.monotonic() + 10
    while (left := _sandboxes_of(os.getpid(), before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


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
