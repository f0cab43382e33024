"""Functions become tools by their types, and what has no types is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from moerl.errors import ConfigError
from moerl.tasks.tools.functions import FunctionTool
from moerl.tasks.tools.loop import Tool


def convert(amount: float, unit: Literal["m", "ft"] = "m", *, digits: Annotated[int, Field(ge=0)] = 1) -> str:
    """Converts a length."""
    return f"{amount:.{digits}f} {unit}"


async def lookup(names: list[str]) -> dict[str, int]:
    return {name: len(name) for name in names}


def call(function: Any, **arguments: Any) -> str:
    return asyncio.run(FunctionTool(function).call(arguments))


def test_name_docstring_and_types_are_the_schema() -> None:
    tool = FunctionTool(convert)
    assert isinstance(tool, Tool)
    function = tool.schema["function"]
    assert (tool.schema["type"], function["name"], function["description"]) == (
        "function",
        "convert",
        "Converts a length.",
    )
    assert json.loads(json.dumps(function["parameters"])) == {
        "type": "object",
        "properties": {
            "amount": {"type": "number"},
            "unit": {"type": "string", "enum": ["m", "ft"], "default": "m"},
            "digits": {"type": "integer", "minimum": 0, "default": 1},
        },
        "required": ["amount"],
        "additionalProperties": False,
    }


def test_a_text_is_read_as_it_is_and_other_results_as_json() -> None:
    assert call(convert, amount=2, digits=2) == "2.00 m"
    assert call(lookup, names=["ab", "c"]) == '{"ab":2,"c":1}'


def test_a_function_that_blocks_has_a_thread_of_its_own() -> None:
    def where() -> str:
        return threading.current_thread().name

    assert call(where) == "in_thread"


def untyped(a, b: int) -> None: ...  # type: ignore[no-untyped-def]


def any_number(*numbers: int) -> None: ...


def by_place(number: int, /) -> None: ...


def of_a_lock(lock: threading.Thread) -> None: ...


@pytest.mark.parametrize("function", [untyped, any_number, by_place, of_a_lock])
def test_a_function_that_cannot_be_described_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=f"the function {function.__name__} cannot be a tool"):
        FunctionTool(function)
