"""First words of docstrings, names of classes, reads of environment variables, and the tool that checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lint_scripts import ROOT, load_script


@pytest.fixture(scope="module")
def check_words() -> Any:
    return load_script("check_words")


def test_the_repository_keeps_all_rules(check_words: Any):
    assert check_words.problems(ROOT) == []
    assert "$(BIN)/python scripts/check_words.py\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""What it holds."""\n', 1),
        ('class A:\n    """Of a run."""\n', 2),
        ('def f():\n    """`Where` it is."""\n', 2),
        ('async def f():\n    """\n    Those of a run.\n    """\n', 2),
        ('class A:\n    size: int\n    """Which is large."""\n', 3),
        ('SIZE = 1\n"""As of the model."""\n', 2),
    ],
)
def test_a_docstring_that_begins_with_a_banned_word_is_found(text: str, line: int, check_words: Any):
    assert [found for found, _ in check_words.riddles(text)] == [line]


@pytest.mark.parametrize(
    "text",
    ['"""Whereabouts of a run."""\n', '"""Offers it."""\n', 'SIZE = "what"\n', 'f()\n"""what"""\n', '""""""\n'],
)
def test_other_texts_pass(text: str, check_words: Any):
    assert list(check_words.riddles(text)) == []


def test_a_public_class_name_of_two_modules_is_found_with_both_places(
    check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {})
    texts = {
        "moerl/config/a.py": "class Row:\n    class Inner: ...\nclass _Own: ...\n",
        "moerl/ranks/b.py": "class _Own: ...\nclass Inner: ...\nclass Row: ...\n",
        "tests/c.py": "class Row: ...\n",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert check_words.problems(tmp_path) == [
        "moerl/ranks/b.py:3: moerl/config/a.py:1 defines a class Row, too: give one a name said in full"
    ]


@pytest.mark.parametrize(
    "line",
    ["os.environ['HOME']", "import os as o; o.getenv('HOME')", "from os import environ", "f(os.environ.get('A'))"],
)
def test_a_read_of_the_environment_is_found_outside_of_its_places(
    line: str, check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {})
    for folder in ("config", "launch", "ranks"):
        (tmp_path / "moerl" / folder).mkdir(parents=True)
        (tmp_path / "moerl" / folder / "a.py").write_text(f"{line}\n")
    assert [each.split(":")[0] for each in check_words.problems(tmp_path)] == ["moerl/ranks/a.py"]


def test_an_exception_that_nothing_needs_is_named(check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {"moerl/a.py": "a reason"})
    assert check_words.problems(tmp_path) == ["moerl/a.py: no longer needed; remove its exception"]
