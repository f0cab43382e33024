"""Contents of a run directory, read with common tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moerl_runs import DoneRun, Runs

FIGURES = (
    "logprob_abs_mean",
    "logprob_abs_max",
    "k3",
    "ratio_mean",
    "share_outside_tenth",
    "share_above_ln2",
    "tokens_with_different_experts",
    "layers_differing_per_token",
)


def metric_rows(run: DoneRun, stage: str) -> list[dict[str, float]]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == stage]


def test_the_resolved_configuration_loads_as_it_was(tiny: DoneRun) -> None:
    from moerl.config.load import load_config, load_resolved

    config = load_config(["recipe=tiny", f"run_dir='{tiny.folder}'"], command="train")
    assert load_resolved(tiny.folder / "config.yaml") == config


def test_a_clean_run_is_not_alarming_and_can_be_watched(tiny: DoneRun, capsys: pytest.CaptureFixture[str]) -> None:
    from moerl.cli import main
    from moerl.diagnostics.alerts import active_alerts

    rows = metric_rows(tiny, "rl")
    assert [row["alerts/active"] for row in rows] == [0, 0, 0]
    assert all(active_alerts(rows[:count]) == [] for count in range(4))
    assert "ALERT" not in tiny.finished.output
    assert main(["watch", str(tiny.folder)]) == 0
    text = capsys.readouterr().out
    assert "state        finished" in text
    assert "step         3 of 3" in text
    assert "alerts       no alerts" in text


def test_every_step_has_its_row_with_every_metric_of_its_stage(tiny: DoneRun) -> None:
    sft, rl, evaluation = (metric_rows(tiny, stage) for stage in ("sft", "rl", "evaluation"))
    assert [row["step"] for row in sft] == [1, 2, 3, 4]
    assert [row["step"] for row in rl] == [1, 2, 3]
    assert [row["step"] for row in evaluation] == [0, 2, 3]
    assert [row["tokens/trained"] for row in sft + rl] == sorted(row["tokens/trained"] for row in sft + rl)
    for row in sft:
        assert {"sft/loss", "optimizer/grad_norm", "optimizer/lr", "seconds/train"} <= row.keys()
    named = ("reward/mean", "accuracy/mean", "response/length_mean", "policy/entropy", "policy/clip_fraction")
    named += ("policy/ratio_p01", "policy/ratio_p50", "policy/ratio_p99", "kept/size_mean", "kept/size_p99")
    named += ("experts/load_max_over_mean", "throughput/tokens_per_second", "seconds/rollout", "seconds/step")
    named += ("policy/loss", "throughput/model_flops_per_second")
    for row in rl:
        assert {*named, *(f"mismatch/{figure}" for figure in FIGURES)} <= row.keys()
        assert row["replay/rows_verified"] > 0
        assert row["mismatch/logprob_abs_max"] < 1e-5
    assert {f"mismatch/{scorer}/k3" for scorer in ("neither", "kept_sets", "experts", "both")} <= rl[-1].keys()
    assert {"heldout/accuracy", "heldout/accuracy_worked", "accuracy/mean"} <= evaluation[0].keys()


def test_tensorboard_shows_the_rows_of_the_metrics_file(tiny: DoneRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stage in ("sft", "rl", "evaluation"):
        events = EventAccumulator(str(tiny.folder / "tensorboard" / stage))
        events.Reload()
        shown: dict[int, dict[str, float]] = {}
        names: Any = events.Tags()["scalars"]
        for name in names:
            for event in events.Scalars(name):
                shown.setdefault(event.step, {})[name] = event.value
        for row in metric_rows(tiny, stage):
            written = {name: value for name, value in row.items() if name not in ("stage", "step")}
            assert shown.pop(int(row["step"])) == pytest.approx(written, rel=1e-6)
        assert not shown


def test_the_summary_has_the_figures_of_the_run(tiny: DoneRun) -> None:
    summary = json.loads((tiny.folder / "summary.json").read_text())
    evaluation = metric_rows(tiny, "evaluation")
    assert summary["heldout_accuracy_cold_start"] == evaluation[0]["heldout/accuracy"]
    assert summary["heldout_accuracy_cold_start_worked"] == evaluation[0]["heldout/accuracy_worked"]
    assert summary["heldout_accuracy_final"] == evaluation[-1]["heldout/accuracy"]
    assert summary["steps"] == 3
    assert summary["tokens_trained"] == metric_rows(tiny, "rl")[-1]["tokens/trained"]
    assert summary["wall_seconds"] > 0
    assert summary["peak_rss_bytes"] > 100 * 2**20
    assert set(summary["mismatch"]) == {"neither", "kept_sets", "experts", "both"}
    assert set(summary["mismatch"]["neither"]) == {f"mismatch/{figure}" for figure in FIGURES}


def test_an_exported_checkpoint_and_the_final_model_load_in_transformers_with_the_same_logits(
    undisturbed: DoneRun, forked: Runs, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = tmp_path / "exported"
    finished = forked.run("export", str(undisturbed.folder), "--output", str(exported))
    assert finished.status == 0, finished.output
    assert f"1-rl-000005 written to {exported}" in finished.output
    ids = torch.arange(12)[None]
    logits = []
    for folder in (undisturbed.folder / "final_model", exported):
        assert AutoTokenizer.from_pretrained(folder).encode("1+2=")
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model).__name__ == "Qwen3MoeForCausalLM"
        assert model.dtype == torch.float32
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)
    cold = AutoModelForCausalLM.from_pretrained(undisturbed.folder / "cold_start")
    with torch.no_grad():
        assert not torch.equal(cold(ids).logits, logits[0])


def test_an_export_takes_the_step_it_is_asked_for_and_overwrites_nothing(
    undisturbed: DoneRun, forked: Runs, tmp_path: Path
) -> None:
    earlier = tmp_path / "earlier"
    assert forked.run("export", str(undisturbed.folder), "--step", "4", "--output", str(earlier)).status == 0
    weights = "model.safetensors"
    assert (earlier / weights).read_bytes() != (undisturbed.folder / "final_model" / weights).read_bytes()
    again = forked.run("export", str(undisturbed.folder), "--output", str(earlier))
    assert again.status == 2
    assert "--output: exists already" in again.output
    missing = forked.run("export", str(undisturbed.folder), "--step", "7", "--output", str(tmp_path / "no"))
    assert missing.status == 1
    assert "--step 7; there are 1-rl-000004, 1-rl-000005" in missing.output


def test_a_corrupt_checkpoint_is_not_exported(tiny: DoneRun, forked: Runs, tmp_path: Path) -> None:
    run = shutil.copytree(tiny.folder, tmp_path / "run")
    file = run / "checkpoints" / "1-rl-000003" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    asked = forked.run("export", str(run), "--step", "3", "--output", str(tmp_path / "no"))
    assert asked.status == 1
    assert "__0_0.distcp has" in asked.output
    assert not (tmp_path / "no").exists()
    newest = forked.run("export", str(run), "--output", str(tmp_path / "yes"))
    assert newest.status == 0, newest.output
    assert "WARNING: corrupt checkpoint left aside: 1-rl-000003: __0_0.distcp has" in newest.output
    assert "1-rl-000002 written to" in newest.output


@pytest.mark.slow
def test_a_run_that_takes_long_says_what_it_is_doing(forked: Runs, tmp_path: Path) -> None:
    quiet = {"place": "moerl.telemetry.progress:PART_SECONDS", "value": 0.005}
    finished = forked.run("train", "recipe=tiny", f"run_dir='{tmp_path / 'run'}'", fault=("set_value", quiet))
    assert finished.status == 0, finished.output
    for words in (
        r"^start of Megatron and the model  \ds so far$",
        r"^sft 1/4  training, microbatches \d of \d  ",
        r"^rl \d/3  rollouts \d+ of 16  ",
        r"^rl \d/3  training, microbatches \d of \d  ",
        r"evaluation, responses \d of 8  [\d,]+ tokens/s  \ds so far",
    ):
        assert re.search(words, finished.output, re.MULTILINE), words


def test_two_checkpoints_are_kept_and_nothing_half_written(tiny: DoneRun) -> None:
    names = sorted(path.name for path in (tiny.folder / "checkpoints").iterdir())
    assert names == ["1-rl-000002", "1-rl-000003"]
    # `.metadata` is the index of a checkpoint.
    assert {path.name for path in tiny.folder.rglob(".*")} == {".metadata"}
    assert not (tiny.folder / "quarantine").exists()


def test_no_file_is_empty_and_all_follow_the_umask(tiny: DoneRun) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in tiny.folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, f"{path}: {mode:o}"
        assert path.is_dir() or path.stat().st_size > 0, path


def test_dumped_rollouts_are_read_by_pandas_and_valid_for_the_contract(tiny: DoneRun) -> None:
    import pandas

    from moerl.contract.disk import read_parquet

    for step, row in enumerate(metric_rows(tiny, "rl"), start=1):
        path = tiny.folder / "rollouts" / f"step-{step:06d}.parquet"
        table = pandas.read_parquet(path)
        assert len(table) == 16
        assert table["reward_reward"].mean() == row["reward/mean"]
        assert table["num_sampled"].mean() == row["response/length_mean"]
        assert all(isinstance(text, str) for text in table["text"])
        assert all(prompt for prompt in table["prompt"])
        assert (table.groupby("prompt_id")["prompt"].nunique() == 1).all()
        trajectories = read_parquet(path)
        assert [t.lineage.rollout_id for t in trajectories] == list(table["rollout_id"])
        assert {int(t.policy_versions.max()) for t in trajectories} == {step - 1}
        assert all(t.routed.all() and t.truncated[t.sampled].all() for t in trajectories)


def test_every_curve_is_an_image_of_something(tiny: DoneRun) -> None:
    from matplotlib.image import imread

    for name in ("reward", "accuracy", "length", "mismatch", "curves"):
        pixels = imread(tiny.folder / "plots" / f"{name}.png")
        assert min(pixels.shape[:2]) > 200
        assert len(np.unique(pixels[..., :3].sum(2))) > 20


def test_the_last_lines_say_where_everything_is_and_what_was_learned(tiny: DoneRun) -> None:
    lines = tiny.finished.output.splitlines()[-14:]
    assert any(line.startswith("accuracy ") and "held-out problems" in line for line in lines)
    assert any(re.search(r"^  recorded routing, inside the kept sets +\S+e-\d\d +\S+e-\d\d$", line) for line in lines)
    assert f"run directory: {tiny.folder}" in lines
    curves = [line.removeprefix("curves: ") for line in lines if line.startswith("curves: ")]
    assert [Path(path).is_file() for path in curves] == [True]


def test_the_command_prints_no_warnings_and_no_tracebacks(undisturbed: DoneRun) -> None:
    for word in ("Warning", "WARNING", "Traceback", "W1"):
        assert word not in undisturbed.finished.output, undisturbed.finished.output
