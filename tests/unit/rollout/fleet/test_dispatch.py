from __future__ import annotations

import threading
from dataclasses import replace

from fleet_fake import make_requests
from waiting import eventually

from moerl.contract.fields import Lineage
from moerl.rollout.fleet.backend import Attempt, AttemptReply
from moerl.rollout.fleet.dispatch import Homes, choose_server


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


def test_a_turn_goes_where_its_session_was_and_a_fork_where_its_parent_was():
    homes, root = Homes(), Lineage("r#1/0", "p", "g")
    fork = Lineage("r#1/0~1", "p", "g", parent_rollout_id="r#1/0", fork_at=7)
    homes.chose(root.of_turn(0), "a")
    homes.chose(Lineage("r#1/1", "p", "g"), "b")
    assert homes.find(root.of_turn(1)) == "a"
    assert homes.find(fork.of_turn(0)) == "a"
    homes.chose(fork.of_turn(0), "c")
    assert homes.find(fork.of_turn(11)) == "c"
    assert homes.find(root.of_turn(1)) == "a"


def test_the_first_turn_of_a_session_goes_where_its_group_was():
    homes = Homes()
    assert homes.find(Lineage("r0", "p", "g")) is None
    homes.chose(Lineage("r0", "p", "g").of_turn(0), "a")
    homes.chose(Lineage("s0", "q", "h").of_turn(0), "b")
    assert homes.find(Lineage("r1", "p", "g").of_turn(0)) == "a"
    assert homes.find(Lineage("r0~1", "p", "g").of_turn(0)) == "a", "a sub-agent, with a prompt of its own"


def test_a_session_stays_on_its_server_while_other_streams_come_and_go(servers, engine_on):
    engine, release = engine_on(servers[0], servers[1], max_running=8), threading.Event()

    def wait(attempt: Attempt) -> AttemptReply:
        assert release.wait(60.0)
        return servers[0].good(attempt)

    servers[0].answer = wait
    other, request, later = make_requests(3)
    busy = threading.Thread(target=lambda: list(engine.generate([other])))
    busy.start()
    eventually(lambda: servers[0].asked == ["r0"])
    stream = engine.stream()
    records = iter(stream)
    for number in range(3):
        stream.submit([replace(request, lineage=request.lineage.of_turn(number))])
        assert [record.rollout_id for record in next(records)] == [f"r1#{number}"]
        if number == 0:
            release.set()
            busy.join(60.0)
            assert len(list(engine.generate([later]))) == 1
    stream.end()
    assert list(records) == []
    assert servers[0].asked == ["r0", "r2"], "the least loaded one, of equals the first"
    assert servers[1].asked == ["r1#0", "r1#1", "r1#2"]
