"""Memory of the fullest GPUs and of the fullest host, and parts that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import QWEN3_30B, write_hf_config
from tiny_moe import write_model

from moerl.config.load import load_plan
from moerl.config.rollout_checks import check_nodes_of_servers
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.run_memory import (
    GIB,
    GPU_OF_BOTH,
    GPU_OF_ENGINE,
    GPU_OF_SERVER,
    GPU_OF_TRAINER,
    HOST,
    Machine,
    MemoryPlace,
    check_host,
    check_server,
    checkpoint_bytes,
    gpu_problem,
    places,
)
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError
from moerl.machine.residence import ALWAYS, ASLEEP, moments_on_device

H100S = Machine(80 * GIB, gpus_per_node=8, nodes=2, host_bytes=1024 * GIB)
WEIGHTS = 30.5e9 * 2


def run(folder: Path, *overrides: str) -> RunConfig:
    write_hf_config(folder, **QWEN3_30B)
    return load_plan(["recipe=math", f"model.path='{folder}'", "parallel.expert=8", *overrides])


def colocated(folder: Path, *overrides: str) -> RunConfig:
    shared = ("rollout.placement=colocated", "rollout.tensor=2", "rollout.servers=4")
    return run(folder, "parallel.data=16", *shared, *overrides)


def held(place: MemoryPlace) -> dict[str, int]:
    return {each.what: each.num_bytes for each in place.holdings}


def test_servers_with_gpus_of_their_own_are_a_place_of_their_own(tmp_path: Path) -> None:
    config = run(tmp_path, "rollout.tensor=2", "rollout.servers=4", "parallel.data=16")
    found = {place.name: place for place in places(config, H100S)}
    assert list(found) == [GPU_OF_TRAINER, GPU_OF_SERVER, HOST]
    assert found[GPU_OF_TRAINER].peak_moment == "training"
    assert found[GPU_OF_SERVER].peak_bytes == pytest.approx(0.8 * 80 * GIB, rel=0.001)


def test_state_and_share_of_a_colocated_server_must_fit_one_gpu_together(tmp_path: Path) -> None:
    tight = colocated(tmp_path, "rollout.memory_share=0.8", "rollout.tensor=1", "rollout.servers=8")
    [place, _] = places(tight, H100S)
    assert place.name == GPU_OF_BOTH
    state = sum(held(place)[f"rank: {name}"] for name in ("weights", "optimizer state"))
    assert place.at("sampling") == state + int(0.8 * 80 * GIB)
    # Each of them alone would fit.
    assert place.at("training") < 0.9 * 80 * GIB
    problem = gpu_problem(tight, H100S)
    assert problem is not None
    assert problem.what.startswith("rollout.memory_share: a server's share and the trainer's state")
    assert "rollout.placement=disaggregated" in problem.remedy


def test_a_share_that_fits_is_proposed_if_a_server_can_work_with_it(tmp_path: Path) -> None:
    config = colocated(tmp_path, "rollout.memory_share=0.8", "rollout.tensor=4", "parallel.data=32")
    problem = gpu_problem(config, H100S)
    assert problem is not None
    assert problem.remedy.startswith("set rollout.memory_share=0.")
    share = problem.remedy.partition(",")[0].removeprefix("set ")
    again = colocated(tmp_path, share, "rollout.tensor=4", "parallel.data=32")
    assert gpu_problem(again, H100S) is None
    check_server(again, H100S)


def test_full_fine_tuning_of_30b_fits_one_node_of_80_gb_with_its_optimizer_state_in_host_memory(tmp_path: Path) -> None:
    node = replace(H100S, nodes=1, host_bytes=2048 * GIB)
    keys = ("parallel.data=8", "rollout.placement=colocated", "rollout.tensor=2", "rollout.servers=4")
    keys += ("rollout.memory_share=0.7", "rollout.max_running=24")
    resident = gpu_problem(run(tmp_path, *keys), node)
    assert resident is not None
    assert "rank: optimizer state" in str(resident.seen)
    config = run(tmp_path, *keys, "trainer.optimizer_offload=1.0")
    assert gpu_problem(config, node) is None
    check_host(config, node)
    check_server(config, node)
    host = held(places(config, node)[-1])
    assert host["optimizer state of ranks"] == pytest.approx(12 * 30.5e9, rel=0.01)
    assert host["checkpoint being written"] == checkpoint_bytes(config)


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_colocated_gpu_holds_in_each_moment_what_the_table_says(sleeps: bool, tmp_path: Path) -> None:
    keys = (f"trainer.sleep={str(sleeps).lower()}", "trainer.optimizer_offload=0.5", "algorithm.kl_coef=0.1")
    [place, host] = places(colocated(tmp_path, "rollout.memory_share=0.5", *keys), H100S)
    moments = {each.what: each.moments for each in place.holdings}
    # In microbatches as long as these the embedding's gradient takes the room of activations.
    table = (ASLEEP | ALWAYS).keys() - {"rank: embedding's gradient"}
    assert moments == {what: moments_on_device(what, sleeps=sleeps) for what in table}
    weights = held(place)["rank: weights"] + held(place)["rank: reference weights"]
    assert held(host).get("weights of ranks that sleep", 0) == (8 * weights if sleeps else 0)
    assert ("sampling" in moments["rank: weights"]) == (not sleeps)


def test_weights_of_a_server_that_do_not_fit_beside_those_of_the_trainer_are_named(tmp_path: Path) -> None:
    keys = ("trainer.optimizer_offload=1", "trainer.sleep=true", "rollout.tensor=1", "rollout.servers=8")
    config = colocated(tmp_path, "parallel.expert=2", "rollout.memory_share=0.8", *keys)
    problem = gpu_problem(config, H100S)
    assert problem is not None
    assert problem.what.startswith("rollout.tensor: the weights of a server and of the trainer")


def test_30b_fits_two_nodes_with_a_colocated_server_on_each(tmp_path: Path) -> None:
    shared = ("rollout.tensor=8", "rollout.servers=2", "rollout.memory_share=0.25", "launch.on=ray")
    for experts in (1, 8):
        config = colocated(tmp_path, *shared, f"rollout.expert={experts}")
        assert gpu_problem(config, H100S) is None
        check_server(config, H100S)
        assert isinstance(config.rollout, SGLangRolloutConfig)
        check_nodes_of_servers(config.rollout, ranks=16, gpus_per_node=8, nodes=2)


def test_a_host_counts_the_colocated_servers_of_its_own_ranks(tmp_path: Path) -> None:
    eight = ("rollout.memory_share=0.2", "rollout.servers=8")
    buckets = [
        held(places(colocated(tmp_path, *eight), Machine(80 * GIB, gpus, host_bytes=1024 * GIB))[-1])[
            "buckets through host memory"
        ]
        for gpus in (16, 8, 7)
    ]
    # Senders of all nodes, and sixteen, eight and six devices.
    assert [each / buckets[0] for each in buckets] == pytest.approx([1.0, 9 / 17, 7 / 17])


def test_a_rank_that_is_too_large_is_named_with_its_parts(tmp_path: Path) -> None:
    problem = gpu_problem(run(tmp_path, "rollout.tensor=2"), H100S)
    assert problem is not None
    assert "rank: optimizer state" in str(problem.seen)
    assert problem.expected == "at most 72.0 GiB, 90% of 80.0 GiB"


def test_a_host_holds_checkpoints_and_copies_of_weights(tmp_path: Path) -> None:
    config = run(tmp_path, "rollout.tensor=2", "rollout.servers=4", "parallel.data=16")
    host = places(config, H100S)[-1]
    found = held(host)
    assert checkpoint_bytes(config) == pytest.approx(30.5e9 * 14, rel=0.01)
    # Half of the ranks, of which some write the weights, too.
    assert checkpoint_bytes(config) / 2 < found["checkpoint being written"] < checkpoint_bytes(config)
    assert found["copy of the weights for late servers"] == pytest.approx(WEIGHTS, rel=0.01)
    assert host.at("sending") - host.at("sampling") == pytest.approx(WEIGHTS, rel=0.01)
    # Half of the ranks, each with its experts and all of the rest.
    gathered = host.at("training") - host.at("sampling")
    assert gathered == found["state gathered for a checkpoint"] > 8 * 12 * 30.5e9 / 8
    check_host(config, H100S)
    with pytest.raises(ConfigError, match=r"seen: .*checkpoint being written"):
        check_host(config, Machine(80 * GIB, 8, 2, 256 * GIB))


def test_a_host_whose_memory_is_not_known_is_not_compared(tmp_path: Path) -> None:
    check_host(run(tmp_path), Machine(80 * GIB, 8))


def test_on_cpus_hosts_hold_ranks_and_engines() -> None:
    config = load_plan(["recipe=tiny", "parallel.tensor=2", "rollout=sglang", "rollout.servers=2"])
    one, both = (held(places(config, Machine(None, nodes=nodes))[-1]) for nodes in (2, 1))
    assert both["rank: weights"] == 2 * one["rank: weights"]
    assert "server: weights" in both
    embedded = held(places(load_plan(["recipe=tiny"]), Machine(None))[-1])
    assert {"engine: weights", "engine: cache"} <= embedded.keys()


def test_the_host_of_the_controller_holds_the_models_that_score_tokens(tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", tied=False, seed=0)
    key = f"scorers={{teacher: {{kind: model, path: '{teacher}'}}}}"
    config = run(tmp_path, key)
    with_teacher, without = (held(places(each, H100S)[-1]) for each in (config, run(tmp_path)))
    weights = config.scorers["teacher"].host_bytes("scorers.teacher")
    assert weights > 0
    assert with_teacher == {**without, "scorer teacher": weights}
    with pytest.raises(ConfigError, match=r"scorers\.teacher\.path"):
        places(run(tmp_path, key.replace(str(teacher), "/nowhere")), H100S)


def test_a_server_that_holds_no_response_is_refused_with_what_to_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.tensor: .*rollout\.memory_share, now 0\.5"):
        check_server(run(tmp_path, "rollout.memory_share=0.5"), H100S)
    with pytest.raises(ConfigError, match=r"^rollout\.max_pool_tokens: "):
        check_server(run(tmp_path, "rollout.max_pool_tokens=8192"), H100S)
    check_server(run(tmp_path, "rollout.max_pool_tokens=8193"), H100S)


def test_fewer_sequences_than_are_asked_for_are_a_limit_with_what_to_set(tmp_path: Path) -> None:
    limit = check_server(run(tmp_path, "rollout.tensor=2"), H100S)
    assert limit is not None
    seen, remedy = limit
    assert "75 sequences of the longest (10,240 tokens); rollout.max_running asks for 256" in seen
    assert "rollout.max_running=75" in remedy
    assert check_server(run(tmp_path, "rollout.tensor=2", "rollout.max_running=75"), H100S) is None


def test_an_embedded_engine_is_on_the_gpu_of_the_first_rank_and_on_no_host() -> None:
    config = load_plan(["recipe=laptop"])
    *_, gpu, host = places(config, H100S)
    assert gpu.name == GPU_OF_ENGINE
    assert {"rank: weights", "engine: weights", "engine: key-value cache"} <= held(gpu).keys()
    assert not any(what.startswith("engine") for what in held(host))
    large = load_plan(["recipe=laptop", "rollout.max_running=9000000"])
    problem = gpu_problem(large, H100S)
    assert problem is not None
    assert problem.what.startswith("rollout: the embedded engine does not fit on its GPU")
    assert gpu_problem(config, H100S) is None
    # 8 bits are emulated on the CPU.
    emulated = places(load_plan(["recipe=laptop", "rollout.dtype=float8"]), H100S)
    assert [place.name for place in emulated] == [GPU_OF_TRAINER, HOST]
    assert "engine: weights" in held(emulated[-1])
