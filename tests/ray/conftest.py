"""Tests on Ray clusters are skipped, with the reason, if Ray is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_cluster import needs_ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_ray)
