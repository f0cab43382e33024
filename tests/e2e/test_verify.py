"""`moerl verify` on what a run dumped: silent where all is well, and loud about every planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moerl_runs import DoneRun, Finished, Runs

from moerl.contract.disk import read_parquet, write_parquet
from moerl.contract.trajectory import KeptSets, Trajectory


def verify(forked: Runs, dump: Path, model: Path, *options: str) -> Finished:
    return forked.run("verify", str(dump), "--model", str(model), *options)


def first_dump(run: DoneRun) -> Path:
    return run.folder / "rollouts" / "step-000001.parquet"


def named(output: str) -> list[str]:
    """The trajectories that the closing lines call outside."""
    assert "outside the tolerance" in output, output
    return [line.strip() for line in output.split("outside the tolerance")[1].splitlines()[1:]]


def test_the_first_rollouts_of_a_run_are_what_its_cold_start_gives(forked: Runs, tiny: DoneRun) -> None:
    finished = verify(forked, first_dump(tiny), tiny.folder / "cold_start", "--tolerance", "1e-5")
    assert finished.status == 0, finished.output
    assert "policy version 0, taken to be that of the model" in finished.output
    assert "all 16 trajectories within the tolerance of 1e-05 nats" in finished.output
    for line in ("engine against transformers", "engine against Megatron", "transformers against Megatron"):
        assert line in finished.output


def test_later_rollouts_are_verified_with_the_exported_weights_of_their_version(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    exported = forked.run("export", str(tiny.folder), "--step", "2", "--output", str(tmp_path / "version-2"))
    assert exported.status == 0, exported.output
    finished = verify(forked, tiny.folder / "rollouts", tmp_path / "version-2", "--version", "2")
    assert finished.status == 0, finished.output
    assert "left out: 32 of 48 trajectories with tokens of other policy versions" in finished.output


def test_the_weights_of_another_version_are_found_out(forked: Runs, tiny: DoneRun) -> None:
    finished = verify(forked, first_dump(tiny), tiny.folder / "final_model")
    assert finished.status == 1, finished.output
    assert len(named(finished.output)) == 16


def test_a_dump_of_several_versions_needs_one_to_be_named(forked: Runs, tiny: DoneRun) -> None:
    finished = verify(forked, tiny.folder / "rollouts", tiny.folder / "final_model")
    assert finished.status == 2, finished.output
    assert "seen: versions 0, 1, 2" in finished.output


def test_rows_without_captured_routing_are_left_to_the_routers_and_counted(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    dump = read_parquet(first_dump(tiny))
    routed, expert_ids = dump[3].routed.copy(), dump[3].expert_ids.copy()
    routed[:5], expert_ids[:5] = False, 0
    dump[3] = replace(dump[3], routed=routed, expert_ids=expert_ids)
    write_parquet(tmp_path / "uncaptured.parquet", dump)
    finished = verify(forked, tmp_path / "uncaptured.parquet", tiny.folder / "cold_start")
    assert finished.status == 0, finished.output
    num_rows = sum(len(trajectory) - 1 for trajectory in dump)
    assert f"routing, {num_rows - 5} captured rows, 5 without" in finished.output


# --- planted faults --------------------------------------------------------------------------------------------------


def swap_routing(dump: list[Trajectory]) -> list[str]:
    """The routing of two trajectories of one length changes hands."""
    for i, one in enumerate(dump):
        for j, other in enumerate(dump[:i]):
            if len(one) == len(other) and (one.expert_ids != other.expert_ids).mean() > 0.3:
                dump[i] = replace(one, expert_ids=other.expert_ids.copy())
                dump[j] = replace(other, expert_ids=one.expert_ids.copy())
                return [other.lineage.rollout_id, one.lineage.rollout_id]
    raise AssertionError("no two trajectories of one length")


def shorten_a_kept_set(dump: list[Trajectory]) -> list[str]:
    """One kept set lacks an id that was in it; the sampled token stays."""
    one = dump[5]
    token = int(np.flatnonzero(one.kept.sizes > 2)[0])
    start, stop = one.kept.offsets[token : token + 2]
    at = next(i for i in range(start, stop) if one.kept.ids[i] != one.token_ids[token])
    offsets = one.kept.offsets.copy()
    offsets[token + 1 :] -= 1
    dump[5] = replace(one, kept=KeptSets(offsets, np.delete(one.kept.ids, at)))
    return [one.lineage.rollout_id]


def shift_a_log_prob(dump: list[Trajectory]) -> list[str]:
    one = dump[7]
    shifted = one.rollout_logprobs.copy()
    shifted[-1] -= np.float32(0.1)
    dump[7] = replace(one, rollout_logprobs=shifted)
    return [one.lineage.rollout_id]


@pytest.mark.parametrize("plant", [swap_routing, shorten_a_kept_set, shift_a_log_prob])
def test_a_planted_fault_fails_and_names_its_trajectories_and_no_other(
    plant: Callable[[list[Trajectory]], list[str]], forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    dump = read_parquet(first_dump(tiny))
    faulty = plant(dump)
    write_parquet(tmp_path / "planted.parquet", dump)
    finished = verify(forked, tmp_path / "planted.parquet", tiny.folder / "cold_start")
    assert finished.status == 1, finished.output
    assert sorted(named(finished.output)) == sorted(faulty)
    assert "transformers against Megatron: largest difference" in finished.output
