"""Items that a step works on, as a pure function of seed and step: nothing to store, nothing to lose at resume.

Runs in the controller.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moerl.contract.routing import POSITION_PRIME, mix
from moerl.errors import ConfigError


def batch_indices(num_items: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Returns the items of one step, drawn without replacement within an epoch.

    An epoch is ``num_items // batch_size`` steps over a permutation of its own. No item appears twice in an
    epoch, so none twice in a batch; if `batch_size` does not divide `num_items`, the few last items of
    the permutation sit this epoch out.

    Args:
        num_items: Items to draw from.
        batch_size: Items per step, 1 to `num_items`.
        step: Step number, from 0.
        seed: Seed of the permutations, >= 0.

    Returns:
        `batch_size` different indices in ``[0, num_items)``.

    Raises:
        ConfigError: `batch_size` is out of range, or `step` is negative.
    """
    if not 1 <= batch_size <= num_items or step < 0:
        raise ConfigError(
            "a batch cannot be drawn without replacement",
            seen=f"{batch_size} of {num_items} items at step {step}",
            expected="1 <= batch size <= number of items, step >= 0",
            remedy="lower the batch size or add items",
        )
    epoch, step_in_epoch = divmod(step, num_items // batch_size)
    first = step_in_epoch * batch_size
    return epoch_permutation(num_items, epoch, seed)[first : first + batch_size].tolist()


@lru_cache(maxsize=4)
def epoch_permutation(num_items: int, epoch: int, seed: int) -> NDArray[np.int64]:
    """Returns the order of one epoch: int64 [num_items].

    Items are sorted by a hash of (seed, epoch, item). Unlike a generator's shuffle this does not change with
    the version of numpy, so a resumed run sees the same data.
    """
    salt = _hash(_hash(np.array([seed], np.uint64)) + np.uint64(epoch))
    keys = mix(salt + np.arange(num_items, dtype=np.uint64) * np.uint64(POSITION_PRIME))
    order = np.argsort(keys, kind="stable")
    # All callers get the same array.
    order.flags.writeable = False
    return order


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return mix(values * np.uint64(POSITION_PRIME) + np.uint64(1))
