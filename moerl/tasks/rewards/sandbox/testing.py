"""The process of the tests: runs them, and asks the program's process for what they use of it. Runs in the sandbox.

Every answer of the program is checked: values are made anew here, and an object of the program is an `OfProgram`, which
asks the program for each operation on it. Between such an object and a value of the tests there is neither comparison
nor arithmetic: the program would decide how a test ends.
"""

from __future__ import annotations

import builtins
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from moerl.tasks.rewards.sandbox.operations import AWAIT, COMPARISONS_AND_ARITHMETIC, GET, NAME, OPERATIONS, PING, SET
from moerl.tasks.rewards.sandbox.outcomes import BLOCKED, ERROR, FAILED, MEMORY, PASSED, TIMEOUT, UNUSED
from moerl.tasks.rewards.sandbox.peer import Border, PeerGoneError
from moerl.tasks.rewards.sandbox.values import Wire, decode, encode, python_class, update

_MODULES = {"np": "numpy", "pd": "pandas"}
"""Usual short names of modules."""


_FROM_PROGRAM = "_moerl_from_program"


class ProgramError(RuntimeError):
    """An answer of the program that tests must not meet: the end of an iteration or process, or unreadable data."""


class UnusableError(TypeError):
    """An object of the tests that cannot be handed to a program, or an operation on it that a program may not do."""


