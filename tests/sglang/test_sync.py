"""From a trainer of eight ranks into a live server: bit for bit each export, and the same greedy tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import families
import msgspec
import pytest
import sglang_live
import tiny_moe
import torch
import weight_sync
from ranks import Ranks
from safetensors.torch import load_file, save_file
from sglang_reference import make_requests
from transformers import AutoModelForCausalLM

from moerl.batching.packing import PackOptions, pack_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch
from moerl.contract.commands import AnyCommand, KeepWeights, Publish, Reply
from moerl.contract.parallel import ParallelDims
from moerl.contract.trajectory import ModelSpec, SamplingParams, Trajectory
from moerl.models.description import read_model
from moerl.models.spec import moe_layer_indices
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.digests import ServedModel
from moerl.rollout.sglang.server import ServerOptions

pytestmark = pytest.mark.sglang

NUM_VERSIONS = 3
_FORMAT = {"format": "pt"}
LAYOUT = {"tensor": 2, "pipeline": 2, "expert": 2}


@dataclass(frozen=True)
class Case:
    """dtype: of the trainer and the server. num_ranks: of the server."""

    family: str
    dtype: str
    num_ranks: int
    folder: Path
    endpoint: Endpoint


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_moe", "float32", 1),
        ("qwen3_moe", "bfloat16", 2),
        ("deepseek_v3", "float32", 2),
        ("deepseek_v3", "bfloat16", 1),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def case(request, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, dtype, num_ranks = request.param
    published = sglang_live.DEEPSEEK_PUBLISHED if family == "deepseek_v3" else {}
    folder = families.write_model(
        tmp_path_factory.mktemp("model") / "hf", families.FAMILIES[family], seed=5, **published
    )
    options = ServerOptions(
        folder, environment, "cpu", tensor=num_ranks, dtype=dtype, max_pool_tokens=8192, policy_version=-1
    )
    with sglang_live.running(options, tmp_path_factory.mktemp("server")) as server:
        yield Case(family, dtype, num_ranks, folder, server.endpoint)


def train_and_sync(
    layout: Any, case: Case, spec: ModelSpec, batches: list[list[Microbatch]], output: Path
) -> list[str]:
    """Versions 0, 1 and 2 of a policy in training; what the server holds is compared with the bridge's export, and the
    last one's greedy answers with those of transformers on it."""
    from moerl.contract.shares import cut_share
    from moerl.kernels.checksum import checksums
    from moerl.trainer.losses import TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    options = ModelOptions(dtype=case.dtype, expert_bias="update" if case.family == "deepseek_v3" else "frozen")
    trainer = MegatronTrainer(read_model(case.folder), layout, options, tiny_moe.OPTIMIZER, 8)
    local = [cut_share(batch, trainer.layout) for batch in batches[layout.data_rank]]
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    plan = weight_sync.plan_for(trainer, case.folder)
    engine, problems, before, shapes = None, [], {}, {}
    if layout.rank == 0:
        shapes = {name: tuple(t.shape) for name, t in load_file(case.folder / "model.safetensors").items()}
        model = ModelFacts(spec, moe_layer_indices(families.FAMILIES[case.family].config().to_dict()))
        engine = sglang_live.connect(case.endpoint, model=model, version=-1, shapes=shapes, dtype=case.dtype)
    for version in range(NUM_VERSIONS):
        weight_sync.publish(trainer, plan, engine, version)
        expected = {name: tensor.clone() for name, tensor in trainer.export()}
        if engine is not None:
            assert engine.handshake().policy_version == version
            dtypes = engine.held_dtypes()
            cast = {name: tensor.to(getattr(torch, dtypes[name])) for name, tensor in expected.items()}
            held = sglang_live.digests(case.endpoint, ServedModel(shapes, case.num_ranks, {}))
            problems += [f"version {version}: {n}" for n, value in checksums(cast.items()).items() if held[n] != value]
            same = [name for name, tensor in expected.items() if name in before and torch.equal(tensor, before[name])]
            problems += [f"version {version} has not changed"] if version and len(same) > len(expected) // 2 else []
            before = expected
        trainer.step(local, TextLoss(local, spec.vocab_size, denominator), enforce=True)
    if engine is not None:
        if case.dtype == "float32":
            problems += _greedy_differences(engine, case, before, output)
        engine.close()
    return problems


def _greedy_differences(engine: Any, case: Case, weights: dict[str, torch.Tensor], output: Path) -> list[str]:
    """Rollouts whose tokens are not those that transformers finds most likely with these weights."""
    exported = shutil.copytree(case.folder, output / "exported")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, exported / "model.safetensors", _FORMAT)
    judge: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    requests = [
        replace(r, sampling=SamplingParams(temperature=0.0), stop_ids=(), max_new_tokens=24) for r in make_requests(6)
    ]
    wrong = []
    for record in engine.generate(requests):
        trajectory = Trajectory(**record.values)
        prompt = torch.tensor([trajectory.token_ids[~trajectory.sampled].tolist()])
        expected = judge.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        if expected[0].tolist() != trajectory.token_ids.tolist():
            wrong.append(f"greedy answer {record.rollout_id}")
    return wrong


