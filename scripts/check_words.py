"""First words of docstrings, names of classes, and reads of environment variables, checked by `make lint`: ``python
scripts/check_words.py``. Standard library alone.

A docstring begins with a verb or a noun: one that begins with a word of `FIRST_WORDS` is a riddle without its
neighbours. A public class name of the product is defined in one module only, so that a search for it finds one class.
Environment variables are read in the places of `READERS`, so that what a process takes from outside is known;
exceptions stand in `EXCEPTIONS`, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("moerl", "scripts", "bench", "tests", "examples")
FIRST_WORDS = frozenset({"what", "of", "where", "as", "which", "those", "whether"})
READERS = ("moerl/config/", "moerl/launch/", "moerl/processes/parent.py")
"""Files and folders of the product that may read environment variables."""
EXCEPTIONS = {
    "moerl/tasks/rewards/sandbox/start.py": "clears variables of a process that runs a stranger's program",
}
"""Files that name the environment for another reason."""

_NAMES = frozenset({"environ", "getenv", "environb", "putenv"})


def riddles(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the first word of each docstring of `FIRST_WORDS`: of modules, classes, functions and
    attributes."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_attribute_next = False
        for number, statement in enumerate(node.body):
            if (number == 0 or is_attribute_next) and (docstring := _text(statement)) is not None:
                words = docstring.split(maxsplit=1)
                if words and words[0].strip("`*\"'.,:;()").lower() in FIRST_WORDS:
                    yield statement.lineno, words[0]
            is_attribute_next = isinstance(statement, ast.Assign | ast.AnnAssign)


def _text(statement: ast.stmt) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def classes(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each public class of a module."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
            yield statement.lineno, statement.name


def reads(text: str) -> Iterator[int]:
    """Yields the lines that name the environment of the process."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            is_read = node.attr in _NAMES  # under whatever name `os` was imported
        else:
            names = node.names if isinstance(node, ast.ImportFrom) and node.module == "os" else ()
            is_read = any(each.name in _NAMES for each in names)
        if is_read:
            yield node.lineno  # pyright: ignore[reportAttributeAccessIssue]


def problems(root: Path) -> list[str]:
    """Returns the places that break a rule, and exceptions that nothing needs."""
    found, excepted, defined = list[str](), set[str](), dict[str, str]()
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        found += [f"{path}:{line}: begins with '{word}': begin with a verb or a noun" for line, word in riddles(text)]
        if not path.startswith("moerl/"):
            continue
        for line, name in classes(text):
            if (first := defined.setdefault(name, f"{path}:{line}")) != f"{path}:{line}":
                found.append(f"{path}:{line}: {first} defines a class {name}, too: give one a name said in full")
        if path.startswith(READERS):
            continue
        lines = list(reads(text))
        if lines and path in EXCEPTIONS:
            excepted.add(path)
            continue
        found += [f"{path}:{line}: environment variables are read in {', '.join(READERS)}" for line in lines]
    return found + [f"{path}: no longer needed; remove its exception" for path in sorted(set(EXCEPTIONS) - excepted)]


if __name__ == "__main__":
    lines = problems(Path(__file__).parents[1])
    passed = "docstrings begin with a verb or a noun; class names are unique; the environment is read where it may be"
    print("\n".join(lines) or f"words: {passed}")
    sys.exit(bool(lines))
