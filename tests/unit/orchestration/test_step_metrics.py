"""The metrics of a step, against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny_moe
import torch
from factories import FULL, make_trajectory

from moerl.contract.batch import TrainSample
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.ports import SamplingCosts
from moerl.contract.shares import cut_share
from moerl.contract.trainer import ROW_COLUMNS, DeviceUse, RowTable, UpdateReport
from moerl.contract.trajectory import FinishReason, Trajectory
from moerl.orchestration.rl import _split_groups
from moerl.orchestration.step_metrics import (
    device_metrics,
    disagreement,
    load_metrics,
    loss_metrics,
    policy_metrics,
    rollout_metrics,
    sampling_metrics,
    speed_metrics,
    update_metrics,
)
from moerl.ranks.tables import local_rows
from moerl.telemetry.metrics import check_metrics
from moerl.trainer.trainer import RowScores


def table(**columns: list[float]) -> RowTable:
    size = len(next(iter(columns.values())))
    return RowTable(**{name: np.array(columns.get(name, [0.0] * size), np.float32) for name in ROW_COLUMNS})


def test_the_mismatch_is_that_of_the_trainer_against_the_rollout() -> None:
    rows = table(trainer=[-1.0, -2.0, -0.5, -3.0], rollout=[-1.0, -1.0, -0.75, -3.0], layers_differing=[0, 3, 1, 0])
    found = disagreement(rows)
    differences = [0.0, -1.0, 0.25, 0.0]
    assert found == pytest.approx(
        {
            "mismatch/logprob_abs_mean": 1.25 / 4,
            "mismatch/logprob_abs_max": 1.0,
            "mismatch/k3": sum(math.exp(d) - 1 - d for d in differences) / 4,
            "mismatch/ratio_mean": sum(math.exp(d) for d in differences) / 4,
            "mismatch/share_outside_tenth": 0.5,
            "mismatch/share_above_ln2": 0.25,
            "mismatch/tokens_with_different_experts": 0.5,
            "mismatch/layers_differing_per_token": 1.0,
        }
    )
    check_metrics(found)


def test_every_trained_token_is_in_the_tables_of_all_ranks_once() -> None:
    (whole,) = tiny_moe.pack(tiny_moe.make_samples(3, (9, 20)), multiple=8, sequence=8)[0]
    tables = []
    for context_rank in (0, 1):
        for tensor_rank in (0, 1):
            for scores in (False, True):
                rank = tensor_rank + 2 * context_rank + 4 * scores
                layout = RankCoordinates(ParallelDims(tensor=2, pipeline=2, context=2), rank)
                share = cut_share(whole, layout)
                rows = RowScores(torch.from_numpy(share.rollout_logprobs - 1.0), torch.zeros(share.num_rows))
                tables.append(local_rows(layout, [share], [rows] if scores else []))
                assert len(tables[-1]) == 0 or (scores and tensor_rank == 0)
    table = RowTable.of(np.concatenate(tables))
    np.testing.assert_array_equal(np.sort(table.rollout), np.sort(whole.rollout_logprobs[whole.loss_mask]))
    np.testing.assert_array_equal(table.trainer, table.rollout - np.float32(1.0))
    assert tables[0].shape == (0, len(ROW_COLUMNS))


def test_skipped_updates_are_counted_and_have_no_part_in_the_gradient_norm() -> None:
    done = [UpdateReport(1.0, 1e-3), UpdateReport(0.0, 2e-3, skipped=True, skipped_in_a_row=1), UpdateReport(3.0, 2e-3)]
    found = update_metrics(done)
    assert found == {"optimizer/grad_norm": 2.0, "optimizer/lr": 2e-3, "optimizer/skipped": 1.0}
    check_metrics(found)
    assert update_metrics(done[1:2])["optimizer/grad_norm"] == 0.0


def test_a_table_without_masks_compares_the_log_probs_over_the_whole_vocabulary() -> None:
    rows = table(trainer=[-1.0], rollout=[-1.0], full=[-1.5])
    assert disagreement(rows)["mismatch/logprob_abs_mean"] == 0.0
    assert disagreement(rows, full=True)["mismatch/logprob_abs_mean"] == 0.5


def test_ratios_are_trainer_over_rollout_and_the_rest_are_means() -> None:
    rollout = [-1.0] * 101
    rows = table(
        trainer=[-1.0 + i / 100 for i in range(101)],
        rollout=rollout,
        entropy=[float(i % 2) for i in range(101)],
        clipped=[1.0] * 10 + [0.0] * 91,
    )
    found = policy_metrics(rows)
    assert found["policy/ratio_p50"] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert found["policy/ratio_p01"] == pytest.approx(math.exp(0.01), rel=1e-3)
    assert found["policy/ratio_p99"] == pytest.approx(math.exp(0.99), rel=1e-3)
    assert found["policy/entropy"] == pytest.approx(50 / 101)
    assert found["policy/clip_fraction"] == pytest.approx(10 / 101)
    check_metrics(found)


def test_kept_sets_are_measured_over_tokens_that_were_drawn_from_one() -> None:
    rng = np.random.default_rng(0)
    kept, full = make_trajectory(rng, num_sampled=4), make_trajectory(rng, num_sampled=6, sampling=FULL)
    kept = replace(kept, rewards={"reward": 1.0, "accuracy": 1.0})
    full = replace(full, rewards={"reward": 0.5, "accuracy": 0.0})
    found = rollout_metrics([kept, full])
    assert found["reward/mean"] == 0.75
    assert found["accuracy/mean"] == 0.5
    assert found["response/length_mean"] == 5.0
    assert found["kept/size_mean"] == kept.kept.sizes[kept.sampled].mean()
    assert found["kept/mass_mean"] == pytest.approx(np.exp(kept.kept_logmass[kept.sampled]).mean())
    check_metrics(found)
    assert "kept/size_mean" not in rollout_metrics([full])


def with_reward(group: str, finish_reason: FinishReason = FinishReason.STOP, **rewards: float) -> Trajectory:
    trajectory = make_trajectory(np.random.default_rng(0), finish_reason=finish_reason)
    lineage = replace(trajectory.lineage, group_id=group)
    return replace(trajectory, lineage=lineage, rewards={"accuracy": 0.0, **rewards})


def test_rewards_of_a_batch_are_summed_up_by_name_group_and_end() -> None:
    length = FinishReason.LENGTH
    batch = [
        *(with_reward("a", reward=1.0, brevity=0.5), with_reward("a", length, reward=3.0, brevity=1.0)),
        *(with_reward("b", reward=0.1, extra=7.0), with_reward("b", reward=0.1)),
        with_reward("c", length, reward=1.0),
    ]
    found = rollout_metrics(batch)
    assert found["reward/mean"] == pytest.approx(5.2 / 5)
    assert found["reward/std"] == pytest.approx(np.std([1.0, 3.0, 0.1, 0.1, 1.0]))
    assert found["response/truncated"] == pytest.approx(2 / 5)
    assert found["groups/zero_variance"] == 2.0
    assert found["groups/zero_variance_share"] == pytest.approx(2 / 3)
    assert found["reward/brevity/mean"] == 0.75
    assert found["reward/extra/mean"] == 7.0
    assert not {"reward/reward/mean", "reward/accuracy/mean"} & found.keys()
    check_metrics(found)


def test_expert_load_is_that_of_the_worst_layer() -> None:
    load_LE = np.array([[4, 4, 4, 4], [16, 0, 8, 8], [2, 10, 2, 2]])
    assert load_metrics(load_LE) == {"experts/load_max_over_mean": 2.5, "experts/load_min_over_mean": 0.0}


def test_minibatches_hold_whole_groups_in_order() -> None:
    rng = np.random.default_rng(1)
    samples = []
    for group, size in (("a", 3), ("b", 1), ("c", 2), ("d", 3), ("e", 1)):
        for i in range(size):
            trajectory = make_trajectory(rng, rollout_id=f"{group}{i}")
            trajectory = replace(trajectory, lineage=replace(trajectory.lineage, group_id=group))
            samples.append(TrainSample(trajectory, np.zeros(len(trajectory), np.float32)))

    def ids(parts: int) -> list[str]:
        return [" ".join(s.trajectory.lineage.rollout_id for s in part) for part in _split_groups(samples, parts)]

    assert ids(1) == ["a0 a1 a2 b0 c0 c1 d0 d1 d2 e0"]
    assert ids(2) == ["a0 a1 a2 b0 c0 c1", "d0 d1 d2 e0"]
    assert ids(9) == ["a0 a1 a2", "b0", "c0 c1", "d0 d1 d2", "e0"]


H100 = DeviceUse("NVIDIA H100 80GB HBM3", 10, 20)


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_its_updates() -> None:
    assert loss_metrics(3.0 - 1.0, 4) == {"policy/loss": 0.5}
    assert loss_metrics(None, 4) == {}


def test_memory_of_gpus_is_that_of_the_rank_that_had_most() -> None:
    found = device_metrics([H100, DeviceUse("NVIDIA H100 80GB HBM3", 30, 15)])
    assert found == {"memory/gpu_allocated_bytes": 30.0, "memory/gpu_reserved_bytes": 20.0}
    assert device_metrics([]) == {}


def test_utilisation_is_the_speed_of_a_rank_over_the_peak_of_its_gpu() -> None:
    found = speed_metrics(989e12 * 4, 8.0, 2, [H100, H100], "bfloat16")
    assert found == {"throughput/model_flops_per_second": 989e12 / 4, "throughput/mfu": 0.25}
    check_metrics(found)


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [([], "float32"), ([H100], "float32"), ([H100, DeviceUse("Tesla T4", 1, 1)], "bfloat16")],
    ids=["cpu", "float32", "unknown"],
)
def test_utilisation_is_left_out_if_the_peak_is_not_known(devices: list[DeviceUse], dtype: str) -> None:
    assert speed_metrics(6.0, 2.0, 3, devices, dtype) == {"throughput/model_flops_per_second": 1.0}


def test_prefix_hits_of_a_step_are_over_what_servers_were_sent_in_it():
    before, after = SamplingCosts(1, 5, 0.5, 100, 90), SamplingCosts(3, 9, 2.0, 140, 120)
    updates = {"weights/interrupted": 2, "weights/recomputed_tokens": 4, "weights/stalled_seconds": 1.5}
    assert sampling_metrics(before, after) == updates | {"rollout/prefix_hit_rate": 30 / 40}
    none = dict.fromkeys(updates, 0)
    assert sampling_metrics(after, after) == none, "an engine without a prefix cache, or a step without a request"
