"""Plans of weight updates: every byte once, buckets within their limits, senders evenly loaded; nothing is started."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from families import FAMILIES
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.contract.parallel import ParallelDims
from moerl.errors import ConfigError
from moerl.machine.layouts import layout_problems
from moerl.models.description import ModelDescription, describe
from moerl.rollout.weight_staging import checkpoint_views
from moerl.weights.estimate import sent_bytes
from moerl.weights.manifest import model_manifest
from moerl.weights.plan import PlanOptions, SyncPlan, choose_senders, make_plan
from moerl.weights.tensors import Split

LAYOUTS = {
    "one": ParallelDims(),
    "TP2": ParallelDims(tensor=2),
    "PP2": ParallelDims(pipeline=2),
    "EP2": ParallelDims(expert=2, data=2),
    "TP2-EP2": ParallelDims(tensor=2, expert=2),
    "ETP2": ParallelDims(tensor=2, expert_tensor=2),
    "PP2-VPP2": ParallelDims(pipeline=2, virtual_pipeline=2),
    "TP2-PP2-EP2": ParallelDims(tensor=2, pipeline=2, expert=2),
    "TP2-PP2-EP2-DP2": ParallelDims(tensor=2, pipeline=2, expert=2, data=2),
    "CP2-EP2": ParallelDims(context=2, expert=2),
}


def sizes_of(family: str, **changes: Any) -> ModelDescription:
    return describe(FAMILIES[family].config(**changes).to_dict(), family)


def plan_of(
    sizes: ModelDescription,
    dims: ParallelDims,
    *,
    senders: int = 1,
    bucket_bytes: int = 1 << 14,
    split_latents: bool = False,
    **options: Any,
) -> SyncPlan:
    manifest = model_manifest(sizes, dims, split_latents=split_latents)
    return make_plan(manifest, PlanOptions(choose_senders(dims, senders), 2, bucket_bytes, **options))


def entries(plan: SyncPlan) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for bucket in plan.buckets for entry in bucket.entries}


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_sends_the_tensors_that_transformers_has(family: str, tied: bool):
    import torch
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family].config(tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {}
    for name, tensor in model.state_dict().items():
        expected |= {key: tuple(view.shape) for key, view in checkpoint_views(name, tensor).items()}
    if tied:
        expected.pop("lm_head.weight")
    for dims in (ParallelDims(), ParallelDims(pipeline=2)):
        assert entries(plan_of(sizes_of(family, tie_word_embeddings=tied), dims)) == expected


def coverage(plan: SyncPlan) -> dict[str, np.ndarray]:
    """How often each element of each tensor is sent."""
    counts = {
        name: np.zeros((shape[0], shape[1] if len(shape) > 1 else 1), int) for name, shape in entries(plan).items()
    }
    for bucket in plan.buckets:
        names = {entry.name for entry in bucket.entries}
        for message in bucket.messages:
            shapes = plan.manifest.shard_shapes(message.source)
            for piece in message.pieces:
                assert piece.target in names
                rows, columns = (*shapes[piece.source], 1)[:2]
                assert 0 <= piece.source_row <= piece.source_row + piece.num_rows <= rows
                assert piece.num_columns == columns
                place = counts[piece.target][
                    piece.target_row : piece.target_row + piece.num_rows,
                    piece.target_column : piece.target_column + piece.num_columns,
                ]
                assert place.shape == (piece.num_rows, piece.num_columns)
                place += 1
    return counts


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelDescription, ParallelDims]:
    """A tiny model of some family, and a layout that Megatron can run it in."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    sizes = sizes_of(
        family,
        num_hidden_layers=draw(st.integers(2, 5)),
        vocab_size=draw(st.integers(5, 40)),
        tie_word_embeddings=draw(st.booleans()),
    )
    powers = itertools.product(range(3), range(3), range(3), range(2), range(3), range(3), range(3))
    every = [ParallelDims(*(1 << power for power in each)) for each in powers]
    return sizes, draw(st.sampled_from([dims for dims in every if not layout_problems(dims, sizes)]))


@settings(max_examples=30, deadline=None)
@given(
    layout=layouts(),
    bucket_bytes=st.integers(1, 1 << 18),
    share=st.floats(0, 1),
    gather=st.sampled_from(["sender", "allgather"]),
    split=st.booleans(),
)
def test_every_byte_of_every_tensor_is_sent_once_in_buckets_within_their_limit(
    layout: tuple[ModelDescription, ParallelDims], bucket_bytes: int, share: float, gather: Any, split: bool
):
    sizes, dims = layout
    senders = 1 + round(share * (dims.world_size - 1))
    plan = plan_of(sizes, dims, senders=senders, bucket_bytes=bucket_bytes, gather=gather, split_latents=split)
    names = [entry.name for bucket in plan.buckets for entry in bucket.entries]
    assert len(names) == len(set(names))
    for name, counts in coverage(plan).items():
        assert (counts == 1).all(), name
    for bucket in plan.buckets:
        check_bucket(plan, bucket)
    check_senders(plan)


