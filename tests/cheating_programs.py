"""Programs that try to pass tests without doing what the tests ask: by way, the program and the tests."""

from __future__ import annotations

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
    "an interrupt": ("def f(): raise KeyboardInterrupt", "try:\n    f()\n    assert False\nexcept ValueError: pass"),
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
    "the globals of a callback": ("def run(f):\n    f.__globals__.clear()\n    return 1", "assert run(lambda: 1) == 2"),
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
    "a signal to the tests": ("import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\n" + WRONG, TESTS),
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
