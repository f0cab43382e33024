"""Tools made of Python functions with types. Runs in the event loop of the episodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, validate_call
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from moerl.contract.episodes import in_thread
from moerl.errors import ConfigError
from moerl.tasks.tools.loop import tool_schema


class FunctionTool:
    """A function that a policy can call: its name, docstring and types are the schema.

    A coroutine function is awaited, any other runs in a thread of its own. The policy reads a text as it is, and other
    results as JSON.

    Raises:
        ConfigError: a parameter has no type, cannot be given by name, or has a type without a JSON schema.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", repr(function))
        for parameter in inspect.signature(function).parameters.values():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not by_name or parameter.annotation is parameter.empty:
                raise _unusable(name, str(parameter))
        try:
            parameters = TypeAdapter[Any](cast("Any", function)).json_schema(schema_generator=_Untitled)
            self._function = validate_call(function)
        except (PydanticUserError, PydanticSchemaGenerationError, NameError) as error:
            raise _unusable(name, str(error).splitlines()[0]) from error
        self._is_async = inspect.iscoroutinefunction(function)
        self.schema = tool_schema(name, inspect.getdoc(function) or "", parameters)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if self._is_async:
            result = await self._function(**arguments)
        else:
            result = await in_thread(lambda: self._function(**arguments))
        return result if isinstance(result, str) else to_json(result).decode()


class _Untitled(GenerateJsonSchema):
    """Schemas without titles, which repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _unusable(name: str, seen: str) -> ConfigError:
    return ConfigError(
        f"the function {name} cannot be a tool",
        seen=seen,
        expected="parameters that can be given by name, each with a type that has a JSON schema",
        remedy="write the types of all parameters, or write the schema yourself (moerl.tasks.tools.loop.Tool)",
    )
