"""A calculator of whole numbers, for texts that a policy wrote. Standard library alone."""

from __future__ import annotations

import re

MAX_CHARACTERS = 100
"""Longest expression. Without powers, a result has at most as many digits."""

_TOKEN = re.compile(r" *([0-9]+|[-+*()])")


def calculate(expression: str) -> str:
    """Computes an expression of whole numbers, +, -, * and parentheses, exactly.

    Raises:
        ValueError: the text is no such expression, or is longer than `MAX_CHARACTERS`.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are computed")
    reader = _Reader(expression)
    value = reader.sum()
    if reader.token:
        raise reader.error()
    return str(value)


class _Reader:
    """Reader of one expression, which stands at a token; the empty text stands for the end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text.rstrip(" "), 0
        self.token = ""
        self._next()

    def sum(self) -> int:
        value = self._product()
        while self.token in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            value += sign * self._product()
        return value

    def error(self) -> ValueError:
        return ValueError(
            f"a whole number was expected at {self.token!r}" if self.token else "the expression ends early"
        )

    def _product(self) -> int:
        value = self._factor()
        while self.token == "*":
            self._next()
            value *= self._factor()
        return value

    def _factor(self) -> int:
        if self.token == "-":
            self._next()
            return -self._factor()
        if self.token == "(":
            self._next()
            value = self.sum()
            if self._next() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not self.token.isdigit():
            raise self.error()
        return int(self._next())

    def _next(self) -> str:
        """Goes on to the next token; returns the one before."""
        before, found = self.token, _TOKEN.match(self._text, self._at)
        if found is None and self._at < len(self._text):
            raise ValueError(f"{self._text[self._at :].lstrip(' ')[0]!r} is no number, +, -, * or parenthesis")
        self.token, self._at = (found[1], found.end()) if found is not None else ("", self._at)
        return before
