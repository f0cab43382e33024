"""The size caps of CONTRIBUTING.md, checked by `make lint`: ``python scripts/check_sizes.py``. Standard library alone.

Files up to 400 lines everywhere; in `moerl/` and `scripts/` functions up to 60 lines and 6 parameters (`self` and `cls`
do not count; a kernel of Triton takes each pointer and size by itself, and any number of them). Exceptions stand in
`EXCEPTIONS`, each with its reason. In `moerl/` few files name the configuration of a whole run, and all lines of code
together have a cap: what is new takes the place of something old.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 6
MAX_PRODUCT_LINES = 52_000
"""Lines of code in `moerl/`: those of its Python files that are not empty, a comment or a docstring."""
FOLDERS = ("moerl", "scripts", "bench", "tests")
WITH_FUNCTIONS = ("moerl/", "scripts/")

WHOLE_CONFIG, MAX_WHOLE_CONFIG = "RunConfig", 15
"""Class of the whole configuration, and the number of files that may name it: all others take sections of it."""

EXCEPTIONS: dict[str, str] = {}
"""By path or ``path:function``."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Tokens that do not make a line one of code."""


def excesses(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields what is over a cap in a file, each with its key for `EXCEPTIONS`."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield path, f"{num_lines} lines, at most {MAX_FILE_LINES}"
    if not path.startswith(WITH_FUNCTIONS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            num_lines, num_parameters = (node.end_lineno or 0) - node.lineno + 1, _num_parameters(node)
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.name}", f"{num_lines} lines, at most {MAX_FUNCTION_LINES}"
            is_kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
            if num_parameters > MAX_PARAMETERS and not is_kernel:
                yield f"{path}:{node.name}", f"{num_parameters} parameters, at most {MAX_PARAMETERS}"


def _num_parameters(function: Function) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def whole_configs(root: Path) -> Iterator[str]:
    """Yields one line if too many files name the whole configuration."""
    files = sorted((root / "moerl").rglob("*.py"))
    named = [file for file in files if re.search(rf"\b{WHOLE_CONFIG}\b", file.read_text(encoding="utf-8"))]
    if len(named) > MAX_WHOLE_CONFIG:
        places = ", ".join(file.relative_to(root).as_posix() for file in named)
        yield (
            f"{len(named)} files name {WHOLE_CONFIG}, at most {MAX_WHOLE_CONFIG}: let the new one take the sections"
            f" that it reads; they are {places}"
        )


def count_code_lines(text: str) -> int:
    """Returns the number of lines of a Python file without empty lines, comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # Attribute docstrings, too: they are not only the first statement of a body.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def product_lines(root: Path) -> Iterator[str]:
    """Yields one line if the product has too many lines of code."""
    texts = (file.read_text(encoding="utf-8") for file in (root / "moerl").rglob("*.py"))
    if (num_lines := sum(map(count_code_lines, texts))) > MAX_PRODUCT_LINES:
        yield f"moerl/: {num_lines:,} lines of code, at most {MAX_PRODUCT_LINES:,}: remove what is needless"


def problems(root: Path) -> list[str]:
    """Returns what is over a cap without an exception, exceptions that are no longer needed, `whole_configs` and
    `product_lines`."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    found = [
        excess
        for file in files
        for excess in excesses(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    ]
    unneeded = sorted(set(EXCEPTIONS) - {where for where, _ in found})
    over = [f"{where}: {what}" for where, what in found if where not in EXCEPTIONS]
    over += [f"{where}: no longer over a cap; remove its exception" for where in unneeded]
    return [*over, *whole_configs(root), *product_lines(root)]


if __name__ == "__main__":
    lines = problems(Path(__file__).parents[1])
    print("\n".join(lines) or "sizes: all files and functions are within their caps")
    sys.exit(bool(lines))
