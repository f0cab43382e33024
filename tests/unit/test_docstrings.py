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
def texts() -> dict[Path, list[str]]:
    """By file, its docstrings and its comments; those of lines in a row are one text."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return {file: texts_of(file.read_text(encoding="utf-8")) for file in files}


def texts_of(source: str) -> list[str]:
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    comments: list[str] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            is_more = token.start[0] == last + 1
            comments[-1:] = [f"{comments[-1]} {text}"] if is_more else [*comments[-1:], text]
            last = token.start[0]
    return [*docstrings, *comments]


@cache
def codes() -> dict[Path, list[str]]:
    """By file, what stands in backquotes; a name that goes on in the next line is one."""
    return {file: [code for text in found for code in CODE.findall(text)] for file, found in texts().items()}


def wrong(check: Callable[[list[str], Path], list[str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}: {name}" for file, found in codes().items() for name in check(found, file)]


@cache
def identifiers() -> set[str]:
    """All names in code and in texts that are no docstrings, and all words of YAML files and patches."""
    found: set[str] = set()
    for file in texts():
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        found |= {token.string for token in tokens if token.type == tokenize.NAME}
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.update(re.findall(r"\w+", node.value))
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
    assert texts_of('"""Doc."""\nx = 1  # one\n# two\n\n# three\n') == ["Doc.", "one two", "three"]
