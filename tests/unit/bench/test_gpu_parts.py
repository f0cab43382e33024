"""Checks of several parts keep what they have measured after each part."""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def test_grouped_products_are_kept_after_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = importlib.import_module("_gpu_grouped")
    kept: list[int] = []
    monkeypatch.setattr(grouped, "keep", lambda findings: kept.append(len(findings.results)))
    found = grouped.check("cpu")
    assert len(kept) == len(grouped.GROUPS["cpu"]) * len(grouped.ways("cpu"))
    assert kept == sorted(set(kept))
    assert kept[-1] == len(found.results)


def test_layouts_are_kept_though_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = importlib.import_module("_gpu_layouts")
    result = importlib.import_module("_report").Result
    kept: list[list[str]] = []
    monkeypatch.setattr(layouts, "keep", lambda findings: kept.append([each.name for each in findings.results]))
    monkeypatch.setattr(layouts, "_compare", lambda name, ranks, one, exact: [result(name, 0.0)])
    ended = {name: Future[list[Any]]() for name in ("TP2", "EP2", "PP2")}
    ended["EP2"].set_exception(RuntimeError("rank 1 died"))
    for name in ("TP2", "PP2"):
        ended[name].set_result([])
    with pytest.raises(RuntimeError, match="rank 1 died"):
        layouts._compare_all({future: name for name, future in ended.items()}, None, None)
    assert sorted(kept[-1]) == ["PP2", "TP2"]
