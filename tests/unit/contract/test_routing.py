"""Routing checksums: what changes them and what does not."""

import numpy as np
from routing_sums import routing_checksums

from moerl.contract.routing import rollout_key

RNG = np.random.default_rng(0)
EXPERTS = np.ascontiguousarray(RNG.random((40, 3, 16)).argsort(axis=2)[:, :, :4].astype(np.uint8))
KEY = rollout_key("rollout-a")


def test_a_shift_by_one_row_changes_every_layer():
    shifted = np.roll(EXPERTS, 1, axis=0)
    assert (routing_checksums(KEY, shifted) != routing_checksums(KEY, EXPERTS)).all()


def test_a_shift_by_one_layer_changes_every_layer():
    shifted = np.roll(EXPERTS, 1, axis=1)
    plain = routing_checksums(KEY, EXPERTS)
    assert (routing_checksums(KEY, shifted) != plain).all()
    assert (routing_checksums(KEY, shifted) != np.roll(plain, 1)).all()


def test_a_swap_of_two_rollouts_changes_the_sum():
    other, other_key = np.roll(EXPERTS, 5, axis=0), rollout_key("rollout-b")
    right = routing_checksums(KEY, EXPERTS) + routing_checksums(other_key, other)
    swapped = routing_checksums(KEY, other) + routing_checksums(other_key, EXPERTS)
    assert (right != swapped).all()


def test_a_swap_of_two_rows_changes_every_layer():
    swapped = EXPERTS.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert (routing_checksums(KEY, swapped) != routing_checksums(KEY, EXPERTS)).all()


def test_one_wrong_expert_changes_its_layer_alone():
    wrong = EXPERTS.copy()
    wrong[7, 1, 2] = next(e for e in range(16) if e not in wrong[7, 1])
    assert (routing_checksums(KEY, wrong) != routing_checksums(KEY, EXPERTS)).tolist() == [False, True, False]


def test_the_order_within_a_row_does_not_matter():
    assert (routing_checksums(KEY, EXPERTS[:, :, ::-1]) == routing_checksums(KEY, EXPERTS)).all()
