"""Runs with an option changed, and what the metrics then say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moerl_runs import DoneRun, Runs, Sums, rows
from user_losses import GRPO_BY_HAND

Steps = list[dict[str, Any]]


@pytest.fixture
def train(forked: Runs, tmp_path: Path) -> Callable[..., Steps]:
    """Runs `recipe=tiny` with overrides; returns its RL rows."""

    def run(*overrides: str) -> Steps:
        finished = forked.run("train", "recipe=tiny", f"run_dir='{tmp_path / 'run'}'", *overrides)
        assert finished.status == 0, finished.output
        return steps_of(tmp_path / "run")

    return run


def steps_of(run_dir: Path) -> Steps:
    return [row for row in rows(run_dir) if row["stage"] == "rl"]


@pytest.mark.slow
def test_without_sampling_masks_the_reported_mismatch_is_the_kept_mass(
    train: Callable[..., Steps], tmp_path: Path, tiny: DoneRun
) -> None:
    from moerl.contract.disk import read_parquet

    off = train("keep_sampling_mask.enabled=false")
    rollouts = read_parquet(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    logmass = np.concatenate([t.kept_logmass[t.sampled] for t in rollouts])
    assert off[0]["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(logmass).mean(), abs=1e-5)
    assert off[0]["mismatch/logprob_abs_max"] == pytest.approx(np.abs(logmass).max(), abs=1e-5)
    assert np.abs(logmass).mean() > 0.1
    on = steps_of(tiny.folder)
    assert on[0]["mismatch/logprob_abs_max"] < 1e-5
    assert on[1]["mismatch/experts/logprob_abs_mean"] == pytest.approx(off[1]["mismatch/logprob_abs_mean"], rel=0.01)


@pytest.mark.slow
def test_sampling_that_cuts_nothing_agrees_although_the_model_has_ids_that_are_never_sampled(
    train: Callable[..., Steps], tmp_path: Path
) -> None:
    import transformers

    for row in train("rollout.top_p=1.0", "rollout.top_k=null"):
        assert row["mismatch/logprob_abs_max"] < 1e-5
        assert "kept/size_mean" not in row
    model = tmp_path / "run" / "final_model"
    config, tokenizer = (
        getattr(transformers, f"Auto{name}").from_pretrained(model) for name in ("Config", "Tokenizer")
    )
    assert config.vocab_size > len(tokenizer)


@pytest.mark.slow
def test_without_replay_the_routers_disagree_and_nothing_is_verified(train: Callable[..., Steps]) -> None:
    off = train("keep_routing.mode=off", "rollout.dtype=bfloat16")
    for row in off:
        assert row["replay/rows_verified"] == 0
        assert row["mismatch/tokens_with_different_experts"] > 0
    table = {scorer: off[1][f"mismatch/{scorer}/logprob_abs_mean"] for scorer in ("both", "kept_sets", "neither")}
    assert off[1]["mismatch/logprob_abs_mean"] == table["kept_sets"]
    assert table["both"] < table["kept_sets"] < table["neither"]


def test_the_trainers_own_routing_is_kept_and_every_second_update_proved(
    train: Callable[..., Steps], tmp_path: Path
) -> None:
    changed = ("keep_routing.mode=trainer", "keep_routing.verify=2", "algorithm.kl_coef=0.1", "rollout.dtype=bfloat16")
    steps = train(*changed)
    assert [row["replay/updates_unproved"] for row in steps] == [(i + 1) % 2 for i in range(len(steps))]
    for row in steps:
        assert (row["replay/rows_verified"] == 0) == bool(row["replay/updates_unproved"])
        assert 0 < row["routing/disagreement"] < 0.5 < row["routing/jaccard"] < 1
        assert row["routing/margin_at_flips"] < row["routing/margin_elsewhere"]
    layers = [json.loads(line) for line in (tmp_path / "run" / "layers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in layers] == [row["step"] for row in steps]
    for row, layer in zip(steps, layers, strict=True):
        assert np.mean(layer["disagreement"]) == pytest.approx(row["routing/disagreement"])
        assert layer["live_rows"] == [0.0] * len(layer["disagreement"])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_change_nothing_and_are_verified_too(
    recompute: str, train: Callable[..., Steps], tiny: DoneRun
) -> None:
    verified = "replay/rows_verified"
    for row, expected in zip(train(f"trainer.recompute={recompute}"), steps_of(tiny.folder), strict=True):
        assert row.pop(verified) == 2 * expected.pop(verified)
        assert row == expected


@pytest.mark.slow
def test_a_trainer_in_bf16_runs(train: Callable[..., Steps]) -> None:
    for row in train("model.dtype=bfloat16", "rollout.dtype=bfloat16"):
        assert 0 < row["mismatch/logprob_abs_mean"] < 0.05
        assert row["replay/rows_verified"] > 0


@pytest.mark.slow
def test_small_microbatches_train_the_same(forked: Runs, tmp_path: Path) -> None:
    steps = []
    # The load-balancing loss is one of each microbatch.
    for tokens in (64, 2048):
        run = tmp_path / str(tokens)
        overrides = ("rl.moe_aux_loss_coef=0", "sft.moe_aux_loss_coef=0", f"trainer.microbatch_tokens={tokens}")
        finished = forked.run("train", "recipe=tiny", f"run_dir='{run}'", *overrides)
        assert finished.status == 0, finished.output
        steps.append(steps_of(run))
    for row, expected in zip(*steps, strict=True):
        assert row["replay/rows_verified"] == expected["replay/rows_verified"]
        assert row["reward/mean"] == expected["reward/mean"]
        assert row["mismatch/logprob_abs_max"] < 1e-5


@pytest.mark.slow
def test_minibatches_and_a_kl_change_the_updates(
    forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changed = ("rl.minibatches=", "algorithm.kl_coef=")
    arguments = [each for each in sums.train(run) if not each.startswith(changed)]
    finished = forked.run(*arguments, "rl.steps=2", path=[sums.folder])
    assert finished.status == 0, finished.output
    plain, both = steps_of(run), steps_of(undisturbed.folder)
    # The first batch is the same; only what is done with it differs.
    assert both[0]["reward/mean"] == plain[0]["reward/mean"]
    assert both[0]["policy/entropy"] == pytest.approx(plain[0]["policy/entropy"], abs=1e-5)
    assert both[0]["replay/rows_verified"] == plain[0]["replay/rows_verified"]
    assert both[0]["mismatch/logprob_abs_max"] < 1e-5
    assert both[0]["optimizer/lr"] == plain[0]["optimizer/lr"] == 1e-4
    assert both[0]["optimizer/grad_norm"] != plain[0]["optimizer/grad_norm"]
    assert both[1]["policy/entropy"] != pytest.approx(plain[1]["policy/entropy"], abs=1e-5)


@pytest.mark.slow
def test_a_kl_in_the_reward_is_that_of_the_weights_which_the_batch_met(
    train: Callable[..., Steps], tiny: DoneRun
) -> None:
    steps = train("algorithm.kl_coef=3.0", "algorithm.kl_in=reward", "optimizer.lr=1e-3", "rl.minibatches=2")
    # The first batch meets the reference itself.
    assert steps[0]["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert all(row["policy/kl_reference"] > 1e-4 for row in steps[1:])
    assert steps[0]["reward/mean"] == steps_of(tiny.folder)[0]["reward/mean"]
    assert all(row["mismatch/logprob_abs_max"] < 1e-5 for row in steps)


@pytest.mark.slow
def test_selected_responses_an_entropy_bonus_and_interpolated_log_probs_go_together(
    train: Callable[..., Steps], tmp_path: Path
) -> None:
    options = ("algorithm=dppo", "algorithm.entropy_coef=0.01", "algorithm.proximal=interpolated", "rl.minibatches=2")
    steps = train(*options, "rl.group_size=6", "rl.keep=4", "optimizer.lr=1e-3")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["filtered"]["not_kept"] == ledger["issued"] / 3
    assert ledger["trained"] == 2 * ledger["issued"] / 3
    for row in steps:
        assert row["policy/kl_reference"] == 0.0
        assert row["policy/weight_mean"] > 0.5
        # Of half of the batch, the rows are those of weights that have been updated once since they were sampled.
        assert row["mismatch/logprob_abs_max"] > 1e-5


def test_a_run_without_a_cold_start_begins_with_reinforcement_learning(
    train: Callable[..., Steps], tmp_path: Path
) -> None:
    assert [row["step"] for row in train("sft.steps=0")] == [1, 2, 3]
    assert not (tmp_path / "run" / "cold_start").exists()
    assert all(row["stage"] != "sft" for row in rows(tmp_path / "run"))


@pytest.mark.slow
def test_weights_through_disk_and_gathered_the_simple_way_make_the_same_run(
    train: Callable[..., Steps], tmp_path: Path, tiny: DoneRun
) -> None:
    from moerl.contract.weight_update import UpdateKind, WeightUpdate
    from moerl.machine.model_tensors import checkpoint_shapes
    from moerl.models.description import read_model
    from moerl.weights.disk import read_buckets, versions

    steps = train(
        "weights.transport=disk", "weights.gather=allgather", "weights.bucket_bytes=65536", "weights.verify=2"
    )
    plain = steps_of(tiny.folder)
    for name in ("reward/mean", "optimizer/grad_norm", "mismatch/logprob_abs_max"):
        assert [row[name] for row in steps] == [row[name] for row in plain]
    folder = tmp_path / "run" / "weights"
    assert versions(folder) == [len(steps) - 1, len(steps)]
    assert len(list((folder / f"version-{len(steps):08}").glob("*.safetensors"))) > 2
    model = tmp_path / "run" / "final_model"
    shapes = checkpoint_shapes(model, read_model(model).hf_config)
    assert list(read_buckets(folder, WeightUpdate(len(steps), UpdateKind.FULL, shapes)))


def test_a_loss_and_advantages_of_ones_own_that_are_grpo_make_the_same_run(
    forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    (tmp_path / "own_algorithm.py").write_text(GRPO_BY_HAND)
    options = "{clip_low: 0.2, clip_high: 0.28, importance_cap: 2.0, kl_coef: 0.01}"
    arguments = [each for each in sums.train(tmp_path / "run") if not each.startswith("algorithm.kl_coef=")]
    own = ("loss=own_algorithm:loss", "advantages=own_algorithm:advantages", "kl_support=kept")
    changed = ["algorithm=custom", f"algorithm.loss_options={options}", *(f"algorithm.{each}" for each in own)]
    finished = forked.run(*arguments, *changed, "rl.steps=2", path=[sums.folder, tmp_path])
    assert finished.status == 0, finished.output
    found, built_in = steps_of(tmp_path / "run"), steps_of(undisturbed.folder)[:2]
    assert found[1]["optimizer/grad_norm"] > 0
    assert found == built_in


@pytest.mark.slow
def test_a_built_model_takes_a_tokenizer_of_ones_own_and_needs_its_directory_no_more(
    train: Callable[..., Steps], forked: Runs, tmp_path: Path
) -> None:
    import transformers

    from moerl.rollout.tokenizers import build_tokenizer

    own = build_tokenizer(["0123456789+-*= "], 300, any_text=True, chats=True)
    own.save_pretrained(tmp_path / "own")
    train("sft.steps=1", "rl.steps=1", f"model.tokenizer='{tmp_path / 'own'}'")
    shutil.rmtree(tmp_path / "own")
    finished = forked.run("train", f"resume={tmp_path / 'run'}", "rl.steps=2")
    assert finished.status == 0, finished.output
    model = tmp_path / "run" / "final_model"
    trained = transformers.AutoTokenizer.from_pretrained(model)
    assert (trained.get_vocab(), trained.chat_template) == (own.get_vocab(), own.chat_template)
    config = transformers.AutoConfig.from_pretrained(model)
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (-(-len(own) // 8) * 8, 1, 0)
