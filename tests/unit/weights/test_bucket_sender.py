"""A sender's thread towards its sink."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from full_updates import full
from waiting import eventually

from moerl.contract.weight_update import WeightUpdate
from moerl.weights.bucket import WeightBucket
from moerl.weights.bucket_sender import BucketSender, SinkThread
from moerl.weights.plan import Bucket, Entry


class SlowSink:
    """Takes a bucket once `go_on` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go_on = threading.Event()

    def begin_update(self, update: WeightUpdate) -> None:
        self.calls.append("begin")

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.calls.append("bucket")
        assert self.go_on.wait(20.0)

    def end_update(self) -> None:
        self.calls.append("end")

    def abandon_update(self) -> None:
        self.calls.append("abandon")


def bucket(number: int) -> WeightBucket:
    entry = Entry(f"t{number}", (2,), "parameter", 0, 8)
    plan = Bucket(number, 0, 0, "dense", (entry,), ())
    return WeightBucket(plan, torch.zeros(8, dtype=torch.uint8), torch.float32)


def test_buckets_that_wait_behind_one_in_the_sink_are_left_out_of_an_abandoned_update():
    sink = SlowSink()
    bucket_sender = BucketSender(sink, SinkThread("sink", 20.0), torch.device("cpu"), 8, None)
    assert bucket_sender.begin(full(0, {})) is None
    bucket_sender.send(bucket(0))
    bucket_sender.send(bucket(1))
    eventually(lambda: "bucket" in sink.calls)
    bucket_sender.abandon()
    sink.go_on.set()
    eventually(lambda: sink.calls[-1] == "abandon")
    assert sink.calls == ["begin", "bucket", "abandon"]
