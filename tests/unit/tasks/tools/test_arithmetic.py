"""The calculator computes what Python computes, and refuses everything else in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.tasks.tools.arithmetic import MAX_CHARACTERS, calculate

NUMBERS = st.integers(0, 9999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", " - ", " * "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_it_computes_what_python_computes(text: str) -> None:
    if len(text) <= MAX_CHARACTERS:
        assert calculate(text) == str(eval(text))  # noqa: S307 - of the test's own making


@pytest.mark.parametrize(
    "text", ["", " ", "3*", "(3", "3)", "3**2", "3/4", "x", "٣", "1 2", "1_0", "0x1", "1e9", "3\n", "()", "+3"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected at|ends early|is no number|not closed"):
        calculate(text)


def test_numbers_are_as_large_as_the_text_allows() -> None:
    nines = "9" * (MAX_CHARACTERS // 2 - 1)
    assert calculate(f"{nines}*{nines}") == str(int(nines) ** 2)
    assert calculate("(" * 49 + "7" + ")" * 49) == "7"
    with pytest.raises(ValueError, match="101 characters"):
        calculate("1" * (MAX_CHARACTERS + 1))
