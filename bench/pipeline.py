"""From servers' answers to frames for the ranks: what one controller core feeds, in tokens a second, and the memory.

`python bench/pipeline.py [--json FILE]`. Trajectories of 48 MoE layers, top-8 of 128 experts, with kept sets of a
dozen ids on average: 200 of 32K tokens, and as many tokens in shorter ones. Everything that the controller does with
them: the body of an answer is read, checked against the contract, written to the journal in groups of eight, given
its advantages, packed for eight ranks, and cut into their frames. One thread; CPU time of the process, writing of
files included. The baseline of the memory is the data itself, as the arrays of the contract.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import zstandard
from _report import Result, command_line, json_argument, report
from wire import SPEC, sample_trajectory

from moerl.batching.packing import PackOptions
from moerl.batching.rows import Padding
from moerl.buffer.journal import FinishedGroup, Journal
from moerl.contract.array_codec import array_bytes, expert_planes, pack_kept_ids
from moerl.contract.batch import TrainSample
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.quarantine import Quarantine
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.orchestration.batches import pack_minibatch
from moerl.rollout.segments import trajectory_values
from moerl.rollout.sglang.answers import decode_compact, finish_reason, read_segment, version_spans
from moerl.rollout.sglang.client import answer_bounds, read_meta
from moerl.telemetry.spans import peak_rss_bytes

NUM_TOKENS = 200 * 32_768
GROUP_SIZE, NUM_DISTINCT, NUM_RANKS = 8, 2, 8
PER_SECOND, LINEAR, MEMORY = 50_000, 0.8, 3.0
SAMPLING = SamplingParams(top_p=0.95, top_k=512)
STAGES = ("answer", "check", "journal", "batch and frames")


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds: CPU time by stage. num_tokens: of all trajectories. data_bytes: of their arrays."""

    seconds: dict[str, float]
    num_tokens: int
    data_bytes: int

    @property
    def per_second(self) -> float:
        return self.num_tokens / sum(self.seconds.values())


class Stages:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def timed[T](self, stage: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        self.seconds[stage] += time.process_time() - start
        return result


def answer_body(trajectory: Trajectory) -> bytes:
    """The HTTP body by which a patched server answers with this trajectory."""
    first, last = int(trajectory.sampled.argmax()), len(trajectory.token_ids)
    offsets = trajectory.kept.offsets[first:]
    fields = {
        "schema": 1,
        "output_ids": bytes(array_bytes(trajectory.token_ids[first:])),
        "logprobs": bytes(array_bytes(trajectory.rollout_logprobs[first:] + trajectory.kept_logmass[first:])),
        "kept_logprobs": bytes(array_bytes(trajectory.rollout_logprobs[first:])),
        "kept_sizes": bytes(array_bytes(np.diff(offsets).astype(np.uint32))),
        "kept_ids": bytes(pack_kept_ids(offsets - offsets[0], trajectory.kept.ids)),
        "num_rows": last - 1,
        "expert_ids": b"".join(map(bytes, expert_planes(trajectory.expert_ids))),
    }
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(msgspec.msgpack.encode(fields))
    spans = [{"version": "3", "start": 0, "end": last - first}]
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "weight_versions": spans, "compact_answer": packed}
    return msgspec.msgpack.encode({"output_ids": [], "meta_info": meta})


def read_answer(body: bytes, request: RolloutRequest) -> RolloutRecord:
    """Reads an answer as the backend of SGLang servers does."""
    bounds = answer_bounds(request, 0, SPEC)
    meta = read_meta(body, bounds)
    answer = decode_compact(meta["compact_answer"], bounds.payload_bytes)
    segment = read_segment(request, answer, version_spans(meta), 0, SPEC)
    values = trajectory_values(request, [segment], finish_reason(meta), SPEC)
    values |= {"engine_id": "server", "attempt": 0, "timings": {}}
    return RolloutRecord(request.lineage.rollout_id, "server", 3, values)


def requests_for(trajectories: Sequence[Trajectory], count: int) -> Iterator[tuple[int, RolloutRequest]]:
    """Requests of groups, and which of the distinct answers each gets."""
    for number in range(count):
        which = number % len(trajectories)
        first = int(trajectories[which].sampled.argmax())
        group = f"group-{number // GROUP_SIZE}"
        lineage = Lineage(f"{group}/{number % GROUP_SIZE}", f"prompt-{number // GROUP_SIZE}", group)
        ids = tuple(trajectories[which].token_ids[:first].tolist())
        yield which, RolloutRequest(lineage, ids, SAMPLING, len(trajectories[which].token_ids) - first)


