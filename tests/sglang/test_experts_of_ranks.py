"""A live server whose two ranks share the experts: routes, weights and updates are those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import families
import pytest
import sglang_live
import torch
from safetensors.torch import load_file
from sglang_reference import Reference, collect, make_requests

from moerl.kernels.checksum import checksums
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.sglang.channel import ChannelAddress, SGLangChannel
from moerl.rollout.sglang.digests import ServedModel, ask_ranks
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.server import ServerOptions, SGLangServer
from moerl.rollout.sglang.update_calls import UpdateCalls

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def shared(model_folder: Path, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    options = ServerOptions(
        *(model_folder, environment, "cpu"), tensor=2, expert=2, dtype="float32", max_pool_tokens=4096
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("shared")) as started:
        yield started


def served(folder: Path) -> ServedModel:
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    return ServedModel(shapes, 2, {})


def compare(server: SGLangServer, model: ModelFacts, folder: Path, version: int) -> None:
    """Answers against transformers, and what the server holds against the checkpoint."""
    reference = Reference(folder)
    engine = sglang_live.connect(server.endpoint, model=model, version=version)
    try:
        for trajectory in collect(engine, make_requests(12)).values():
            reference.compare(trajectory)
    finally:
        engine.close()
    reference.require_parity()
    assert reference.num_rows > 1000
    tensors = load_file(folder / "model.safetensors")
    held = sglang_live.digests(server.endpoint, served(folder))
    assert {name: held[name] for name in tensors} == checksums(tensors.items())


def send(server: SGLangServer, folder: Path, version: int) -> None:
    tensors = load_file(folder / "model.safetensors")

    async def update(http: SGLangHttp) -> None:
        calls = UpdateCalls("shared", http, 60.0)
        channel = SGLangChannel(calls, ChannelAddress(server.endpoint, 2, "gloo", 60.0), torch.device("cpu"))
        await calls.begin_update()
        assert await channel.new_group().send(list(tensors.items()), {"shared": channel}, 0) == {}
        await calls.end_update(version)
        await calls.resume()
        await channel.close()

    sglang_live.over_http(server.endpoint, update)


def experts_of(records: Iterable[str]) -> set[int]:
    """Numbers of the experts that a rank holds something of."""
    return {int(name.split(".experts.")[1].split(".")[0]) for name in records if ".experts." in name}


def test_each_rank_holds_half_of_the_experts_whole(shared: SGLangServer, model_folder: Path):
    model = served(model_folder)
    ranks = sglang_live.over_http(shared.endpoint, lambda http: ask_ranks(http, "held_layout", 60.0, 1 << 20))
    half = len(experts_of(ranks[0]))
    assert [experts_of(rank) for rank in ranks] == [{*range(half)}, {*range(half, 2 * half)}]
    assert experts_of(model.shapes) == {*range(2 * half)}


def test_routes_are_numbered_as_in_the_checkpoint_before_and_after_an_update(
    shared: SGLangServer, model: ModelFacts, model_folder: Path, tmp_path: Path
):
    compare(shared, model, model_folder, 0)
    other = families.write_model(tmp_path / "other", families.FAMILIES["qwen3_moe"], seed=1)
    send(shared, other, 1)
    compare(shared, model, other, 1)
