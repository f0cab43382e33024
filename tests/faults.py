"""Fault injection: what goes wrong in a run on purpose. Called in the process of the run before it begins.

Places are named ``package.module:Class.method``.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np


def kill(place: str, *, call: int = 1, after: bool = False) -> None:
    """SIGKILL to this process at the `call`-th call of `place`: before it runs, or after it returned."""
    calls = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < call:
                return original(*args, **kwargs)
            if after:
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return counted

    _patch(place, wrap)


def shift_routing(*, step: int) -> None:
    """From RL step `step` on (counted from 1), what the trainer gets is routed by the row before."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(original)
        def packed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            ranks = original(*args, **kwargs)
            if calls < step:
                return ranks
            return [[replace(b, expert_ids=np.roll(b.expert_ids, 1, axis=0)) for b in rank] for rank in ranks]

        return packed

    _patch("moerl.orchestration.rl:pack_for_ranks", wrap)


def flip_bit_of_frame() -> None:
    """One bit of the frame that carries the batch to the trainer is wrong."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def decode(frame: bytes, **kwargs: Any) -> Any:
            wrong = bytearray(frame)
            wrong[len(wrong) // 2] ^= 1
            return original(bytes(wrong), **kwargs)

        return decode

    _patch("moerl.orchestration.rl:decode_samples", wrap)


def break_records(*, every: int, only_run: str = "") -> None:
    """Every `every`-th answer of the engine claims a probability above 1; `only_run`: start of its rollout id."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(self: Any, requests: Any) -> Iterator[Any]:
            records = (record for record in original(self, requests))
            for number, record in enumerate(records):
                if number % every == 0 and record.rollout_id.startswith(only_run):
                    logprobs = record.values["rollout_logprobs"].copy()
                    logprobs[-1] = 0.5
                    record = replace(record, values={**record.values, "rollout_logprobs": logprobs})
                yield record

        return generate

    _patch("moerl.rollout.embedded:EmbeddedEngine.generate", wrap)


def _patch(place: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrap(getattr(owner, name)))