def test_a_server_holds_the_export_of_every_step_and_answers_greedily_as_transformers(
    case: Case, tmp_path: Path, processes: Callable[[int], Ranks]
):
    family = families.FAMILIES[case.family]
    samples = families.make_samples(family.spec(), 5, (5, 30, 17, 41))
    batches = pack_for_ranks(samples, 2, PackOptions(64, Padding.of(ParallelDims(tensor=2))), replay=True)
    results = processes(8).run(train_and_sync, case, family.spec(), batches, tmp_path, **LAYOUT)
    assert [problem for result in results for problem in result] == []


class NothingHeld:
    """Ranks without a copy of what they sent: no server of this test comes late."""

    def ask(self, command: AnyCommand) -> list[Reply]:
        assert isinstance(command, KeepWeights)
        return []


def train_and_sync_from_two_senders(
    layout: Any, case: Case, spec: ModelSpec, batches: list[list[Microbatch]], endpoints: list[Endpoint]
) -> tuple[list[str], int]:
    """Versions 0 and 1, led by the first rank in place of a controller, checked by the engine as in a run; then what
    every server holds against the export. Problems, and the bytes that this rank sent of the last version."""

    from moerl.contract.shares import cut_share
    from moerl.contract.weight_update import UpdateKind
    from moerl.kernels.checksum import checksums
    from moerl.ranks.senders import RankSenders, RanksInTurn
    from moerl.rollout.fleet.servers_sink import ServersSink
    from moerl.rollout.sglang.channel import open_channel
    from moerl.trainer import platform
    from moerl.trainer.collectives import all_gather_bytes, share_bytes
    from moerl.trainer.losses import TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(case.folder), layout, ModelOptions(dtype=case.dtype), tiny_moe.OPTIMIZER, 8)
    local = [cut_share(batch, trainer.layout) for batch in batches[layout.data_rank]]
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    plan = weight_sync.plan_for(trainer, case.folder, senders=2)
    shapes = {name: tuple(t.shape) for name, t in load_file(case.folder / "model.safetensors").items()}
    open_ours = partial(open_channel, device=platform.device())
    sink = ServersSink(open_ours, 1 << 20, keeps_copy=True, together=False)
    publisher = weight_sync.publisher_of(plan, layout.rank, sink)
    senders = RankSenders(RanksInTurn(cast(Any, NothingHeld())))
    engine, problems, said = None, [], []
    if layout.rank == 0:
        model = ModelFacts(spec, moe_layer_indices(families.FAMILIES[case.family].config().to_dict()))
        engine = sglang_live.connect(
            *endpoints, model=model, version=-1, shapes=shapes, dtype=case.dtype, notify=said.append
        )
        engine.send_by(senders)
    num_bytes = 0
    for version in range(2):
        trainer.step(local, TextLoss(local, spec.vocab_size, denominator), enforce=True)
        begun = b""
        if engine is not None:
            dtypes = dict(engine.held_dtypes())
            engine.begin_update(weight_sync.update_of(plan, version))
            begun = msgspec.json.encode(Publish(version, UpdateKind.FULL, dtypes, senders.targets))
        told = msgspec.json.decode(share_bytes(begun), type=Publish)
        sink.targets = told.targets
        report = publisher.publish(trainer.shards(), weight_sync.update_of(plan, version), told.dtypes)
        num_bytes = report.num_bytes
        reply = Reply(checksums=dict(report.checksums), failed=sink.failed())
        replies = [msgspec.json.decode(each, type=Reply) for each in all_gather_bytes(msgspec.json.encode(reply))]
        if engine is not None:
            senders.published(replies)
            engine.end_update()
            engine.verify(
                {name: value for each in replies for name, value in each.checksums.items() if value is not None}
            )
    expected = checksums((name, tensor.clone()) for name, tensor in trainer.export())
    if engine is not None:
        for endpoint in endpoints:
            held = sglang_live.digests(endpoint, ServedModel(shapes, 1, {}))
            problems += [f"{endpoint.url}: {name}" for name, value in expected.items() if held[name] != value]
        problems += [*said, *(f"{name} is {state}" for name, state in engine.states.items() if state != "healthy")]
        engine.close()
    publisher.ask_sink("close", sink.close)
    return problems, num_bytes


def test_two_pipeline_stages_send_to_two_servers_at_once(
    environment: Path, tmp_path: Path, processes: Callable[[int], Ranks]
):
    family = families.FAMILIES["qwen3_moe"]
    folder = families.write_model(tmp_path / "hf", family, seed=5)
    options = ServerOptions(folder, environment, "cpu", dtype="float32", max_pool_tokens=8192, policy_version=-1)
    samples = families.make_samples(family.spec(), 5, (5, 30, 17, 41))
    batches = pack_for_ranks(samples, 1, PackOptions(64, Padding()), replay=True)
    with sglang_live.running(options, tmp_path / "a") as a, sglang_live.running(options, tmp_path / "b") as b:
        case = Case("qwen3_moe", "float32", 1, folder, a.endpoint)
        endpoints = [a.endpoint, b.endpoint]
        results = processes(2).run(train_and_sync_from_two_senders, case, family.spec(), batches, endpoints, pipeline=2)
    problems, sizes = zip(*results, strict=True)
    assert problems == ([], [])
    assert min(sizes) > 0.8 * max(sizes)
