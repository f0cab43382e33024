"""Weights that live servers report, against checksums of the checkpoint; layouts that no CPU server has, too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import families
import pytest
import sglang_live
import torch
from safetensors.torch import load_file
from torch import Tensor

from moerl.kernels.checksum import checksums
from moerl.machine.server_environment import server_environment
from moerl.rollout.sglang.channel import ChannelAddress, SGLangChannel
from moerl.rollout.sglang.digests import ServedModel, read_parts
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.install import python_of
from moerl.rollout.sglang.server import ServerOptions, SGLangServer
from moerl.rollout.sglang.update_calls import UpdateCalls

pytestmark = pytest.mark.sglang


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def served_model(tensors: Mapping[str, Tensor], num_ranks: int) -> ServedModel:
    return ServedModel({name: tuple(tensor.shape) for name, tensor in tensors.items()}, num_ranks, {})


def differing(server: SGLangServer, tensors: Mapping[str, Tensor], num_ranks: int) -> list[str]:
    """Tensors of which the server does not hold what is expected, in its own precision."""
    model = served_model(tensors, num_ranks)
    dtypes = sglang_live.dtypes(server.endpoint, model)
    cast = {name: tensor.to(getattr(torch, dtypes[name])) for name, tensor in tensors.items()}
    held = sglang_live.digests(server.endpoint, model)
    return [name for name, expected in checksums(cast.items()).items() if held[name] != expected]


def test_a_server_says_that_it_holds_the_checkpoint(server: SGLangServer, model_folder: Path):
    tensors = read(model_folder)
    assert differing(server, tensors, 1) == []
    dtypes = sglang_live.dtypes(server.endpoint, served_model(tensors, 1))
    assert set(dtypes.values()) == {"float32"}


def test_only_the_controller_may_ask(server: SGLangServer):
    response = sglang_live.post(server.endpoint, "/weights_checker", {"action": "held", "selector": "target"})
    assert response.status_code == 401


@pytest.fixture(scope="module")
def two_ranks(
    model_folder: Path, environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    options = ServerOptions(
        model=model_folder, environment=environment, device="cpu", dtype="bfloat16", tensor=2, max_pool_tokens=4096
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("two_ranks")) as started:
        yield started


def send(server: SGLangServer, tensors: Mapping[str, Tensor], version: int) -> None:
    async def update(http: SGLangHttp) -> None:
        calls = UpdateCalls("two", http, 60.0)
        channel = SGLangChannel(calls, ChannelAddress(server.endpoint, 2, "gloo", 60.0), torch.device("cpu"))
        await calls.begin_update()
        assert await channel.new_group().send(list(tensors.items()), {"two": channel}, 0) == {}
        await calls.end_update(version)
        await calls.resume()
        await channel.close()

    sglang_live.over_http(server.endpoint, update)


def test_two_ranks_in_bfloat16_hold_the_checkpoint_and_then_an_update(
    two_ranks: SGLangServer, model_folder: Path, tmp_path: Path
):
    tensors = read(model_folder)
    assert differing(two_ranks, tensors, 2) == []
    other = read(families.write_model(tmp_path / "other", families.FAMILIES["qwen3_moe"], seed=1))
    assert set(differing(two_ranks, other, 2)) == set(tensors)
    send(two_ranks, other, 1)
    assert differing(two_ranks, other, 2) == []


FLIPPED = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.2.mlp.experts.3.up_proj.weight",
    "model.layers.3.mlp.experts.7.down_proj.weight",
    "model.norm.weight",
]


def test_bits_that_flip_on_their_way_are_named(two_ranks: SGLangServer, model_folder: Path):
    tensors = {name: tensor.bfloat16() for name, tensor in read(model_folder).items()}
    sent = dict(tensors)
    for number, name in enumerate(FLIPPED):
        sent[name] = tensors[name].clone()
        # In the last element, on the last rank: the lowest bit, the next one, ...
        sent[name].view(torch.int16).view(-1)[-1] ^= 1 << number
    send(two_ranks, sent, 2)
    assert differing(two_ranks, tensors, 2) == sorted(FLIPPED, key=list(tensors).index)


# Servers on CPU pad key-value heads instead of copying them, and have neither expert parallelism nor shared experts
# among the routed ones; the tiny models are not tied.
_LAYOUTS = """
import inspect, json, sys, torch
from sglang.srt.layers import linear
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils.held_weights import held_weights

