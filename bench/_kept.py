"""Kept sets of a realistic and of a flat distribution of sizes, for the benchmarks of scoring and ingest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import KeptSets

NUM_VOCAB = 151_936


def realistic_sizes(rng: np.random.Generator, num_rows: int) -> NDArray[np.int64]:
    """46% singletons, the rest log-normal: mean 8, median 2, 99th percentile 82; what nucleus sampling keeps."""
    rest = 1 + np.ceil(rng.lognormal(1.777, 1.255, num_rows)).astype(np.int64)
    return np.where(rng.random(num_rows) < 0.46, 1, rest)


def flat_sizes(rng: np.random.Generator, num_rows: int) -> NDArray[np.int64]:
    """Uniform from 1 to 999: mean 500; a model that is unsure of every token."""
    return rng.integers(1, 1000, num_rows)


SIZES: dict[str, Callable[[np.random.Generator, int], NDArray[np.int64]]] = {
    "realistic": realistic_sizes,
    "flat": flat_sizes,
}


@dataclass(frozen=True, slots=True)
class KeptCase:
    """Kept sets of T rows and a target of each, int64 [T]."""

    kept: KeptSets
    target_ids_T: NDArray[np.int64]

    @classmethod
    def draw(
        cls, sizes: str, num_rows: int, seed: int = 0, num_vocab: int = NUM_VOCAB, num_common: int = 0
    ) -> KeptCase:
        """Draws ids uniformly from the vocabulary, which is the hardest case for reading few rows of the head.

        Args:
            num_common: so many ids are common, as articles and commas are: half of each set is of them, if that many.
        """
        rng = np.random.default_rng(seed)
        sizes_T = np.minimum(SIZES[sizes](rng, num_rows), num_vocab - num_common)
        drawn = [_ids(rng, size, num_vocab, min(size // 2, num_common), num_common) for size in sizes_T.tolist()]
        offsets = np.concatenate([[0], np.cumsum(sizes_T)]).astype(np.int64)
        ids = np.concatenate([np.sort(each) for each in drawn]).astype(np.int32)
        return cls(KeptSets(offsets, ids), np.array([each[0] for each in drawn], np.int64))

    @property
    def summary(self) -> str:
        """Mean, median and 99th percentile of the sizes, and the share of singletons."""
        sizes = self.kept.sizes
        return (
            f"mean {sizes.mean():.1f}, median {np.median(sizes):.0f}, p99 {np.percentile(sizes, 99):.0f}, "
            f"{(sizes == 1).mean():.0%} singletons"
        )


def _ids(rng: np.random.Generator, size: int, num_vocab: int, chosen_common: int, num_common: int) -> NDArray[np.int64]:
    """Different ids, those among the first `num_common` before the others."""
    others = num_common + rng.choice(num_vocab - num_common, size - chosen_common, replace=False)
    return np.concatenate([rng.choice(num_common, chosen_common, replace=False), others]) if chosen_common else others
