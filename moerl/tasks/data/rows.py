"""Prompts from rows: the meaning of columns, and the rows that stay. Pure functions; any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moerl.contract.ports import Chat, Prompt
from moerl.errors import ConfigError
from moerl.tasks.data.messages import MessagesError, chat_key, read_chat
from moerl.tasks.data.section import DataSet, RowFilter
from moerl.tasks.data.sources import Row
from moerl.telemetry.terminal import excerpt


@dataclass(frozen=True, slots=True)
class Problem:
    """A row as a prompt."""

    prompt: Prompt
    """Prompt, with all columns of the row as its facts."""
    place: str
    """Place of the row, for messages: file and line, or set and row."""
    key: str
    """Text that equal problems share, whatever wording is put around them."""
    response: str | None
    """Demonstration; None if the row has none."""


def problem(data: DataSet, row: Row, *, text_as: str) -> Problem:
    """Returns the problem of a row.

    Args:
        text_as: `raw` = the model continues a prompt that is a text; `user` = such a prompt is a user's message.

    Raises:
        ConfigError: A column is missing or of another kind, or messages cannot be a prompt.
    """
    assert data.prompt is not None
    value, answer = _column(data, row, "prompt", data.prompt), None
    chat: Chat | None = None
    tools = row.values.get(data.tools) if data.tools is not None else None
    if isinstance(value, str) and value.strip():
        key = value
        text = value if data.wording is None else data.wording.replace("{prompt}", value)
        if text_as == "user":
            chat, text = _chat(data, row, [{"role": "user", "content": text}], tools)[0], ""
    elif isinstance(value, list):
        chat, answer = _chat(data, row, value, tools)
        key, text = chat_key(chat), ""
    else:
        raise bad_row(row, f"{excerpt(repr(value), 120)} under key {data.prompt!r}", "a non-empty text, or messages")
    response = row.values.get(data.response) if data.response is not None else None
    if response is not None and not isinstance(response, str):
        raise bad_row(row, f"{excerpt(repr(response), 120)} under key {data.response!r}", "a text")
    name = f"{data.name}:{row.label}" if data.name else row.label
    prompt = Prompt(name, text, row.values, chat, data.name)
    return Problem(prompt, row.place, key, answer if response is None else response)


def stays(data: DataSet, row: Row) -> bool:
    """Returns whether a row meets every filter. Raises `ConfigError` if the row lacks a filter's column, or a filter
    cannot compare the value there."""
    for number, each in enumerate(data.filters or ()):
        value = _column(data, row, f"filters[{number}].column", each.column)
        if value is None:
            return False
        try:
            if not _meets(each, value):
                return False
        except TypeError as error:
            raise bad_row(
                row, f"{excerpt(repr(value), 80)} under key {each.column!r}: {error}", f"what {data.of('filters')} asks"
            ) from error
    return True


def _meets(condition: RowFilter, value: Any) -> bool:
    return (
        (condition.equals is None or _same(value, condition.equals))
        and (condition.one_of is None or any(_same(value, each) for each in condition.one_of))
        and (condition.at_least is None or value >= condition.at_least)
        and (condition.at_most is None or value <= condition.at_most)
        and (condition.shortest is None or len(value) >= condition.shortest)
        and (condition.longest is None or len(value) <= condition.longest)
    )


def _same(value: object, wanted: object) -> bool:
    """Returns whether values are equal; true is not 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _column(data: DataSet, row: Row, key: str, column: str) -> Any:
    if column not in row.values:
        keys = excerpt(", ".join(map(repr, row.values)) or "none", 120)
        raise bad_row(row, f"keys {keys}", f"{column!r} among them, or {data.of(key)}=...")
    return row.values[column]


def _chat(data: DataSet, row: Row, messages: list[Any], tools: object) -> tuple[Chat, str | None]:
    try:
        return read_chat(messages, tools, data.system)
    except MessagesError as error:
        raise bad_row(row, error.seen, error.expected) from error


def bad_row(row: Row, seen: str, expected: str) -> ConfigError:
    """Returns the error for a row."""
    return ConfigError(
        f"bad row {row.place}",
        seen=seen,
        expected=expected,
        remedy="correct or remove the line, or leave it out by a filter",
    )
