"""Live servers on CPU. `make test-sglang` makes their environment first.

One server per test session and kind of model: starting one takes longer than all its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import sglang_live
from sglang_installations import copy_of, take_patches_out

from moerl.models.spec import moe_layer_indices
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.sglang import server as server_module
from moerl.rollout.sglang.server import ServerOptions, SGLangServer, launch_options

FAMILY = families.FAMILIES["qwen3_moe"]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Makes every test in this folder compute with one thread."""


@pytest.fixture(scope="session")
def environment() -> Path:
    return sglang_live.ENVIRONMENT


@pytest.fixture(scope="session")
def model() -> ModelFacts:
    return ModelFacts(FAMILY.spec(), moe_layer_indices(FAMILY.config().to_dict()))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("model") / "hf", FAMILY, seed=0)


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """A server with room for everything."""
    options = ServerOptions(
        model=model_folder, environment=sglang_live.ENVIRONMENT, device="cpu", dtype="float32", max_pool_tokens=16384
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def pressed_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Two ranks, a key-value pool that forces retractions, and prefills in small pieces. Who changes its weights puts
    those of `model_folder` back."""
    options = ServerOptions(
        model=model_folder,
        environment=sglang_live.ENVIRONMENT,
        device="cpu",
        dtype="float32",
        tensor=2,
        max_pool_tokens=700,
        chunked_prefill_tokens=16,
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("pressed")) as started:
        yield started


@pytest.fixture
def engine(server: SGLangServer, model: ModelFacts) -> Iterator[FleetEngine]:
    made = sglang_live.connect(server.endpoint, model=model)
    yield made
    made.close()


@pytest.fixture(scope="session")
def unpatched(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release as it was published."""
    made = copy_of(environment, tmp_path_factory.mktemp("unpatched") / "env")
    take_patches_out(made)
    return made


@pytest.fixture(scope="session")
def unpatched_server(
    unpatched: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """Started by somebody who does not check it."""

    def upstream_options(options: ServerOptions, port: int) -> dict[str, object]:
        known = launch_options(options, port)
        # Without the first patch a CPU server that captures routes does not start.
        del known["enable-return-routed-experts"]
        return known

    options = ServerOptions(model_folder, unpatched, device="cpu", dtype="float32", max_pool_tokens=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "verify_installation", lambda *arguments: None)
        patch.setattr(server_module, "launch_options", upstream_options)
        with sglang_live.running(options, tmp_path_factory.mktemp("unpatched-server")) as started:
            patch.undo()
            yield started
