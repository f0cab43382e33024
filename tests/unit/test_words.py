"""First words of docstrings, "where" for "if", descriptions of fields, names of classes, reads of the environment, and
the tool that checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lint_scripts import ROOT, load_script


@pytest.fixture(scope="module")
def check_words() -> Any:
    return load_script("check_words")


def test_lint_asks_whether_the_repository_keeps_all_rules():
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
    "text", ['"""Whereabouts of a run."""\n', '"""Offers it."""\n', 'SIZE = "what"\n', 'f()\n"""what"""\n', '""""""\n']
)
def test_other_texts_pass(text: str, check_words: Any):
    assert list(check_words.riddles(text)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""None where there is none."""\n', [(1, "None where there is none.")]),
        ('def f():\n    """Reads it.\n\n    Where it is, that is it.\n    """\n', [(4, "it. Where it is, that")]),
        ("x = 1  # or 2, where one fails\n", [(1, "2, where one fails")]),
        ("# The first line ends\n# where this begins.\n", [(2, "ends where this begins.")]),
        ('x = f"{y} where {z} is"\n', [(1, "where")]),
    ],
)
def test_a_where_that_begins_a_condition_is_found(text: str, found: list[tuple[int, str]], check_words: Any):
    assert [(line, words.strip('"')) for line, words in check_words.conditions(text)] == found


@pytest.mark.parametrize(
    "text",
    [
        '"""True where the target was sampled."""\n',
        '"""Says where it is, in the folder where others are."""\n',
        "where = np.where(a, b, c)\n",
        'names = ["where"]\n',
        '"""Returns it wherever it is, somewhere."""\n',
        'x = f("a row "\n  "where it is")\n',
    ],
)
def test_a_where_that_names_a_place_passes(text: str, check_words: Any):
    assert list(check_words.conditions(text)) == []


def test_a_public_field_without_a_docstring_is_found(check_words: Any):
    text = (
        'class A:\n    size: int\n    name: str = ""\n    """A name."""\n    _own: int = 0\n'
        '    kind: ClassVar[str] = ""\n'
        '    key: int = Field(description="A key.")\n    other: int = Field(alias="description=")\n'
        '    empty: int\n    """ """\n'
        "class _B:\n    size: int\n"
    )
    assert list(check_words.undescribed(text)) == [(2, "A.size"), (8, "A.other"), (9, "A.empty")]


def test_conditions_and_fields_of_the_product_alone_are_checked(
    check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {})
    for folder in ("moerl", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text('class A:\n    """One, where there is one at all."""\n    size: int\n')
    assert check_words.problems(tmp_path) == [
        'moerl/a.py:2: "One, where there is one": say "if", or name the place',
        "moerl/a.py:3: A.size has no docstring below it",
    ]


def test_pages_of_the_root_docs_and_examples_are_checked_outside_of_code(
    check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {})
    texts = {
        "README.md": "See [more](more.md#where-it-ends).\nIt stops where there is none.\n",
        "docs/code.md": "```\nit where\n```\n\nSo:\n\n   ```bash\n   a where b\n   ```\n\n`a\nwhere b`: one. Where?\n",
        "docs/a/good.md": "It prints the folder where others are, and ends if there is none.\n",
        "examples/one/README.md": "# One\n\n- Fast, where possible.\n",
        "other/README.md": "None where there is none.\n",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert check_words.problems(tmp_path) == [
        'README.md:2: "stops where there is none.": say "if", or name the place',
        'docs/code.md:12: "one. Where": say "if", or name the place',
        'examples/one/README.md:3: "Fast, where possible.": say "if", or name the place',
    ]


def test_a_dropped_word_is_found_in_text_and_names_but_not_in_other_words_code_of_pages_and_old_names(
    check_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_words, "EXCEPTIONS", {})
    text = '"""Runs Beside it, besides others."""\n_BESIDE = on_demand = "demanding"\n'
    for path in ("moerl/a.py", check_words.OLD_NAMES, "tests/a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "README.md").write_text("The key `beside` is gone.\n\nIt demands one.\n")
    assert check_words.problems(tmp_path) == [
        'moerl/a.py:1: "Beside": say next to, during, or in a process of its own',
        'moerl/a.py:2: "BESIDE": say next to, during, or in a process of its own',
        'moerl/a.py:2: "demand": say require',
        'README.md:3: "demands": say requires',
    ]


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
