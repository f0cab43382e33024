"""Process groups: the coordinates that every process works out are those that Megatron gives its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.errors import ConfigError
from moerl.trainer import groups


def coordinates(layout: Any) -> RankCoordinates:
    """`groups.start` has compared them with Megatron's."""
    return layout


def refused(layout: Any) -> str:
    """Returns a rank's refusal of the coordinates of the next rank."""
    wrong = RankCoordinates(layout.dims, (layout.rank + 1) % layout.dims.world_size)
    with pytest.raises(ConfigError) as caught:
        groups._check_numbering(wrong)
    return str(caught.value)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "expert": 2}, {"pipeline": 2, "context": 2}, {"expert": 2, "expert_tensor": 2}], ids=str
)
def test_ranks_start_in_every_order_of_axes(sizes: dict[str, int], four_processes: Ranks):
    found = four_processes.run(coordinates, **sizes)
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert {each.dims for each in found} == {ParallelDims(**sizes, data=found[0].dims.data)}


def test_a_rank_that_megatron_numbers_otherwise_is_refused(four_processes: Ranks):
    for message in four_processes.run(refused, tensor=2):
        assert "Megatron numbers rank" in message


def gloo_threads(layout: Any) -> int:
    """Returns how many threads wait for the sockets of gloo devices, once every group has sent something."""
    for group in (None, groups.tensor_group(), groups.data_and_context_group()):
        dist.barrier(group)
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def test_all_groups_of_a_rank_share_one_gloo_device(two_processes: Ranks):
    assert two_processes.run(gloo_threads, tensor=2) == [1, 1]
