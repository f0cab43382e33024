"""References in docstrings and comments: to files, tests, commands, keys, modules and what they define."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from named_things import (
    CODE,
    ROOT,
    SUFFIXES,
    leads_somewhere,
    unknown_commands,
    unknown_files,
    unknown_keys,
    unknown_names,
    unknown_tests,
)

FOLDERS = ("moerl", "tests", "bench", "scripts")


@cache
def read() -> tuple[dict[Path, list[str]], set[str]]:
    """The docstrings and comments of each file, and of all files the names in code and the words of other texts."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    found = {file: read_source(file.read_text(encoding="utf-8")) for file in files}
    return {file: texts for file, (texts, _) in found.items()}, set().union(*(words for _, words in found.values()))


def texts() -> dict[Path, list[str]]:
    """By file, its docstrings and its comments; those of lines in a row are one text."""
    return read()[0]


def read_source(source: str) -> tuple[list[str], set[str]]:
    docstrings: dict[int, str] = {}
    words: set[str] = set()
    for node in ast.walk(ast.parse(source)):  # an expression comes before what it is made of
        match node:
            case ast.Expr(ast.Constant(str(text)) as constant):
                docstrings[id(constant)] = text
            case ast.Constant(str(text)) if id(node) not in docstrings:
                words.update(re.findall(r"\w+", text))
            case _:
                pass
    comments: list[str] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            words.add(token.string)
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            is_more = token.start[0] == last + 1
            comments[-1:] = [f"{comments[-1]} {text}"] if is_more else [*comments[-1:], text]
            last = token.start[0]
    return [*docstrings.values(), *comments], words


@cache
def codes() -> dict[Path, list[str]]:
    """By file, what stands in backquotes; a name that goes on in the next line is one."""
    return {file: [code for text in found for code in CODE.findall(text)] for file, found in texts().items()}


def wrong(check: Callable[[list[str], Path], list[str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}: {name}" for file, found in codes().items() for name in check(found, file)]


@cache
def identifiers() -> set[str]:
    """All names in code and in texts that are no docstrings, and all words of YAML files and patches."""
    found = set(read()[1])
    for file in (*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "patches").rglob("*.patch")):
        found.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    return found


def test_there_are_texts_to_check() -> None:
    assert sum(map(len, codes().values())) > 1000


def test_files_that_docstrings_and_comments_name_exist() -> None:
    plain = {file: [word.rstrip(".,;:)") for text in found for word in text.split()] for file, found in texts().items()}
    assert not wrong(lambda found, file: unknown_files([*found, *plain[file]], file))


@pytest.mark.parametrize(
    "unknown", [unknown_tests, unknown_commands, unknown_keys, unknown_names], ids=lambda each: each.__name__
)
def test_names_in_docstrings_and_comments_exist(unknown: Callable[[list[str]], list[str]]) -> None:
    assert not wrong(lambda found, _: unknown(found))


def test_identifiers_in_docstrings_and_comments_are_in_the_code() -> None:
    of_others = {"RouterReplay", "attach_and_log_load_balancing_loss", "batched_mm", "parquet.thrift"}
    of_formulas = {"R"}
    known = identifiers()

    def unknown(found: list[str], _: Path) -> list[str]:
        names = (code.split("(")[0] for code in found)
        plain = {name for name in names if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name)}
        ours = (name for name in sorted(plain - of_others - of_formulas) if Path(name).suffix not in SUFFIXES)
        return [name for name in ours if not known.issuperset(name.split("."))]

    assert not wrong(unknown)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("moerl.contract", True),
        ("moerl.contract.ports.Task.reward", True),
        ("moerl.contract.ports.Prompt.facts", True),
        ("moerl.tasks.chain_sum.ChainSumTask.config", True),
        ("moerl.contract.ports.Prompt.answer", False),
        ("moerl.contract.port", False),
        ("moerl.tasks.registry.make_task", False),
    ],
)
def test_a_dotted_name_leads_to_a_module_or_what_it_defines(name: str, is_there: bool) -> None:
    assert leads_somewhere(name) is is_there


def test_a_comment_of_several_lines_is_one_text() -> None:
    texts, words = read_source('"""Doc."""\nx = "of it"  # one\n# two\n\n# three\n')
    assert texts == ["Doc.", "one two", "three"]
    assert words == {"x", "of", "it"}