def experts(rank):
    # Two ranks of two experts each, both with the shared expert behind them; without the groups of the constructor.
    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.intermediate_size_per_partition, layer.hidden_size, layer.moe_tp_rank, layer.layer_id = 6, 8, 0, 0
    layer.num_local_experts, layer._num_local_routed, layer._expert_storage_rank = 3, 2, rank
    layer.num_fused_shared_experts, layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe = 1, False, False
    layer.quant_method = None
    for name in ("w13", "w2"):
        whole = torch.load(f"{sys.argv[1]}/{name}.pt")
        layer.register_parameter(f"{name}_weight", torch.nn.Parameter(whole[[2 * rank, 2 * rank + 1, 4]]))
    return layer

def attention(rank):
    # 0.5.21 is told which rank it is, 0.5.23 asks a group that no process has here.
    if "tp_rank" in inspect.signature(QKVParallelLinear).parameters:
        return QKVParallelLinear(8, 4, 8, 2, bias=False, tp_rank=rank, tp_size=4)
    linear._resolve_linear_group = lambda name: linear._LogicalGroup(rank, 4)
    return QKVParallelLinear(8, 4, 8, 2, bias=False)

names = "qkv"
whole = {name: torch.load(f"{sys.argv[1]}/{name}.pt") for name in names}
embedding = torch.load(f"{sys.argv[1]}/embedding.pt")
ranks = []
for rank in range(4):
    model = torch.nn.Module()
    model.qkv_proj = attention(rank)
    for name in names:
        model.qkv_proj.weight_loader(model.qkv_proj.weight, whole[name], name)
    model.embed_tokens = VocabParallelEmbedding(91, 8, enable_tp=False)
    model.embed_tokens.weight_loader(model.embed_tokens.weight, embedding)
    model.lm_head = model.embed_tokens
    model.experts = experts(rank // 2)
    model.other = ReplicatedLinear(8, 8, bias=False)
    model.other.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    outer = torch.nn.Module()
    outer.model = model
    ranks.append(held_weights(outer, sums=True))
print(json.dumps(ranks))
"""


def test_copied_heads_tied_embeddings_experts_of_ranks_and_quantized_layers_are_told_apart(
    environment: Path, tmp_path: Path
):
    shapes = {"q": (32, 8), "k": (8, 8), "v": (8, 8), "embedding": (91, 8), "w13": (5, 12, 8), "w2": (5, 8, 6)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        torch.save(tensor, tmp_path / f"{name}.pt")
    done = subprocess.run(
        [str(python_of(environment)), "-c", _LAYOUTS, str(tmp_path)],
        env=server_environment("cpu", 1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    for records in ranks:
        assert records.pop("model.other.weight") == "!Untold quantized by Fp8LinearMethod"
    # Two key-value heads on four ranks: the first two hold the same one.
    assert ranks[0]["model.k_proj.weight"] == ranks[1]["model.k_proj.weight"] != ranks[2]["model.k_proj.weight"]
    named = {f"model.{name}_proj.weight": tensors[name] for name in "qkv"}
    named["model.embed_tokens.weight"] = tensors["embedding"]
    for number, expert in enumerate(["experts.0", "experts.1", "experts.2", "experts.3", "shared_experts"]):
        gate, up = tensors["w13"][number].chunk(2)
        projections = {"gate": gate, "up": up, "down": tensors["w2"][number]}
        named |= {f"model.{expert}.{name}_proj.weight": tensor for name, tensor in projections.items()}
    expected = checksums(named.items())
    parts = read_parts(ranks, served_model(named, 4))
    assert {name: sum(p.checksum for p in held) % 2**64 for name, held in parts.items()} == {
        name: value % 2**64 for name, value in expected.items()
    }
