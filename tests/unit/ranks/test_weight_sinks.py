"""Sinks of sender ranks, which send in a thread of their own."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.contract.commands import Target
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.ranks import weights
from moerl.rollout.fleet.servers_sink import ServersSink
from moerl.rollout.server_kinds import SERVER_KINDS
from moerl.trainer import platform
from moerl.weights.bucket_sender import SinkThread


def test_channels_to_servers_use_the_gpu_of_the_rank_though_another_thread_opens_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread has the first GPU until it sets another one; only the rank's main thread has."""
    rank_thread, seen = threading.get_ident(), list[torch.device]()

    def device() -> torch.device:
        return torch.device("cuda", 1 if threading.get_ident() == rank_thread else 0)

    def open_channel(target: Target, device: torch.device) -> Any:
        seen.append(device)
        return AsyncMock()

    kinds = {name: replace(kind, open_channel=open_channel) for name, kind in SERVER_KINDS.items()}
    monkeypatch.setattr(platform, "device", device)
    monkeypatch.setattr(weights, "SERVER_KINDS", MappingProxyType(kinds))
    config = RankConfig.of(load_config(["recipe=tiny", "rollout=sglang"], command="train"))
    sink = weights._sink(config, 1, [0, 1], None, None)
    assert isinstance(sink, ServersSink)
    sink.targets = [Target(key="server", name="server", address={})]
    with closing(sink):
        SinkThread("sink", 60.0).call("begin", lambda: sink.begin_update(WeightUpdate(1, UpdateKind.FULL, {})))
    assert seen == [torch.device("cuda", 1)]
