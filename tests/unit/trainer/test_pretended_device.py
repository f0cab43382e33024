"""The pretended device refuses what a GPU would refuse, and counts what makes the host wait. In a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


def refusals(layout: Any) -> dict[str, str]:
    from pretended_device import DEVICE, MixedDevicesError, pretended_device

    with pretended_device():
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        calls = {
            "sum": lambda: here + there,
            "view": lambda: there[1:] * here[1:],
            "into": lambda: there.add_(here),
            "product": lambda: there @ torch.as_tensor([1.0, 2.0, 3.0]),
            "row": lambda: there.index_put((torch.zeros(1, dtype=torch.int64, device=DEVICE),), here[:1]),
            "indexed": lambda: here[torch.zeros(1, dtype=torch.int64, device=DEVICE)],
            "numpy": lambda: there.numpy(),
            "array": lambda: there.detach().__array__(),
            "collective": lambda: dist.all_reduce(here),
        }
        found = {}
        for name, call in calls.items():
            with pytest.raises(MixedDevicesError) as caught:
                call()
            found[name] = str(caught.value)
    return found


def test_what_mixes_host_and_device_is_refused(one_process: Ranks) -> None:
    (found,) = one_process.run(refusals)
    assert found["sum"] == "aten.add.Tensor of (3,) on the host, (3,) on the device"
    assert found["numpy"] == "numpy() of a tensor (3,) on the device"
    assert found["collective"] == "c10d.allreduce_.default of tensors on the host in a group of the device"


def allowed(layout: Any) -> list[str]:
    from pretended_device import DEVICE, HOST, pretended_device

    original = torch.Tensor.device
    with pretended_device() as seen:
        there = torch.arange(3.0, device=DEVICE)
        leaf = there.clone().requires_grad_()
        made = {
            "scalar": there * torch.tensor(2.0),
            "like": torch.zeros_like(there),
            "new": there.new_zeros(2),
            "view": there[1:].view(2, 1),
            "dtype": there.to(torch.float64),
            "same": there.to(DEVICE),
            "other": torch.ones(1).to(there),
            "gradient": torch.autograd.grad(leaf[:2].double()[torch.ones_like(leaf[:2]) > 0].sum(), leaf)[0],
        }
        wrong = [name for name, each in made.items() if each.device != DEVICE]
        host = (there.cpu(), there.to("cpu"), torch.ones(2), torch.from_numpy(there.cpu().numpy()))
        wrong += [f"host {index}" for index, each in enumerate(host) if each.device != HOST]
        assert made["same"].data_ptr() == there.data_ptr()
        assert there.cpu().data_ptr() != there.data_ptr()
        dist.all_reduce(there)
        group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        assert seen.num_operations > 0
    assert torch.Tensor.device is original
    return wrong


def test_what_is_made_of_tensors_on_the_device_is_there_and_copies_are_on_the_host(one_process: Ranks) -> None:
    assert one_process.run(allowed) == [[]]


def waits(layout: Any) -> dict[str, list[str]]:
    from pretended_device import DEVICE, pretended_device

    with pretended_device() as seen:
        x, mask = torch.arange(4.0, device=DEVICE), torch.ones(4, dtype=torch.bool, device=DEVICE)
        here, pinned = torch.ones(4), torch.ones(4).pin_memory()
        counts = torch.ones(4, dtype=torch.int64, device=DEVICE)
        calls = {
            "item": lambda: x[0].item(),
            "if": lambda: bool((x > 0).any()),
            "tolist": lambda: x.tolist(),
            "cpu": lambda: x.cpu(),
            "to the host, not waited for": lambda: x.to("cpu", non_blocking=True),
            "to the device": lambda: here.to(DEVICE),
            "pageable": lambda: here.to(DEVICE, non_blocking=True),
            "pinned, waited for": lambda: pinned.to(DEVICE),
            "pinned": lambda: pinned.to(DEVICE, non_blocking=True),
            "pinned by its factory": lambda: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
            "copy_": lambda: x.copy_(here),
            "a list": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
            "nonzero": lambda: mask.nonzero(),
            "unique": lambda: x.unique(),
            "mask": lambda: x[mask],
            "mask filled": lambda: x.__setitem__(mask, 0.0),
            "mask set": lambda: x.__setitem__(mask, x.clone()),
            "list as index": lambda: x[[0, 1]],
            "index": lambda: x[counts],
            "repeated": lambda: torch.repeat_interleave(counts),
            "repeated to a size": lambda: torch.repeat_interleave(counts, output_size=4),
            "stream": lambda: torch.cuda.current_stream().synchronize(),
            "on the host": lambda: here.nonzero().tolist(),
        }
        found = {}
        for name, call in calls.items():
            seen.clear()
            call()
            found[name] = [each.kind for each in seen.synchronisations]
            assert all(each.module == __name__ for each in seen.synchronisations)
            assert len(seen.of(__name__)) == len(seen.synchronisations)
    return found


def test_every_wait_for_the_device_is_counted_once_at_its_caller(one_process: Ranks) -> None:
    (found,) = one_process.run(waits)
    assert found == {
        "item": ["aten._local_scalar_dense"],
        "if": ["aten._local_scalar_dense"],
        "tolist": ["tolist"],
        "cpu": ["copy to the host"],
        "to the host, not waited for": [],
        "to the device": ["copy to the device"],
        "pageable": ["copy to the device"],
        "pinned, waited for": ["copy to the device"],
        "pinned": [],
        "pinned by its factory": [],
        "copy_": ["copy to the device"],
        "a list": ["copy to the device"],
        "nonzero": ["aten.nonzero"],
        "unique": ["aten._unique2"],
        "mask": ["boolean index"],
        "mask filled": [],
        "mask set": ["boolean index"],
        "list as index": ["index on the host"],
        "index": [],
        "repeated": ["repeat_interleave without output_size"],
        "repeated to a size": [],
        "stream": ["synchronize of a stream or event"],
        "on the host": [],
    }
