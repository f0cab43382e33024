"""Publishing: whole versions or none, every failure known on every rank, and what an engine holds compared."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
import torch
import weight_sync
from ranks import Ranks
from torch import Tensor

from moerl.contract.parallel import ParallelDims
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import EngineError, WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.models.description import ModelDescription, describe
from moerl.rollout.weight_difference import weight_difference
from moerl.telemetry.metrics import check_metrics
from moerl.weights.manifest import model_manifest
from moerl.weights.plan import PlanOptions, SyncPlan, choose_senders, make_plan


def tiny_sizes(**changes: Any) -> ModelDescription:
    from families import FAMILIES

    return describe(FAMILIES["deepseek_v3"].config(num_hidden_layers=2, **changes).to_dict(), "tiny")


def tiny_plan(dims: ParallelDims, *, senders: int = 1, bucket_bytes: int = 1 << 14) -> SyncPlan:
    return make_plan(model_manifest(tiny_sizes(), dims), PlanOptions(choose_senders(dims, senders), 4, bucket_bytes))


def random_shards(plan: SyncPlan, rank: int, seed: int = 0) -> dict[str, Tensor]:
    """Replicated ones alike on all ranks of a stage."""
    generator = torch.Generator().manual_seed(seed + rank // plan.manifest.dims.ranks_per_stage)
    return {name: torch.randn(shape, generator=generator) for name, shape in plan.manifest.shard_shapes(rank).items()}


def publish_in(rank: int, plan: SyncPlan, shards: Mapping[str, Tensor], sink: Any, *, verify: bool = True) -> Any:
    publisher = weight_sync.publisher_of(plan, rank, sink)
    return weight_sync.publish_checked(publisher, shards, weight_sync.update_of(plan, 7), sink, verify=verify)


class Held(weight_sync.KeepingSink):
    """An engine that can say what it holds; `harm` happens to it when it takes a version into use."""

    def __init__(self, harm: Any = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.harm, self.dtype = harm, dtype
        self.distrusted = ""

    def end_update(self) -> None:
        super().end_update()
        self.tensors = {name: tensor.to(self.dtype) for name, tensor in self.tensors.items()}
        if self.harm is not None:
            self.harm(self.tensors)

    def held_dtypes(self) -> Mapping[str, str]:
        return dict.fromkeys(tiny_plan(ParallelDims()).tensors(), str(self.dtype).removeprefix("torch."))

    def verify(self, sent: Mapping[str, int]) -> None:
        error = weight_difference("held", sent, checksums(self.tensors.items()))
        if error is not None:
            self.distrusted = str(error)
            raise error


# --- one process -----------------------------------------------------------------------------------------------------


def alone(layout: Any, case: str) -> Any:
    """Cases of one rank; run in a process that has a process group."""
    plan = tiny_plan(ParallelDims())
    return globals()[case](plan, random_shards(plan, 0))


@pytest.fixture
def run_alone(one_process: Ranks) -> Callable[[Any], Any]:
    return lambda case: one_process.run(alone, case.__name__)[0]


def order_of_calls(plan: SyncPlan, shards: dict[str, Tensor]) -> Any:
    sink = weight_sync.KeepingSink()
    report = publish_in(0, plan, shards, sink)
    assert report.checksums == dict.fromkeys(sink.tensors)
    return sink.calls, report, len(plan.buckets), len(sink.tensors), sum(t.nbytes for t in sink.tensors.values())


def test_a_sink_is_begun_gets_every_bucket_and_is_ended(run_alone: Callable[[Any], Any]):
    calls, report, num_buckets, num_tensors, num_bytes = run_alone(order_of_calls)
    assert calls == ["begin 7", *["bucket"] * num_buckets, "end"]
    assert num_buckets > 3
    assert (len(report.checksums), report.num_bytes) == (num_tensors, num_bytes)
    assert report.received_bytes == report.needed_bytes == 0
    check_metrics(report.metrics())
    assert report.metrics()["weights/bytes"] == num_bytes


def overlap(plan: SyncPlan, shards: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """How many buckets were gathered when the sink began to take one, and the memory of the slots it saw."""
    from moerl.weights.gather import SenderGather

    asked: list[int] = []
    both = threading.Event()

    class Counting(SenderGather):
        def gather(self, shards: Mapping[str, Tensor], take_slot: Any) -> Iterator[Any]:
            def take(num_bytes: int) -> Tensor:
                slot = take_slot(num_bytes)
                asked.append(slot.untyped_storage().data_ptr())
                if len(asked) == 2:
                    both.set()
                return slot

            return super().gather(shards, take)

    seen: list[int] = []

    class Slow(weight_sync.KeepingSink):
        def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
            # The second bucket is gathered while the first is being taken, or this waits for ever.
            assert both.wait(60)
            seen.append(len(asked))
            super().receive(tensors)

    weight_sync.publisher_of(plan, 0, Slow(), Counting).publish(shards, weight_sync.update_of(plan, 0))
    return seen, asked


def test_the_next_bucket_is_gathered_while_one_is_taken_and_never_more(run_alone: Callable[[Any], Any]):
    seen, slots = run_alone(overlap)
    assert all(gathered <= taken + 2 for taken, gathered in enumerate(seen))
    assert len(set(slots[-4:])) == 2


def infinite(plan: SyncPlan, shards: dict[str, Tensor]) -> Any:
    shards["decoder.layers.1.mlp.experts.3.linear_fc2.weight"][2, 3] = float("nan")
    return outcome(plan, shards, weight_sync.KeepingSink())


def outcome(plan: SyncPlan, shards: dict[str, Tensor], sink: Any) -> tuple[str, list[str]]:
    with pytest.raises(WeightSyncError) as error:
        publish_in(0, plan, shards, sink)
    return str(error.value), sink.calls


def test_weights_that_are_not_finite_are_not_taken_into_use(run_alone: Callable[[Any], Any]):
    message, calls = run_alone(infinite)
    assert "'model.layers.1.mlp.experts.3.down_proj.weight' holds values that are not finite" in message
    assert "end" not in calls


def misshapen(plan: SyncPlan, shards: dict[str, Tensor]) -> Any:
    shards["output_layer.weight"] = shards["output_layer.weight"][:-1]
    return outcome(plan, shards, weight_sync.KeepingSink())


def missing(plan: SyncPlan, shards: dict[str, Tensor]) -> Any:
    del shards["output_layer.weight"]
    return outcome(plan, shards, weight_sync.KeepingSink())


def of_other_dtype(plan: SyncPlan, shards: dict[str, Tensor]) -> Any:
    shards["output_layer.weight"] = shards["output_layer.weight"].bfloat16()
    return outcome(plan, shards, weight_sync.KeepingSink())


@pytest.mark.parametrize("case", [misshapen, missing, of_other_dtype])
def test_weights_that_are_not_as_planned_are_not_sent(case: Any, run_alone: Callable[[Any], Any]):
    message, calls = run_alone(case)
    assert "output_layer.weight" in message
    assert calls == []


def flip_a_bit(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"].view(torch.int32)[5] ^= 1


def swap_experts(tensors: dict[str, Tensor]) -> None:
    a, b = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (3, 4))
    tensors[a], tensors[b] = tensors[b], tensors[a]


def lose_one(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def harmed(plan: SyncPlan, shards: dict[str, Tensor]) -> list[Any]:
    found = []
    for harm in (flip_a_bit, swap_experts, lose_one):
        sink = Held(harm)
        found.append((*outcome(plan, shards, sink), sink.distrusted))
        unchecked = Held(harm)
        publish_in(0, plan, shards, unchecked, verify=False)
        assert not unchecked.distrusted
    return found


def test_an_engine_that_holds_something_else_is_named_with_the_tensor_and_distrusted(run_alone: Callable[[Any], Any]):
    names = ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "lm_head.weight")
    for (message, calls, reason), name in zip(run_alone(harmed), names, strict=True):
        assert f"'{name}'" in message
        assert name in reason
        assert calls[-1] == "end"


def cast(plan: SyncPlan, shards: dict[str, Tensor]) -> str:
    sink = Held(dtype=torch.bfloat16)
    publish_in(0, plan, shards, sink)
    return sink.distrusted


def test_an_engine_of_another_precision_is_compared_in_its_own(run_alone: Callable[[Any], Any]):
    assert run_alone(cast) == ""


# --- several processes -----------------------------------------------------------------------------------------------


def failing(layout: Any) -> list[str]:
    """Returns the errors of this rank if the sink of rank 0 refuses, at every stage; then publishes a whole update."""
    told, rank = [], layout.rank
    plan = tiny_plan(ParallelDims(pipeline=2))
    shards = random_shards(plan, rank)

    class Refusing(weight_sync.KeepingSink):
        def begin_update(self, update: WeightUpdate) -> None:
            super().begin_update(update)
            if self.at == "begin":
                raise OSError("no room")

        def end_update(self) -> None:
            super().end_update()
            if self.at == "end":
                raise WeightSyncError("not whole")

    for at in ("begin", "model.layers.1.mlp.gate.weight", "end"):
        sink = Refusing(WeightSyncError("refused"), at) if rank == 0 else None
        with pytest.raises(WeightSyncError) as error:
            publish_in(rank, plan, shards, sink)
        told.append(str(error.value))
    sink = weight_sync.KeepingSink() if rank == 0 else None
    publish_in(rank, plan, shards, sink)
    return told


def test_a_sink_that_refuses_is_known_on_every_rank_and_nobody_waits(two_processes: Ranks):
    main, other = two_processes.run(failing)
    expected = (
        ("begin", r"failed in begin_update\(\d+\); seen: OSError: no room"),
        (r"bucket \d+ of senders", "failed in bucket [1-9].* of rank 0 .*; seen: WeightSyncError: refused"),
        ("end", "failed in end_update; seen: WeightSyncError: not whole"),
    )
    for ours, theirs, (step, text) in zip(main, other, expected, strict=True):
        assert re.search(f"the sink of rank 0 {text}", ours)
        assert re.search(f"{step} failed on other ranks; seen: ranks \\[0\\]; rank 0: .*{text}", theirs)


def disagreeing(layout: Any) -> str:
    rank = layout.rank
    plan = tiny_plan(ParallelDims(tensor=2))
    shards = random_shards(plan, rank)
    if rank == 1:
        shards["surplus"] = torch.zeros(1)
    sink = weight_sync.KeepingSink() if rank == 0 else None
    with pytest.raises(WeightSyncError) as error:
        publish_in(rank, plan, shards, sink)
    assert sink is None or "bucket" not in sink.calls
    return str(error.value)


def test_one_rank_with_other_weights_stops_all_before_anything_is_sent(two_processes: Ranks):
    main, other = two_processes.run(disagreeing)
    assert "ranks [1]" in main
    assert "unknown surplus" in other


# --- the embedded engine ---------------------------------------------------------------------------------------------


def engine_of(path: Path, kind: Any = None, **changes: Any) -> Any:
    """changes: of the model's configuration; its weights are then random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from moerl.rollout.embedded import EmbeddedEngine

    model = AutoModelForCausalLM.from_pretrained(path)
    if changes:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, **changes))
    return (kind or EmbeddedEngine)(model, tiny_moe.SPEC, engine_id="e", max_running=1)


