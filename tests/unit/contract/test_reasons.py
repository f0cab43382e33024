"""Reason codes are the ones in `Reason`, and all of them are explained."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moerl.contract.reasons import Reason

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained_in_the_documentation(reason: Reason):
    assert f"`{reason}`" in (ROOT / "docs" / "data_contract.md").read_text()


@pytest.mark.parametrize("name", ["kernels", "algorithms", "contract", "buffer", "orchestration", "trainer", "rollout"])
def test_no_contract_error_is_raised_with_a_code_of_its_own(name: str):
    for file in sorted((ROOT / "moerl" / name).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ContractError" and call.args:
                assert not isinstance(call.args[0], ast.Constant), f"{file}:{call.lineno}"
