"""Names that the library uses of what it imports, for rules about which code may use them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import moerl

LIBRARY = Path(moerl.__file__).parent


@cache
def uses() -> dict[str, set[str]]:
    """Names that each file of the library uses of what it imports."""
    return {str(file.relative_to(LIBRARY)): used_names(ast.parse(file.read_text())) for file in LIBRARY.rglob("*.py")}


def places_of(wanted: set[str]) -> set[str]:
    """Files of the library that use any of these, however they import it."""
    return {file for file, names in uses().items() if names & wanted}


def used_names(tree: ast.Module) -> set[str]:
    """Whole names of what a module uses of what it imports."""
    whole: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                whole |= {each.asname: each.name} if each.asname else {first: first}
        elif isinstance(node, ast.ImportFrom):
            whole |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
    parts = [name.partition(".") for name in names]
    return {f"{whole[first]}{dot}{rest}" for first, dot, rest in parts if first in whole}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression that is that; empty for others."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute() if owner := dotted(node.value):
            return f"{owner}.{node.attr}"
        case _:
            return ""