def harm_an_engine(layout: Any, path: Path) -> list[str]:
    from moerl.rollout.embedded import EmbeddedEngine

    class Harmed(EmbeddedEngine):
        """Fault injection: memory changes in the engine."""

        harmed = True

        def end_update(self) -> None:
            super().end_update()
            if self.harmed:
                with torch.no_grad():
                    self._model.state_dict()["model.layers.2.mlp.experts.down_proj"][5, 7, 11] += 1e-6

    class BadLink(EmbeddedEngine):
        """Fault injection: one bit of a bucket arrives as another one."""

        harmed = True

        def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
            arrived = {name: tensor.clone() for name, tensor in tensors}
            if self.harmed and DAMAGED in arrived:
                arrived[DAMAGED].view(torch.int32)[7, 11] ^= 1 << 3
            super().receive(arrived.items())

    trainer = tiny_moe.build(layout, path, optimizer=None)
    plan = weight_sync.plan_for(trainer, path)
    found = []
    for kind in (Harmed, BadLink):
        engine = engine_of(path, kind)
        publisher = weight_sync.publisher_of(plan, layout.rank, engine)
        with pytest.raises(WeightSyncError) as error:
            weight_sync.publish_checked(publisher, trainer.shards(), weight_sync.update_of(plan, 3), engine)
        assert engine.handshake().policy_version == -1
        with pytest.raises(EngineError, match=r"experts\.5\.down_proj"):
            engine.generate([])
        engine.harmed = False
        weight_sync.publish_checked(publisher, trainer.shards(), weight_sync.update_of(plan, 3), engine)
        assert engine.handshake().policy_version == 3
        assert list(engine.generate([])) == []
        found.append(str(error.value))
    return found


