from __future__ import annotations

from moerl.rollout.fleet.dispatch import choose_server


def test_the_least_loaded_server_is_chosen_and_full_ones_never():
    assert choose_server({"a": 3, "b": 1, "c": 2}, None, 8) == "b"
    assert choose_server({"a": 8, "b": 7}, "a", 8) == "b"
    assert choose_server({"a": 8, "b": 8}, None, 8) is None
    assert choose_server({}, "a", 8) is None


def test_the_server_with_the_prefix_is_chosen_while_it_is_hardly_busier():
    assert choose_server({"a": 2, "b": 0}, "a", 8) == "a"
    assert choose_server({"a": 3, "b": 0}, "a", 8) == "b"


def test_a_home_that_may_get_nothing_is_not_chosen():
    assert choose_server({"b": 5}, "a", 8) == "b"
