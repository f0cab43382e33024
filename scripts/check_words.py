"""First words of docstrings, "where" for "if", words that mean too much, names of classes, and reads of environment
variables, checked by `make lint`: ``python scripts/check_words.py``. Standard library alone.

A docstring begins with a verb or a noun: one that begins with a word of `FIRST_WORDS` is a riddle without its
neighbours. A condition begins with "if"; "where" names a place, and follows a word of `BEFORE_WHERE`, in docstrings,
comments and messages of the product, and in pages for readers. These do without the words of `DROPPED`, the product in
its names, too. Fields of public classes are described below the field. A public class name of the product is defined in
one module only, so that a search for it finds one class. Environment variables are read in the places of `READERS`, so
that what a process takes from outside is known; exceptions stand in `EXCEPTIONS`, each with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDERS = ("moerl", "scripts", "bench", "tests", "examples")
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md")
"""Patterns of the pages for readers."""
FIRST_WORDS = frozenset({"what", "of", "where", "as", "which", "those", "whether"})
# fmt: off
BEFORE_WHERE = frozenset({
    "place", "places", "position", "positions", "row", "rows", "column", "line", "lines", "file", "folder", "directory",
    "process", "processes", "machine", "machines", "node", "nodes", "rank", "ranks", "module", "step", "point", "field",
    "say", "says", "said", "saying", "show", "shows", "shown", "showing", "know", "knows", "known", "tell", "tells",
    "told", "see", "learn", "find", "finds", "decide", "decides", "ask", "asks", "from", "to", "of", "about", "is",
    "names", "true", "false", "0", "1", "nan", "ones", "zeros",
})
# fmt: on
"""Words that "where" may follow: nouns of places, verbs of knowing, prepositions, and values of arrays."""
DROPPED = {"beside": "next to, during, or in a process of its own", "demand": "require", "demands": "requires"}
"""Words that have stood for several things, each with what to say."""
_DROPPED = re.compile(rf"(?i)(?<![a-z])({'|'.join(DROPPED)})(?![a-z])")
READERS = ("moerl/config/", "moerl/machine/", "moerl/launch/", "moerl/processes/parent.py")
"""Files and folders of the product that may read environment variables."""
EXCEPTIONS = {"moerl/tasks/rewards/sandbox/start.py": "clears variables of a process that runs a stranger's program"}
"""Files that name the environment for another reason."""
OLD_NAMES = "moerl/config/moved.py"
"""File that lists names of older versions."""

_ADVICE = 'say "if", or name the place'
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


def conditions(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line of each "where" that begins a condition, and the words around it."""
    return _conditions(_prose(text))


def conditions_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yields the same for a page in Markdown, outside of code."""
    return _conditions([(1, without_code(text))])


def without_code(page: str) -> str:
    """Returns a page in Markdown without its fences, code between backticks and targets of links; lines keep their
    numbers."""
    for code in (r"(?ms)^\s*```.*?^\s*```\s*?$", r"(`+)(?:(?!\n\s*\n).)+?\1", r"(?<=\])\([^)]*\)"):
        page = re.sub(code, lambda match: "`" + "\n" * match[0].count("\n"), page, flags=re.DOTALL)
    return page


def _conditions(parts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for line, part in parts:
        for match in re.finditer(r"(?i)(?:([^\s`*\"'(]+)[\s#]+)?\b(where)\b(?:\s+\S+){0,3}", part):
            if (match[1] or "").lower() not in BEFORE_WHERE and part.strip("'\"") != "where":
                yield line + part.count("\n", 0, match.start(2)), " ".join(match[0].split())


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields strings and blocks of comments, each with the line on which it begins."""
    comments, strings = list[tokenize.TokenInfo](), list[tokenize.TokenInfo]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token)
        elif token.type != tokenize.NL and comments and token.start[0] > comments[-1].start[0]:
            yield comments[0].start[0], "\n".join(each.string.lstrip("# ") for each in comments)
            comments = []
        if token.type == tokenize.STRING:
            strings.append(token)
        elif token.type != tokenize.NL and strings:  # neighbours are one text
            yield strings[0].start[0], "".join(map(_within, strings))
            strings = []
        if token.type == tokenize.FSTRING_MIDDLE:
            yield token.start[0], token.string


def _within(string: tokenize.TokenInfo) -> str:
    """Returns a string without its prefix and quotes."""
    return string.string.strip("bru").strip("\"'")


def _text(statement: ast.stmt) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def dropped(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the word of each word of `DROPPED`, parts of names included."""
    for match in _DROPPED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def undescribed(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each public field of a public class that neither an attribute docstring nor a
    `Field(description=...)` describes."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if "ClassVar" in ast.unparse(statement.annotation) or statement.target.id.startswith("_"):
                continue
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            is_described = any(keyword.arg == "description" for call in calls for keyword in call.keywords)
            if not is_described and (after is None or not (_text(after) or "").strip()):
                yield statement.lineno, f"{node.name}.{statement.target.id}"


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
        found += [f'{path}:{line}: "{words}": {_ADVICE}' for line, words in conditions(text)]
        if path != OLD_NAMES:
            found += [f'{path}:{line}: "{word}": say {DROPPED[word.lower()]}' for line, word in dropped(text)]
        found += [f"{path}:{line}: {name} has no docstring below it" for line, name in undescribed(text)]
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
    for file in sorted(file for pattern in PAGES for file in root.glob(pattern)):
        path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        found += [f'{path}:{line}: "{words}": {_ADVICE}' for line, words in conditions_of_page(text)]
        found += [f'{path}:{line}: "{word}": say {DROPPED[word.lower()]}' for line, word in dropped(without_code(text))]
    return found + [f"{path}: no longer needed; remove its exception" for path in sorted(set(EXCEPTIONS) - excepted)]


if __name__ == "__main__":
    lines = problems(Path(__file__).parents[1])
    passed = (
        'docstrings begin with a verb or a noun, conditions with "if", fields have docstrings; class names are unique'
    )
    print("\n".join(lines) or f"words: {passed}")
    sys.exit(bool(lines))