DAMAGED = "model.layers.2.mlp.experts.5.down_proj.weight"


def test_an_embedded_engine_that_holds_something_else_serves_nothing_until_a_whole_update(
    untied: Path, one_process: Ranks
):
    (messages,) = one_process.run(harm_an_engine, untied)
    for message in messages:
        assert f"does not hold what was sent: '{DAMAGED}'" in message
        assert "1 of" in message


def sync_other_shapes(layout: Any, path: Path) -> tuple[str, int]:
    trainer = tiny_moe.build(layout, path, optimizer=None)
    engine = engine_of(path, moe_intermediate_size=24)
    with pytest.raises(WeightSyncError) as error:
        weight_sync.publish(trainer, weight_sync.plan_for(trainer, path), engine, 3)
    return str(error.value), engine.handshake().policy_version


def test_an_engine_of_other_shapes_takes_nothing_and_names_them(untied: Path, one_process: Ranks):
    ((message, version),) = one_process.run(sync_other_shapes, untied)
    assert "the sink of rank 0 failed in begin_update" in message
    assert "model.layers.0.mlp.experts.0.down_proj.weight' has shape (" in message
    assert version == -1


def sync_twice(layout: Any, path: Path) -> list[bool]:
    """Two updates in a row with the same weights, and a third one with others."""
    from moerl.rollout.weight_staging import held_tensors

    trainer = tiny_moe.build(layout, path, optimizer=None)
    plan, engine = weight_sync.plan_for(trainer, path), engine_of(path)
    publisher = weight_sync.publisher_of(plan, layout.rank, engine)
    held, reports = [], []
    for version, factor in ((0, 1.0), (1, 1.0), (2, 2.0)):
        shards = {name: tensor * factor for name, tensor in trainer.shards().items()}
        reports.append(weight_sync.publish_checked(publisher, shards, weight_sync.update_of(plan, version), engine))
        assert engine.handshake().policy_version == version
        held.append({name: tensor.clone() for name, tensor in held_tensors(engine._model, engine._dtypes)})
    assert len({(len(report.checksums), report.num_bytes, report.received_bytes) for report in reports}) == 1
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in ((held[0], held[1]), (held[1], held[2]))]
    doubled = all(torch.equal(2 * held[1][name], held[2][name]) for name in held[1])
    return [*same, doubled]


def test_updates_in_a_row_each_bring_a_version_also_with_the_same_weights(untied: Path, one_process: Ranks):
    assert one_process.run(sync_twice, untied) == [[True, False, True]]
