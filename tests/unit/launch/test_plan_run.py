"""Output of `moerl plan run`, and the runs that it can be calibrated with."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import QWEN3_30B, make_trajectory, write_hf_config
from published_models import DEEPSEEK_V3

from moerl.buffer.queue import QueueLimits
from moerl.buffer.simulated_turns import SimulatedTurn, drawn_from
from moerl.config.load import dump_config, load_plan
from moerl.contract.disk import write_parquet
from moerl.contract.trajectory import KeptSets, Trajectory, Turn, TurnKind
from moerl.errors import ConfigError
from moerl.launch.arguments import add_plan_arguments
from moerl.launch.calibration import calibrate
from moerl.launch.plan_run import Device, Workload, estimate, fleet_on, plan_run, predict
from moerl.weights.estimate import Bandwidths

H100 = Device(989, 3350, 0.3, 80)
LENGTHS = (4, 9, 30)
RESPONSES = 24 * 8


def make_run(folder: Path, *overrides: str, steps: int = 20, acting: float = 0.0, **changed: Any) -> Path:
    """A run directory whose steps took 10 ms for a token, 1 ms for each of its rows, 2 ms for a prompt; 0.5 s and 0.1
    ms for a token of training; 0.05 s for weights. acting: seconds of the environment in a step."""
    folder.mkdir()
    config = load_plan(["recipe=laptop", f"run_dir={folder}", *overrides])
    (folder / "config.yaml").write_text(dump_config(config))
    rng, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for step in range(steps):
        mean, longest = float(rng.uniform(10, 20)), float(rng.integers(30, 72))
        tokens = mean * RESPONSES
        rollout = acting + 0.010 * longest + 0.001 * tokens + 0.002 * RESPONSES
        row = {
            "stage": "rl",
            "step": step + 1,
            "response/length_mean": mean,
            "response/length_max": longest,
            "weights/stalled_seconds": 0.0,
            "seconds/rollout": rollout,
            "seconds/weights": 0.05,
            "seconds/step": rollout + 0.5 + 0.0001 * tokens + 0.05,
        }
        rows.append({name: value for name, value in (row | changed).items() if value is not None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rollouts").mkdir()
    trajectories = [make_trajectory(rng, num_sampled=n, rollout_id=f"r{n}") for n in LENGTHS]
    write_parquet(folder / "rollouts" / "step-000010.parquet", trajectories)
    return folder


def test_the_costs_of_a_run_are_found_again(tmp_path: Path) -> None:
    found = calibrate(make_run(tmp_path / "run"))
    assert sorted(found.episodes, key=lambda turns: turns[0].num_tokens) == [[SimulatedTurn(n)] for n in LENGTHS]
    assert found.num_steps == 19
    costs = found.costs
    assert (costs.decode_step, costs.decode_row) == pytest.approx((0.010, 0.001))
    assert costs.prefill_row == pytest.approx(0.002)
    assert (costs.train_step, costs.train_token) == pytest.approx((0.5, 0.0001))
    assert (costs.publish, costs.stall) == pytest.approx((0.05, 0.0))


def test_a_calibrated_prediction_is_the_step_that_was_measured(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    found, config = calibrate(folder), load_plan(["recipe=laptop", f"run_dir={tmp_path / 'new'}"])
    # The dump stands for the run where its lengths are those of the run.
    lengths = [10, 12, 15, 18, 20, 15, 50]
    predicted = predict(config, QueueLimits(24), found.costs, drawn_from([[SimulatedTurn(n)] for n in lengths], 1))
    mean = sum(lengths) / len(lengths)
    wanted = 0.010 * 50 + RESPONSES * (0.001 * mean + 0.002) + 0.5 + 0.0001 * mean * RESPONSES + 0.05
    assert predicted.step_seconds == pytest.approx(wanted, rel=0.02)


def in_turns(name: str, *sampled: int, observed: int = 3, seconds: float = 0.0) -> Trajectory:
    """An episode with turns of so many tokens behind a prompt of five, and its time in the environment."""
    made = make_trajectory(
        np.random.default_rng(0),
        num_prompt=5,
        num_sampled=sum(sampled) + observed * (len(sampled) - 1),
        rollout_id=name,
    )
    spans, at = [Turn(0, 5, TurnKind.PROMPT)], 5
    flags, sampling = made.sampled.copy(), made.turns[1].sampling
    for number, count in enumerate(sampled):
        if number:
            flags[at : at + observed] = False
            spans.append(Turn(at, at := at + observed, TurnKind.OBSERVATION))
        spans.append(Turn(at, at := at + count, TurnKind.SAMPLED, sampling))
    hidden = ~flags
    sizes = np.where(hidden, 0, made.kept.sizes)
    keep = np.repeat(flags, made.kept.sizes)
    return replace(
        made,
        turns=tuple(spans),
        sampled=flags,
        truncated=made.truncated & flags,
        rollout_logprobs=np.where(hidden, np.float32(0), made.rollout_logprobs),
        kept_logmass=np.where(hidden, np.float32(0), made.kept_logmass),
        policy_versions=np.where(hidden, np.int32(-1), made.policy_versions),
        kept=KeptSets(np.concatenate([[0], np.cumsum(sizes)]), made.kept.ids[keep]),
        timings={"sampling_seconds": 1.0, "environment_seconds": seconds},
    )


@pytest.mark.parametrize("keys", [(), ("rollout=sglang",)])
def test_a_run_of_episodes_has_its_turns_and_the_time_of_their_environments(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", *keys, acting=2.0)
    episodes = [in_turns("a", 4, 6, 2, seconds=2.0), in_turns("b", 12, seconds=0.5)]
    write_parquet(folder / "rollouts" / "step-000010.parquet", episodes)
    found = calibrate(folder)
    first = [SimulatedTurn(4, 3, 1.0), SimulatedTurn(6, 3, 1.0), SimulatedTurn(2)]
    assert found.episodes == [first, [SimulatedTurn(12, 0, 0.5)]]
    assert (found.costs.decode_step, found.costs.decode_row) == pytest.approx((0.010, 0.001)), "without the environment"
    # 2 ms of an episode: five tokens of prompt, and 6 that the first observes; without prefixes all before, too.
    tokens = 5 + (6 if keys else (5 + 7) + (5 + 16)) / 2
    assert found.costs.prefill_token == pytest.approx(0.002 / tokens)
    assert found.costs.prefill_row == pytest.approx(5 * 0.002 / tokens)


@pytest.mark.parametrize(
    ("overrides", "options", "seen"),
    [
        (["buffer.max_staleness=1", "rollout.placement=process"], {}, "buffer.max_staleness 1"),
        (["rollout.placement=process"], {}, "rollout.placement process"),
        (["rollout.max_running=64"], {}, "rollout.max_running 64"),
        ([], {"steps": 12}, "12 steps, 1 dumps"),
        ([], {"response/length_max": None}, "steps without response/length_max"),
    ],
)
def test_a_run_that_cannot_tell_costs_apart_is_refused(
    overrides: list[str], options: dict[str, Any], seen: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(seen)):
        calibrate(make_run(tmp_path / "run", *overrides, **options))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        calibrate(tmp_path)


def test_operations_and_bytes_of_a_model_become_seconds(tmp_path: Path) -> None:
    write_hf_config(tmp_path, **QWEN3_30B)
    keys = ["recipe=pretrained", f"model.path='{tmp_path}'", "rollout=sglang", "rollout.tensor=2", "parallel.expert=8"]
    config = load_plan(keys)
    costs = estimate(config, H100, Workload(4096, 512), 1.0)
    # 61 GB of weights through two memories of 3.35 TB/s at 60%.
    assert costs.decode_step == pytest.approx(61.1e9 / (2 * 3350e9 * 0.6), rel=0.01)
    # 3 x 2 x 3.0 billion active parameters a token, attention on top, on 8 devices at 30% of 989 TFLOP/s.
    dense = 3 * 2 * 3.0e9 * (4608 / 4096) / (8 * 0.3 * 989e12)
    assert dense < costs.train_token < 1.5 * dense
    twice = estimate(config, replace(H100, tflops=2 * 989), Workload(4096, 512), 1.0)
    assert twice.train_token == pytest.approx(costs.train_token / 2)
    assert costs.publish == 1.0
    # 2 x 3.0 billion parameters on two devices, at half of their peak; where nothing is interrupted, nothing is.
    assert costs.recompute_token == pytest.approx(2 * 3.0e9 / (2 * 0.5 * 989e12), rel=0.1)
    drained = load_plan([*keys, "weights.interrupt=drain"])
    assert estimate(drained, H100, Workload(4096, 512), 1.0).recompute_token == 0.0


def test_the_table_has_a_row_for_each_setting_and_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hf_config(tmp_path, **QWEN3_30B)
    keys = ["recipe=pretrained", f"model.path='{tmp_path}'", "rollout=sglang", "parallel.expert=8", "rl.group_size=8"]
    config = load_plan([*keys, "rl.prompts_per_step=8", "buffer.max_staleness=1", "weights.every=2"])
    workload, bandwidths = Workload(512, 128), Bandwidths(50e9, 50e9)
    assert plan_run(config, run_dir=None, device=H100, workload=workload, bandwidths=bandwidths) == 0
    text = capsys.readouterr().out
    assert "8 devices train (parallel.expert=8 parallel.data=8), 1 engines of 1 sample" in text
    assert "responses of 512 on average, log-normal" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d+ +(\d+|drop) +\d+ ", line)]
    assert [(row[0], row[1]) for row in rows[:6]] == [
        *(("0", "1"), ("1", "1"), ("2", "1"), ("4", "1"), ("8", "1")),
        ("1", "16"),
    ]
    assert len(rows) == 14
    assert [row[2] for row in rows] == [*["1"] * 13, "2"]
    assert rows[0][5] == "1.00"
    assert all(row[-1].endswith("%") for row in rows)
    assert all(int(row[8]) <= int(row[0]) for row in rows if row[1] in ("1", "drop"))


def test_a_plan_of_episodes_says_what_it_assumes_of_their_turns(capsys: pytest.CaptureFixture[str]) -> None:
    config, bandwidths = load_plan(["recipe=laptop"]), Bandwidths(1e9, 1e9)
    steps: list[float] = []
    for turns in (1, 4):
        workload = Workload(40, 20, turns, tool_seconds=30.0, tool_tokens=5)
        plan_run(config, run_dir=None, device=H100, workload=workload, bandwidths=bandwidths)
        text = capsys.readouterr().out
        steps.append(float(re.findall(r"^ *0 +1 +1 +([\d.]+)", text, re.MULTILINE)[0]))
    assert "4 turns, between two of them 5 tokens and 30 s of the environment on average" in text
    assert steps[1] > steps[0] + 3 * 30


def test_a_calibrated_table_names_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    config = load_plan(["recipe=laptop", f"run_dir={tmp_path / 'new'}"])
    plan_run(config, run_dir=folder, device=H100, workload=Workload(1, 1), bandwidths=Bandwidths(1e9, 1e9))
    text = capsys.readouterr().out
    assert f"costs of 19 steps of {folder}" in text
    assert "lengths of 3 responses" in text
    assert "one token: 10 ms and 1 ms per response; a prompt: 2 ms; training: 0.5 s and 0.1 ms per token" in text


def test_responses_side_by_side_are_those_that_the_cache_of_a_server_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hf_config(tmp_path, **QWEN3_30B)
    keys = ["recipe=pretrained", f"model.path='{tmp_path}'", "rollout=sglang", "parallel.expert=8"]
    config = load_plan([*keys, "rollout.servers=4", "rollout.memory_share=0.8"])
    # 64 GiB less 57 of weights, at 96 KiB a token: 7.1 GiB, 77,600 tokens, sequences of 4608.
    assert fleet_on(config, H100, 4608).max_running == 16
    assert fleet_on(config, replace(H100, memory_gib=141), 4608).max_running == 132
    assert fleet_on(load_plan([*keys, "rollout.tensor=4"]), H100, 4608).max_running == 256, "no more than is asked for"
    with pytest.raises(ConfigError, match=r"rollout\.tensor: the weights of a server and the cache"):
        fleet_on(config, replace(H100, memory_gib=48), 4608)
    workload, bandwidths = Workload(512, 128), Bandwidths(50e9, 50e9)
    few = load_plan([*keys, "rl.prompts_per_step=8", "rl.group_size=8", "rollout.max_running=256"])
    plan_run(few, run_dir=None, device=H100, workload=workload, bandwidths=bandwidths)
    assert "sample 121 responses each (of 256: more do not fit the cache)" in capsys.readouterr().out


def test_the_compressed_cache_of_latent_attention_is_read_as_it_is(tmp_path: Path) -> None:
    write_hf_config(tmp_path, **DEEPSEEK_V3)
    model = [f"model.path='{tmp_path}'", "rollout.max_new_tokens=8192"]
    config = load_plan(["recipe=pretrained", *model, "rollout=sglang", "rollout.tensor=8", "parallel.expert=8"])
    rows = [estimate(config, H100, Workload(tokens, 0), 1.0).decode_row for tokens in (4096, 8192)]
    # 61 layers of 512 + 64 numbers of two bytes, on each of eight devices: 2048 more tokens through one memory.
    assert rows[1] - rows[0] == pytest.approx(2048 * 61 * 576 * 2 / (3350e9 * 0.6), rel=1e-6)


def test_colocated_servers_have_one_row_as_nothing_runs_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["recipe=laptop", "rollout=sglang", "rollout.memory_share=0.4"]
    workload, bandwidths = Workload(40, 20), Bandwidths(1e9, 1e9)
    for placement, staleness in (("colocated", {"0"}), ("disaggregated", {"0", "1", "2", "4", "8"})):
        config = load_plan([*keys, f"rollout.placement={placement}"])
        plan_run(config, run_dir=None, device=H100, workload=workload, bandwidths=bandwidths)
        text = capsys.readouterr().out
        rows = [line.split() for line in text.splitlines() if re.match(r" *\d+ +(\d+|drop) +\d+ ", line)]
        assert {row[0] for row in rows} == staleness
        assert ("more staleness needs rollout.placement=disaggregated" in text) == (placement == "colocated")


@pytest.mark.parametrize("name", ["tool-seconds", "tool-tokens"])
def test_tools_that_take_no_time_and_write_nothing_can_be_said(name: str, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser, "run")
    assert vars(parser.parse_args([f"--{name}=0"])) == vars(parser.parse_args([]))
    with pytest.raises(SystemExit):
        parser.parse_args([f"--{name}=-1"])
    assert f"--{name}: invalid not_negative value" in capsys.readouterr().err