def judge(reading: int, writing: int, program: int, text: str) -> tuple[int, str]:
    """Runs tests once the program has come to its end.

    Args:
        reading, writing: descriptors of the pipes to the program.
        program: process id of the program.

    Returns:
        The exit code of the sandbox and its last words.
    """
    objects = Objects(reading, writing)
    try:
        match objects.read():
            case ["ended", 0, _]:
                return _run(objects, text)
            case ["ended", int(code), str(said)]:
                return code if code in (BLOCKED, MEMORY) else ERROR, said
            case _:
                return ERROR, "the program wrote to the pipe of its tests"
    except PeerGoneError as error:
        # The program's process ends when nobody listens, unless it has ended.
        os.close(reading)
        os.close(writing)
        _, status = os.waitpid(program, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return TIMEOUT, "the program used up its CPU time"
        return ERROR, f"the program's process ended or broke off: {error}"


def _run(objects: Objects, text: str) -> tuple[int, str]:
    names = _Names(objects)
    try:
        exec(compile(text, "tests.py", "exec"), names)
        _run_unittest(names)
    except SystemExit as error:
        # unittest.main() ends so.
        if _is_from_program(error):
            return ERROR, f"the program ended with code {error.code}"
        if error.code not in (None, 0):
            return FAILED, f"the tests ended with code {error.code}"
    except MemoryError:
        return MEMORY, "MemoryError"
    except PeerGoneError:
        raise
    except BaseException as error:  # noqa: BLE001 - process boundary: tests can raise anything
        is_blocked = isinstance(error, OSError) and error.errno in (1, 13) and _is_from_program(error)
        code = FAILED if isinstance(error, AssertionError) else BLOCKED if is_blocked else ERROR
        return code, _last_words(error, text)
    objects.ask(PING)
    return (PASSED, "") if names.are_asked_for else (UNUSED, "")


def _is_from_program(error: BaseException) -> bool:
    return _FROM_PROGRAM in error.__dict__


def _run_unittest(names: _Names) -> None:
    """Runs test cases that the tests define and do not run themselves."""
    if "unittest" not in sys.modules:
        return
    import unittest

    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    if suite.countTestCases() and not unittest.TextTestRunner(verbosity=0).run(suite).wasSuccessful():
        raise AssertionError("test cases failed")


def _last_words(error: BaseException, text: str) -> str:
    said = "".join(traceback.format_exception_only(error)).strip()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    if not lines or not lines[-1]:
        return said
    return f"{said}, in line {lines[-1]} of the tests: {text.splitlines()[lines[-1] - 1].strip()[:200]}"


class _Names(dict[str, Any]):
    """The names of the tests. Those that they do not define, and Python does not have, are the program's."""

    def __init__(self, objects: Objects) -> None:
        main = _Main(self)
        sys.modules["__main__"] = main
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._objects = objects
        self.are_asked_for = False

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        self.are_asked_for = True
        found = self._objects.named(name)
        if isinstance(found, CallableOfProgram):
            # A function or class keeps its name; a value may change.
            self[name] = found
        return found


class _Main(ModuleType):
    """The module of the tests, as others see it."""

    def __init__(self, names: _Names) -> None:
        super().__init__("__main__")
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self._names, name):
            return self._names[name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return list(self._names)


class Objects(Border):
    """Border to the program: stand-ins for its objects, objects of the tests by number."""

    def __init__(self, reading: int, writing: int) -> None:
        super().__init__(reading, writing)
        self._of_program: dict[int, OfProgram] = {}
        self._classes: dict[int, type[BaseException]] = {}

    def named(self, name: str) -> Any:
        """Returns the program's object of this name. `KeyError` if it has no such name."""
        answer = self._exchange(NAME, ["list", name], ["dict"])
        match answer:
            case ["missing"]:
                raise KeyError(name)
            case ["value", ["module", str(module)]] if module == _MODULES.get(name, name):
                # A module of this process: the program may have changed its own.
                return importlib.import_module(module)
            case _:
                return self._result(NAME, answer, [])

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Has the program do an operation on one of its objects, the first argument."""
        given = encode(list(arguments), self._export), encode(named, self._export)
        return self._result(operation, self._exchange(operation, *given), [list(arguments[1:]), named])

    def _result(self, operation: str, answer: list[Wire], given: list[Any]) -> Any:
        try:
            match answer:
                case ["value", value]:
                    return decode(value, self._import)
                case ["value", value, *now]:
                    found = decode(value, self._import)
                    for old, new in zip(given, now, strict=True):
                        update(old, decode(new, self._import))
                    return found
                case ["raise", list(classes), arguments, number]:
                    error = self._error(cast("list[Any]", classes), decode(arguments, self._import), number)
                case ["stop"] if operation == "__next__":
                    error = StopIteration()
                case _:
                    raise ValueError("an answer of an unknown form")
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as problem:
            raise ProgramError(f"the program's answer cannot be read: {problem}") from problem
        raise error

    def _error(self, classes: list[Any], arguments: Any, number: Any) -> BaseException:
        if not isinstance(arguments, list):
            raise ValueError("arguments of an exception that are no list")
        kind = self._error_class(classes)
        if issubclass(kind, StopIteration | StopAsyncIteration) or not issubclass(kind, Exception | SystemExit):
            return ProgramError(f"the program raised {kind.__name__}")
        error = kind.__new__(kind, *arguments)
        if isinstance(number, int) and isinstance(error, _OfProgramError):
            error.moerl_object = self._stand_in(number)
        error.__dict__[_FROM_PROGRAM] = True
        return error

    def _error_class(self, classes: list[Any]) -> type[BaseException]:
        """Returns the first class as one of this process: Python's own, or one made here for the program's."""
        of_python = [python_class(*each[:2]) for each in classes]
        index = next((at for at, each in enumerate(of_python) if each is not None), len(classes))
        kind = of_python[index] if index < len(classes) else None
        if kind is None:
            raise ValueError("an exception of no class of Python")
        for _, name, number in reversed(classes[:index]):
            if number not in self._classes:
                bases = (kind,) if issubclass(kind, _OfProgramError) else (_OfProgramError, kind)
                self._classes[int(number)] = type(str(name), bases, {"moerl_number": int(number)})
            kind = self._classes[number]
        return kind

    def _done(self, operation: str, arguments: Wire, named: Wire) -> list[Wire]:
        target, *others = decode(arguments, self._import)
        if arguments[1][0] != "tests":
            raise UnusableError("an operation on something that is no object of the tests")
        value = self._do(operation, target, others, decode(named, self._import))
        return ["value", encode(value, self._export)]

    def _do(self, operation: str, target: Any, others: list[Any], named: Any) -> Any:
        """Does an operation that a program may do with an object of the tests; `UnusableError` for any other."""
        match operation, others:
            case "__call__", _ if callable(target):
                return target(*others, **named)
            case "__iter__", []:
                return iter(target)
            case "__next__", []:
                return next(target)
            case "get", [str(name)] if _is_of_tests(target) and not name.startswith("_"):
                return getattr(target, name)
            case "set", [str(name), value] if _is_of_tests(target) and not name.startswith("_"):
                if not hasattr(type(target), name):
                    setattr(target, name, value)
                    return None
            case _:
                pass
        raise UnusableError(f"a program may not do {operation} with {type(target).__name__} of the tests")

    def _export(self, value: Any) -> Wire:
        if isinstance(value, OfProgram):
            return ["program", _number_of(value), isinstance(value, CallableOfProgram)]
        if isinstance(value, type) and issubclass(value, _OfProgramError) and "moerl_number" in vars(value):
            return ["program", value.moerl_number, True]
        if isinstance(value, _OfProgramError):
            return ["program", _number_of(value.moerl_object), False]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if isinstance(module, str) and module != "__main__" and getattr(sys.modules.get(module), name, self) is value:
            return ["named", module, name]
        if callable(value) or hasattr(value, "__iter__") or _is_of_tests(value):
            return ["tests", self._number(value)]
        raise UnusableError(f"an object of {type(value).__name__} cannot be handed to a program")

    def _import(self, wire: list[Any]) -> Any:
        match wire:
            case ["program", int(number), bool(is_callable)]:
                return self._stand_in(number, is_callable=is_callable)
            case ["tests", int(number)]:
                return self._objects[number]
            case ["builtin", str(name)] if isinstance(found := getattr(builtins, name, None), type):
                return found
            case ["error", list(classes)]:
                return self._error_class(cast("list[Any]", classes))
            case ["module", str(name)]:
                raise ValueError(f"the module {name} as a value")
            case ["coroutine", int(number)]:
                return self._coroutine(self._stand_in(number))
            case _:
                raise ValueError("an object of an unknown form")

    def _stand_in(self, number: int, *, is_callable: bool = False) -> OfProgram:
        kind = CallableOfProgram if is_callable else OfProgram
        return self._of_program.setdefault(number, kind(self, number))

    async def _coroutine(self, target: OfProgram) -> Any:
        return self.ask(AWAIT, target)


def _is_of_tests(value: Any) -> bool:
    """Returns True for an object of a class that the tests define."""
    return type(value).__module__ == "__main__" and not isinstance(value, type | OfProgram | _OfProgramError)


class _OfProgramError(Exception):
    """Base of exceptions of the program. Attributes are asked for."""

    moerl_number: int
    moerl_object: OfProgram

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "moerl_")):
            raise AttributeError(name)
        return getattr(self.moerl_object, name)


class OfProgram:
    """A stand-in for an object of the program."""

    __slots__ = ("_moerl_number", "_moerl_objects")

    def __init__(self, objects: Objects, number: int) -> None:
        object.__setattr__(self, "_moerl_objects", objects)
        object.__setattr__(self, "_moerl_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            # What libraries look for: the program must not steer them.
            raise AttributeError(name)
        return _objects_of(self).ask(GET, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _objects_of(self).ask(SET, self, name, value)

    def __contains__(self, item: Any) -> bool:
        if isinstance(item, OfProgram):
            return bool(_objects_of(self).ask("__contains__", self, item))
        # The program does not learn which value is looked for: it could say yes, and show it later as its own.
        return any(each is item or each == item for each in _objects_of(self).ask("__iter__", self))


def _objects_of(stand_in: OfProgram) -> Objects:
    return object.__getattribute__(stand_in, "_moerl_objects")


def _number_of(stand_in: OfProgram) -> int:
    return object.__getattribute__(stand_in, "_moerl_number")


def _asking(name: str) -> Callable[..., Any]:
    def method(self: OfProgram, *arguments: Any, **named: Any) -> Any:
        if name in COMPARISONS_AND_ARITHMETIC and not all(isinstance(each, OfProgram) for each in arguments):
            return NotImplemented
        if name == "__exit__":
            arguments = (None if arguments[0] is None else True, None, None)
        return _objects_of(self).ask(name, self, *arguments, **named)

    return method


class CallableOfProgram(OfProgram):
    """A stand-in for a function, a method or a class of the program."""

    __slots__ = ()

    __call__ = _asking("__call__")


for _name in OPERATIONS:
    if _name not in ("__call__", "__contains__"):
        setattr(OfProgram, _name, _asking(_name))
