"""Random states of a checkpoint, by the kind of device that wrote it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moerl.trainer import sharded_state


@pytest.mark.parametrize("wrote", ["gpu", "cpu"])
@pytest.mark.parametrize("reads", ["gpu", "cpu"])
def test_states_of_devices_come_back_only_on_the_kind_of_device_that_wrote_them(
    wrote: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: reads == "gpu")
    monkeypatch.setattr(torch.cuda, "set_rng_state", seen.append)
    monkeypatch.setattr(sharded_state, "_regions", lambda: SimpleNamespace(set_states=seen.append))
    device = torch.zeros(16, dtype=torch.uint8) if wrote == "gpu" else None
    regions = {"model-parallel-rng": torch.zeros(16 if wrote == "gpu" else 5056, dtype=torch.uint8)}
    before = torch.get_rng_state()
    torch.rand(1)
    sharded_state._set_random_state({"cpu": before, "device": device, "regions": regions})
    assert torch.equal(torch.get_rng_state(), before)
    expected = {("gpu", "gpu"): [device, regions], ("cpu", "cpu"): [regions]}
    assert seen == expected.get((wrote, reads), [])
