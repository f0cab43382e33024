"""Vocabulary shards, in one process."""

from __future__ import annotations

import pytest

from moerl.errors import ContractError
from moerl.kernels.head import VocabShard


def test_padding_columns_count_as_no_token() -> None:
    assert VocabShard.from_group(5, 8, None).num_real_columns == 5
    shard = VocabShard.from_group(8, 8, None)
    assert shard.num_real_columns == shard.num_columns == 8


@pytest.mark.parametrize("bounds", [(4, 4, 8), (-1, 4, 8), (0, 4, 0)])
def test_a_shard_without_sensible_bounds_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ContractError, match="vocab_shard_bounds"):
        VocabShard(*bounds)


@pytest.mark.parametrize("bounds", [(4, 8, 8), (0, 4, 8)])
def test_part_of_a_vocabulary_without_a_group_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ContractError, match="vocab_shard_without_group"):
        VocabShard(*bounds)
