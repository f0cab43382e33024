from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.errors import EngineError
from moerl.rollout.sglang.unified_diff import apply_patch, parse_diff, revert_patch

TEXTS = st.lists(st.sampled_from(["a", "b", "", "  c", "d"]), min_size=1, max_size=30).map(
    lambda x: "\n".join(x) + "\n"
)


def diff(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/f.py", "b/f.py")
    return "".join(lines)


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_a_diff_applied_gives_the_new_text_and_reverted_the_old(old: str, new: str):
    for patch in parse_diff(diff(old, new), "p"):
        assert apply_patch(old, patch, "p") == new
        assert revert_patch(new, patch, "p") == old


def test_a_shifted_context_is_refused_not_searched_for():
    old = "".join(f"line {i}\n" for i in range(20))
    (patch,) = parse_diff(diff(old, old.replace("line 9\n", "line nine\n")), "p")
    with pytest.raises(EngineError, match=r"p: does not fit f.py, line 7"):
        apply_patch("inserted\n" + old, patch, "p")


def test_a_changed_context_line_is_refused():
    old = "".join(f"line {i}\n" for i in range(20))
    (patch,) = parse_diff(diff(old, old.replace("line 9\n", "line nine\n")), "p")
    with pytest.raises(EngineError, match="line 11"):
        apply_patch(old.replace("line 10\n", "line ten\n"), patch, "p")


def test_a_new_file_must_not_be_there_and_an_old_one_must():
    (created,) = parse_diff("--- /dev/null\n+++ b/f.py\n@@ -0,0 +1,2 @@\n+a\n+b\n", "p")
    assert apply_patch(None, created, "p") == "a\nb\n"
    assert revert_patch("a\nb\n", created, "p") is None
    with pytest.raises(EngineError, match="does not fit"):
        apply_patch("", created, "p")
    with pytest.raises(EngineError, match="does not fit"):
        revert_patch("a\nc\n", created, "p")
    (changed,) = parse_diff(diff("a\n", "b\n"), "p")
    with pytest.raises(EngineError, match="does not fit"):
        apply_patch(None, changed, "p")


@pytest.mark.parametrize(
    "text",
    [
        "rubbish\n",
        "--- a/f.py\n+++ b/g.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/f.py\n+++ b/f.py\n@@ -1,3 +1 @@\n-a\n+b\n",
        "--- a/f.py\n+++ b/f.py\n@@ rubbish\n",
        "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
    ],
)
def test_what_is_no_unified_diff_is_refused(text: str):
    with pytest.raises(EngineError, match="not a unified diff"):
        parse_diff(text, "p")
