"""The process of a program: runs it, then does what the tests ask of its objects. Runs in the sandbox.

Nothing here is protected from the program, and nothing needs to be: the other side checks every answer.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from moerl.tasks.rewards.sandbox.operations import AWAIT, GET, NAME, OPERATIONS, PING, SET
from moerl.tasks.rewards.sandbox.outcomes import BLOCKED, ERROR, MEMORY
from moerl.tasks.rewards.sandbox.peer import Border, PeerGoneError
from moerl.tasks.rewards.sandbox.values import Wire, decode, describe_class, encode, python_class

MISSING = ["missing"]
"""Answer for a name that the program does not have."""


def execute(text: str) -> tuple[int, str, dict[str, Any]]:
    """Runs a program to its end. Returns its exit code, 0 if all went well, its last words, and its names."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(text, "program.py", "exec"), main.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            return ERROR, f"the program ended with code {error.code}", main.__dict__
    except MemoryError:
        return MEMORY, "MemoryError", main.__dict__
    except BaseException as error:  # noqa: BLE001 - process boundary: the program can raise anything
        is_blocked = isinstance(error, OSError) and error.errno in (1, 13)
        return BLOCKED if is_blocked else ERROR, "".join(traceback.format_exception_only(error)), main.__dict__
    return 0, "", main.__dict__


def serve(reading: int, writing: int, text: str) -> None:
    """Runs a program and answers questions until the tests are over, which ends the process."""
    objects = _Objects(reading, writing)
    try:
        code, said, objects.names = execute(text)
        objects.write(["ended", code, said[-4096:]])
        objects.serve()
    except PeerGoneError:
        os._exit(0)


class _Objects(Border):
    """Border to the tests: objects of the program by number, stand-ins for those of the tests."""

    def __init__(self, reading: int, writing: int) -> None:
        super().__init__(reading, writing)
        self.names: dict[str, Any] = {}
        self._of_tests: dict[int, OfTests] = {}
        self._operations = {
            **OPERATIONS,
            GET: getattr,
            SET: setattr,
            NAME: lambda name: self.names.get(name, MISSING),
            AWAIT: _await,
            PING: lambda: None,
        }

    def ask(self, operation: str, target: OfTests, *arguments: Any, **named: Any) -> Any:
        """Has the tests do an operation on one of their objects."""
        given = [encode([target, *arguments], self._export), encode(named, self._export)]
        answer = self._exchange(operation, *given)
        if answer[0] == "stop":
            raise StopIteration
        if answer[0] == "raise":
            classes = [python_class(*each[:2]) for each in answer[1]]
            kind = next((each for each in classes if each is not None and each is not BaseException), RuntimeError)
            raise kind(*decode(answer[2], self._import))
        return decode(answer[1], self._import)

    def _done(self, operation: str, arguments: Wire, named: Wire) -> list[Wire]:
        given: list[Any] = decode(arguments, self._import)
        given_by_name: dict[str, Any] = decode(named, self._import)
        value = self._operations[operation](*given, **given_by_name)
        if value is MISSING:
            return MISSING
        answer = ["value", encode(value, self._export)]
        # The operation may have changed its arguments; its object, the first of them, is not copied.
        now = [encode(given[1:], self._export), encode(given_by_name, self._export)]
        return answer if now == [["list", *arguments[2:]], named] else [*answer, *now]

    def _export(self, value: Any) -> Wire:
        if isinstance(value, OfTests):
            return ["tests", value._number]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type):
            if getattr(builtins, value.__name__, None) is value:
                return ["builtin", value.__name__]
            if issubclass(value, BaseException):
                return ["error", describe_class(value, self._number)]
        if inspect.iscoroutine(value):
            return ["coroutine", self._number(value)]
        return ["program", self._number(value), callable(value)]

    def _import(self, wire: list[Any]) -> Any:
        match wire:
            case ["program", int(number), bool()]:
                return self._objects[number]
            case ["tests", int(number)]:
                return self._of_tests.setdefault(number, OfTests(self, number))
            case ["module", str(name)]:
                return importlib.import_module(name)
            case ["named", str(module), str(name)]:
                return getattr(importlib.import_module(module), name)
            case _:
                raise ValueError("an object of an unknown form")


def _await(coroutine: Any) -> Any:
    import asyncio  # takes as long as the rest of a start, and few programs are asynchronous

    return asyncio.run(coroutine)


class OfTests:
    """A stand-in for an object of the tests: a function, an iterator, or an object of a class that they define."""

    def __init__(self, objects: _Objects, number: int) -> None:
        self.__dict__.update(_objects=objects, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__dict__["_objects"].ask("__call__", self, *arguments, **named)

    def __iter__(self) -> Any:
        return self.__dict__["_objects"].ask("__iter__", self)

    def __next__(self) -> Any:
        return self.__dict__["_objects"].ask("__next__", self)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_objects"].ask(GET, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_objects"].ask(SET, self, name, value)
