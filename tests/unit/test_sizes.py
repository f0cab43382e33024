"""The size caps of CONTRIBUTING.md and the tool that checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lint_scripts import ROOT, load_script


@pytest.fixture(scope="module")
def check_sizes() -> Any:
    return load_script("check_sizes")


def test_the_caps_of_the_tool_are_those_that_the_page_states(check_sizes: Any):
    stated = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    caps = (check_sizes.MAX_FILE_LINES, check_sizes.MAX_FUNCTION_LINES)
    assert f"Files up to {caps[0]} lines, functions up to {caps[1]} lines, six parameters" in stated
    assert check_sizes.MAX_PARAMETERS == 6


def test_what_is_over_a_cap_is_named_by_file_and_function(check_sizes: Any):
    six, seven = "self, a, b, c, d, e, *, f", "a, b, c, d, e, f, *more, g"
    long = "def long():\n" + "    pass\n" * 60
    text = f"class A:\n    def method({six}): ...\n{long}async def wide({seven}): ...\n" + "\n" * 400
    assert list(check_sizes.excesses("moerl/a.py", text)) == [
        ("moerl/a.py", "464 lines, at most 400"),
        ("moerl/a.py:long", "61 lines, at most 60"),
        ("moerl/a.py:wide", "7 parameters, at most 6"),
    ]
    assert [where for where, _ in check_sizes.excesses("tests/test_a.py", text)] == ["tests/test_a.py"]


def test_a_kernel_of_triton_takes_as_many_pointers_as_it_needs(check_sizes: Any):
    wide = "@triton.jit{}\ndef {}(a, b, c, d, e, f, g):\n    pass\n"
    text = wide.format("(do_not_specialize=[])", "kernel") + wide.format("", "long") + "    pass\n" * 60
    assert list(check_sizes.excesses("moerl/a.py", text)) == [("moerl/a.py:long", "62 lines, at most 60")]


def test_an_exception_that_nothing_needs_is_named(check_sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "moerl").mkdir()
    (tmp_path / "moerl" / "a.py").write_text("def wide(a, b, c, d, e, f, g): ...\n")
    monkeypatch.setattr(check_sizes, "EXCEPTIONS", {"moerl/a.py:wide": "a reason", "moerl/gone.py": "another"})
    assert check_sizes.problems(tmp_path) == ["moerl/gone.py: no longer over a cap; remove its exception"]


def test_a_file_too_many_that_takes_the_whole_configuration_is_named(
    check_sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_sizes, "MAX_WHOLE_CONFIG", 1)
    (tmp_path / "moerl").mkdir()
    (tmp_path / "moerl" / "a.py").write_text("def run(config: RunConfig): ...\n")
    (tmp_path / "moerl" / "b.py").write_text("def run(config: MyRunConfigs): ...\n")
    assert check_sizes.problems(tmp_path) == []
    (tmp_path / "moerl" / "c.py").write_text("from moerl.config.schema import RunConfig\n")
    [line] = check_sizes.problems(tmp_path)
    assert line.startswith("2 files name RunConfig, at most 1: ")
    assert line.endswith("they are moerl/a.py, moerl/c.py")


def test_lines_of_code_are_counted_without_empty_lines_comments_and_docstrings(check_sizes: Any):
    head = '"""Module.\n\nMore.\n"""\n\n# why\nX = 1  # one\n"""Attribute."""\n\n'
    text = head + 'def f(\n    a,\n):\n    """Doc."""\n    return """\n\nx"""\n'
    assert check_sizes.count_code_lines(text) == 1 + 3 + 3


def test_a_product_over_its_cap_is_named_with_its_lines(
    check_sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_sizes, "MAX_PRODUCT_LINES", 2)
    (tmp_path / "moerl").mkdir()
    (tmp_path / "moerl" / "a.py").write_text('"""A."""\n\nX = 1\n')
    (tmp_path / "moerl" / "b.py").write_text("Y = 2\n")
    assert check_sizes.problems(tmp_path) == []
    (tmp_path / "moerl" / "c.py").write_text("Z = 3\n")
    [line] = check_sizes.problems(tmp_path)
    assert line.startswith("moerl/: 3 lines of code, at most 2: ")
