"""The engines under test, one after the other; one SGLang server for all these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sglang_live
from conformance_cases import ENGINES, Build, Engine, Subject, V

from moerl.rollout.sglang.server import ServerOptions, SGLangServer


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("conformance")
    ENGINES["sglang"].model(0).save_pretrained(folder / "model")
    options = ServerOptions(
        folder / "model", sglang_live.ENVIRONMENT, device="cpu", dtype="float32", max_pool_tokens=8192, vocab_size=V
    )
    with sglang_live.running(options, folder / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Makes every test in this folder compute with one thread."""


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("process", marks=pytest.mark.slow),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    return ENGINES[request.param]


@pytest.fixture
def build(subject: Subject, request: pytest.FixtureRequest) -> Iterator[Build]:
    """Builds engines by their number of slots, and closes them."""
    engines: list[Engine] = []

    def make(max_running: int = 16) -> Engine:
        engines.append(subject.make(subject, request, max_running))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