def measure(num_tokens: int, folder: Path) -> Measured:
    """`NUM_TOKENS` in trajectories of `num_tokens` tokens each."""
    rng, count = np.random.default_rng(num_tokens), NUM_TOKENS // num_tokens
    distinct = [sample_trajectory(rng, 1.0, num_tokens, num_tokens // 32) for _ in range(NUM_DISTINCT)]
    bodies = [answer_body(trajectory) for trajectory in distinct]
    asked = list(requests_for(distinct, count))
    quarantine = Quarantine(folder / "quarantine", 0.0, spec=SPEC)
    quarantine.expect([request.lineage.rollout_id for _, request in asked])
    journal, stages = Journal(folder / "journal", SPEC), Stages()
    samples: list[TrainSample] = []
    for start in range(0, count, GROUP_SIZE):
        group: list[Trajectory] = []
        for which, request in asked[start : start + GROUP_SIZE]:
            record = stages.timed("answer", lambda body=bodies[which], own=request: read_answer(body, own))
            trajectory = stages.timed("check", lambda answer=record: quarantine.admit(answer, trainer_version=3))
            assert trajectory is not None
            group.append(trajectory.with_rewards({"reward": 1.0}))
        finished = FinishedGroup(start // GROUP_SIZE, group)
        stages.timed("journal", lambda finished=finished: journal.append(finished))
        samples += [TrainSample(t, np.where(t.sampled, np.float32(0.5), np.float32(0.0))) for t in group]
    assert np.array_equal(samples[0].trajectory.expert_ids, distinct[0].expert_ids)
    journal.close()
    dims = ParallelDims(tensor=1, pipeline=1, virtual_pipeline=1, context=1, expert=8, expert_tensor=1, data=NUM_RANKS)
    ranks = [RankCoordinates(dims, rank) for rank in range(NUM_RANKS)]
    options = PackOptions(65_536, Padding.of(dims))
    stages.timed("batch and frames", lambda: pack_minibatch(samples, ranks, options, "reject"))
    arrays = sum(_num_bytes(sample.trajectory) for sample in samples)
    return Measured(stages.seconds, count * num_tokens, arrays)


def _num_bytes(trajectory: Trajectory) -> int:
    kept = trajectory.kept.offsets.nbytes + trajectory.kept.ids.nbytes
    per_token = (trajectory.token_ids, trajectory.rollout_logprobs, trajectory.kept_logmass, trajectory.policy_versions)
    return trajectory.expert_ids.nbytes + kept + sum(array.nbytes for array in per_token)


def results() -> list[Result]:
    found: list[Result] = [command_line()]
    measured: dict[int, Measured] = {}
    # The longest last: the peak of the process is its own.
    for num_tokens in (2_048, 8_192, 32_768):
        with tempfile.TemporaryDirectory() as folder:
            measured[num_tokens] = measure(num_tokens, Path(folder))
    longest = measured[32_768]
    for num_tokens, each in measured.items():
        name = f"{NUM_TOKENS // num_tokens} x {num_tokens // 1024}K tokens"
        holds = each.per_second >= PER_SECOND
        found.append(Result(f"{name}: tokens a CPU second", each.per_second, f">= {PER_SECOND}", holds, "token/s"))
    for stage, seconds in longest.seconds.items():
        found.append(
            Result(f"200 x 32K tokens: {stage}, tokens a CPU second", longest.num_tokens / seconds, unit="token/s")
        )
    linear = longest.per_second / measured[2_048].per_second
    found.append(Result("tokens a second, 32K over 2K", linear, f">= {LINEAR}", linear >= LINEAR, "ratio"))
    memory = peak_rss_bytes() / longest.data_bytes
    found.append(Result("the data, as arrays", longest.data_bytes / 2**30, unit="GiB"))
    found.append(Result("peak memory over the data", memory, f"<= {MEMORY:g}", memory <= MEMORY, "ratio"))
    return found


def main() -> None:
    json_path = json_argument(__doc__)
    # A run on one machine has loaded torch, too: without it the same code takes a tenth longer.
    torch.set_num_threads(1)
    report(results(), json_path)


if __name__ == "__main__":
    main()
