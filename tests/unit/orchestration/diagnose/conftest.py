"""A model, a sound dump of it, and `moerl diagnose` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import Diagnosed, sample, write_moe

from moerl import cli
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Report, read_report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def clean(model: Path) -> list[DumpedRollout]:
    return sample(model, num_groups=2)


@pytest.fixture
def run(tmp_path: Path) -> Diagnosed:
    def go(*arguments: object) -> tuple[int, Report]:
        page = tmp_path / "page.html"
        status = cli.main(["diagnose", *map(str, arguments), "--output", str(page)])
        assert page.stat().st_size > 800_000
        return status, read_report(page.with_suffix(".json"))

    return go