def check_bucket(plan: SyncPlan, bucket: Any) -> None:
    options = plan.options
    assert bucket.num_bytes <= options.payload_bytes or len(bucket.entries) == 1
    offset = 0
    for entry in bucket.entries:
        item_bytes = 4 if entry.element == "float32" else options.item_bytes
        assert entry.num_bytes == item_bytes * int(np.prod(entry.shape))
        assert entry.offset == offset
        assert entry.offset % item_bytes == 0
        offset += entry.num_bytes
    # No element lies across a multiple of its size, however odd the tensors before it are.
    elements = [entry.element for entry in bucket.entries]
    assert options.item_bytes == 4 or elements == sorted(elements, key=lambda element: element != "float32")
    assert bucket.num_bytes == offset == sum(message.num_bytes for message in bucket.messages)
    stage = bucket.stage
    per_stage = plan.manifest.dims.ranks_per_stage
    for message in bucket.messages:
        assert message.source // per_stage == stage
        chunks = list(message.chunks(options.chunk_bytes))
        assert tuple(piece for chunk in chunks for piece in chunk) == message.pieces
        for chunk in chunks:
            size = sum(piece.num_bytes for piece in chunk)
            assert size <= options.chunk_bytes or (len(chunk) == 1 and chunk[0].num_rows == 1)
    assert bucket.kind == ("expert" if ".mlp.experts." in bucket.entries[0].name else "dense")


def check_senders(plan: SyncPlan) -> None:
    """Parts of senders differ by a tensor of each kind at either end at most; buckets are counted without gaps."""
    loads: Counter[int] = Counter(dict.fromkeys(plan.options.senders, 0))
    largest: dict[str, int] = defaultdict(int)
    numbers: dict[int, list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        loads[bucket.sender] += bucket.num_bytes
        numbers[bucket.sender].append(bucket.number)
        largest[bucket.kind] = max(largest[bucket.kind], *(entry.num_bytes for entry in bucket.entries))
    assert loads.keys() == set(plan.options.senders)
    assert max(loads.values()) - min(loads.values()) <= 2 * sum(largest.values())
    assert all(found == list(range(len(found))) for found in numbers.values())


# --- who sends it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sender_receives_nothing_that_it_holds(layout: str):
    plan = plan_of(sizes_of("deepseek_v3"), LAYOUTS[layout], split_latents=True)
    held = plan.manifest.shard_shapes(0)
    for bucket in plan.buckets:
        for message in bucket.messages:
            if message.source == bucket.sender:
                continue
            for piece in message.pieces:
                # Held by the sender, too, is only another shard of the same tensor.
                if piece.source in held:
                    published = next(each for each in plan.manifest.tensors if each.tensor.name == piece.source)
                    assert published.tensor.split is not Split.WHOLE
                    assert published.ways > 1


def test_replicas_share_the_sending():
    plan = plan_of(sizes_of("qwen3_moe"), ParallelDims(pipeline=2, data=4), bucket_bytes=1 << 15)
    sent = sent_bytes(plan)
    assert set(sent) == {4, 5, 6, 7}
    assert max(sent.values()) < 1.5 * min(sent.values())


@pytest.mark.parametrize(
    ("dims", "count", "expected"),
    [
        (ParallelDims(), 1, (0,)),
        (ParallelDims(tensor=2, pipeline=2, expert=2), 1, (0,)),
        (ParallelDims(tensor=2, pipeline=2, expert=2), 2, (0, 2)),
        (ParallelDims(pipeline=4), 2, (0, 2)),
        (ParallelDims(pipeline=2, expert=2, data=4), 4, (0, 1, 4, 5)),
        (ParallelDims(pipeline=2, expert=4, data=4), 4, (0, 2, 4, 6)),
        (ParallelDims(pipeline=2, expert=2, data=4), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_senders_stand_in_different_stages_first_and_then_with_different_experts(
    dims: ParallelDims, count: int, expected: tuple[int, ...]
):
    assert choose_senders(dims, count) == expected


@pytest.mark.parametrize("count", [0, 3])
def test_there_are_no_more_senders_than_ranks(count: int):
    with pytest.raises(ConfigError, match=r"weights\.senders"):
        choose_senders(ParallelDims(tensor=2), count)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20))
def test_any_number_of_senders_is_that_many_ranks_in_order(pipeline: int, tensor: int, count: int):
    dims = ParallelDims(pipeline=pipeline, tensor=tensor)
    assume(count <= dims.world_size)
    senders = choose_senders(dims, count)
    assert len(set(senders)) == count
    assert list(senders) == sorted(senders)
    assert senders[-1] < dims.world_size
