"""Fixtures of more than one test folder: Megatron ranks that are started once per test process, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_moe
from ranks import Ranks


@pytest.fixture(scope="session")
def one_process() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.write_model(tmp_path_factory.mktemp("untied"), tied=False, seed=1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.write_model(tmp_path_factory.mktemp("tied"), tied=True, seed=2)
