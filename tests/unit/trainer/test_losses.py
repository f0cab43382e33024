"""Keep Routing and Keep Sampling Mask against transformers with the same routes and brute-force kept sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks

from moerl.algorithms.policy import KLSupport
from moerl.batching.packing import PackOptions, pack_text_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import TextSample, TrainSample

LENGTHS = (5, 30, 17, 41, 9, 24)
MEGATRON_TO_HF = {
    "decoder.layers.{}.mlp.router.weight": "model.layers.{}.mlp.gate.weight",
    "decoder.layers.{}.self_attention.linear_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "decoder.layers.{}.self_attention.q_layernorm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "decoder.layers.{}.pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}


def assert_same_gradients(megatron: dict[str, np.ndarray], hf: dict[str, np.ndarray]) -> None:
    compared = 0
    for pattern, hf_pattern in MEGATRON_TO_HF.items():
        for layer in range(tiny_moe.SPEC.num_moe_layers):
            name, hf_name = pattern.format(layer), hf_pattern.format(layer)
            if name not in megatron:
                continue
            expected = hf[hf_name]
            assert np.abs(expected).max() > 1e-5, f"{hf_name} has no gradient to compare"
            actual = megatron[name][: len(expected)]
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-6, err_msg=name)
            compared += 1
    assert compared >= 4 * tiny_moe.SPEC.num_moe_layers


# --- scoring ---------------------------------------------------------------------------------------------------------


def score(layout: Any, path: Path, batches: list[Any]) -> list[dict[int, np.ndarray]]:
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(layout, path, optimizer=None)
    enforced = trainer.score(batches, Scorer(batches, keep_mask=True, with_full=True), enforce=True)
    natural = trainer.score(batches, Scorer(batches, keep_mask=True), enforce=False)
    open_set = trainer.score(batches, Scorer(batches, keep_mask=False), enforce=True)
    columns = (
        [row.logprobs_T.numpy() for row in enforced],
        [row.full_logprobs_T.numpy() for row in enforced],
        [row.logprobs_T.numpy() for row in natural],
        [row.logprobs_T.numpy() for row in open_set],
        [row.entropy_T.numpy() for row in enforced],
        [row.layers_differing_T.numpy() for row in enforced],
    )
    return [tiny_moe.by_sample(batches, values) for values in columns]


def test_forced_routes_and_kept_sets_agree_with_transformers_and_matter(untied: Path, one_process: Ranks) -> None:
    samples = tiny_moe.make_samples(4, LENGTHS)
    (batches,) = tiny_moe.pack(samples)
    ((enforced, full, natural, open_set, entropy, differing),) = one_process.run(score, untied, batches)
    judge = tiny_moe.Judge(untied)
    without_routes, without_mask = 0.0, 0.0
    for index, sample in enumerate(samples):
        trajectory = sample.trajectory
        rows = trajectory.sampled[1:]
        with torch.no_grad():
            logits_TV = judge.logits(trajectory.token_ids[:-1], trajectory.expert_ids)
        kept_TV = tiny_moe.support_logprobs(logits_TV, sample)
        expected_T = tiny_moe.target_logprobs(kept_TV, sample).numpy()
        np.testing.assert_allclose(enforced[index][rows], expected_T[rows], rtol=0, atol=1e-5)
        assert (enforced[index][~rows] == 0).all()
        open_TV = tiny_moe.support_logprobs(logits_TV, sample, keep_mask=False)
        expected_full_T = tiny_moe.target_logprobs(open_TV, sample).numpy()
        np.testing.assert_allclose(full[index][rows], expected_full_T[rows], rtol=0, atol=1e-5)
        np.testing.assert_allclose(open_set[index][rows], expected_full_T[rows], rtol=0, atol=1e-5)
        expected_entropy_T = -(kept_TV.exp() * kept_TV.masked_fill(kept_TV.isneginf(), 0.0)).sum(-1).numpy()
        np.testing.assert_allclose(entropy[index][rows], expected_entropy_T[rows], rtol=0, atol=1e-5)
        without_routes = max(without_routes, np.abs(natural[index] - enforced[index])[rows].max())
        without_mask = max(without_mask, np.abs(open_set[index] - enforced[index])[rows].max())
        assert (differing[index] <= tiny_moe.SPEC.num_moe_layers).all()
    assert without_routes > 1e-2
    assert without_mask > 1e-2
    assert np.concatenate(list(differing.values())).mean() > 1.0


# --- policy gradient -------------------------------------------------------------------------------------------------

KL_COEF = 0.3


def take_policy_step(
    layout: Any,
    path: Path,
    reference_path: Path,
    batches: list[Any],
    proximal: list[torch.Tensor],
    support: KLSupport,
    recompute: str = "none",
    reference_enforce: bool = True,
) -> dict[str, Any]:
    from policy_rows import grpo

    from moerl.trainer.losses import Reference

    optimizer = tiny_moe.OPTIMIZER.model_copy(update={"clip_grad": 0.0})
    trainer = tiny_moe.build(layout, path, optimizer=optimizer, recompute=recompute)
    reference = tiny_moe.build(layout, reference_path, optimizer=None)
    loss = tiny_moe.policy_loss(
        trainer,
        batches,
        tiny_moe.num_trained(batches),
        algorithm=grpo(kl_coef=KL_COEF, kl_support=support),
        proximal_logprobs=proximal,
        reference=Reference(reference, reference.last_hidden(batches, enforce=reference_enforce), support),
    )
    report = trainer.step(batches, loss, enforce=True)
    return {
        "loss": sum(float(row.losses_T.sum()) for row in report.rows) / loss.totals.num_tokens,
        "clipped": sum(int(row.clipped_T.sum()) for row in report.rows),
        "rows_verified": report.rows_verified,
        "load": report.expert_load_LE.numpy(),
        "gradients": tiny_moe.gradients(trainer),
        "grad_norm": report.update.grad_norm,
    }


def judge_policy_step(
    path: Path,
    reference_path: Path,
    samples: list[TrainSample],
    proximal: dict[int, np.ndarray],
    support: str,
    reference_enforce: bool = True,
) -> tuple[float, dict[str, np.ndarray]]:
    """GRPO with the exact KL over the given support, written down densely in float64 over transformers' logits."""
    judge, reference = tiny_moe.Judge(path), tiny_moe.Judge(reference_path)
    losses = []
    for index, sample in enumerate(samples):
        trajectory = sample.trajectory
        inputs = (trajectory.token_ids[:-1], trajectory.expert_ids)
        logits_TV = judge.logits(*inputs)
        logprobs_TV = tiny_moe.support_logprobs(logits_TV, sample)
        kl_logprobs_TV = tiny_moe.support_logprobs(logits_TV, sample, keep_mask=support == "kept")
        with torch.no_grad():
            theirs_TV = reference.logits(*(inputs if reference_enforce else inputs[:1]))
            reference_TV = tiny_moe.support_logprobs(theirs_TV, sample, keep_mask=support == "kept")
        logprobs_T = tiny_moe.target_logprobs(logprobs_TV, sample)
        proximal_T = torch.from_numpy(proximal[index]).double()
        rollout_T = torch.tensor(trajectory.rollout_logprobs[1:]).double()
        advantages_T = torch.tensor(sample.advantages[1:]).double()
        weights_T = (proximal_T - rollout_T).exp().clamp(max=2.0)
        ratio_T = (logprobs_T - proximal_T).exp()
        policy_T = -weights_T * torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.28) * advantages_T)
        inside = ~kl_logprobs_TV.isneginf()
        p_TV, q_TV = kl_logprobs_TV.masked_fill(~inside, 0.0), reference_TV.masked_fill(~inside, 0.0)
        kl_T = (inside * p_TV.exp() * (p_TV - q_TV)).sum(-1)
        losses.append((policy_T + KL_COEF * kl_T)[torch.tensor(trajectory.sampled[1:])])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), judge.gradients()


def policy_case(tmp_path: Path) -> tuple[Path, list[TrainSample], list[Any], list[torch.Tensor]]:
    """A reference model, samples, their batches, and proximal log-probs that differ from all others."""
    reference_path = tiny_moe.write_model(tmp_path / "reference", tied=False, seed=9)
    samples = tiny_moe.make_samples(5, LENGTHS)
    (batches,) = tiny_moe.pack(samples)
    rng = np.random.default_rng(6)
    proximal = [torch.from_numpy((batch.rollout_logprobs - 0.05).astype(np.float32)) for batch in batches]
    for tensor in proximal:
        tensor += torch.from_numpy(rng.normal(0, 0.5, len(tensor)).astype(np.float32))
    return reference_path, samples, batches, proximal


def test_grpo_with_exact_kl_equals_a_dense_brute_force_under_every_recompute_mode(
    untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    reference_path, samples, batches, proximal = policy_case(tmp_path)
    by_sample = tiny_moe.by_sample(batches, [tensor.numpy() for tensor in proximal])
    expected_loss, expected_gradients = judge_policy_step(untied, reference_path, samples, by_sample, "kept")
    num_rows = sum(len(sample.trajectory) - 1 for sample in samples)
    first = None
    for recompute, phases in (("none", 1), ("selective", 2), ("full", 2)):
        (result,) = one_process.run(take_policy_step, untied, reference_path, batches, proximal, "kept", recompute)
        first = first or result
        assert result["loss"] == pytest.approx(expected_loss, abs=1e-5)
        assert result["rows_verified"] == num_rows * tiny_moe.SPEC.num_moe_layers * phases
        assert (result["load"].sum(1) == num_rows * tiny_moe.SPEC.experts_per_token).all()
        assert_same_gradients(result["gradients"], expected_gradients)
        for name, gradient in first["gradients"].items():
            np.testing.assert_array_equal(result["gradients"][name], gradient, err_msg=f"{recompute}: {name}")
            assert "router" not in name or np.abs(gradient).max() > 1e-4
        squares = sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in result["gradients"].values())
        assert result["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)
    assert first is not None
    assert first["clipped"] > 0


def test_the_kl_over_the_whole_vocabulary_of_masked_tokens_equals_a_dense_brute_force(
    untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    reference_path, samples, batches, proximal = policy_case(tmp_path)
    by_sample = tiny_moe.by_sample(batches, [tensor.numpy() for tensor in proximal])
    expected_loss, expected_gradients = judge_policy_step(untied, reference_path, samples, by_sample, "full")
    other_loss, _ = judge_policy_step(untied, reference_path, samples, by_sample, "kept")
    (result,) = one_process.run(take_policy_step, untied, reference_path, batches, proximal, "full")
    assert abs(expected_loss - other_loss) > 1e-2
    assert result["loss"] == pytest.approx(expected_loss, abs=1e-5)
    assert_same_gradients(result["gradients"], expected_gradients)


def test_a_reference_may_choose_its_own_experts_while_the_policy_keeps_those_recorded(
    untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    reference_path, samples, batches, proximal = policy_case(tmp_path)
    by_sample = tiny_moe.by_sample(batches, [tensor.numpy() for tensor in proximal])
    expected_loss, expected_gradients = judge_policy_step(untied, reference_path, samples, by_sample, "kept", False)
    other_loss, _ = judge_policy_step(untied, reference_path, samples, by_sample, "kept", True)
    (result,) = one_process.run(take_policy_step, untied, reference_path, batches, proximal, "kept", "none", False)
    assert abs(expected_loss - other_loss) > 1e-3
    assert result["loss"] == pytest.approx(expected_loss, abs=1e-5)
    assert_same_gradients(result["gradients"], expected_gradients)


# --- supervised ------------------------------------------------------------------------------------------------------


def take_text_step(layout: Any, path: Path, batches: list[Any]) -> tuple[float, dict[str, np.ndarray]]:
    from moerl.trainer.losses import TextLoss

    optimizer = tiny_moe.OPTIMIZER.model_copy(update={"clip_grad": 0.0})
    trainer = tiny_moe.build(layout, path, optimizer=optimizer)
    loss = TextLoss(batches, trainer.spec.vocab_size, tiny_moe.num_trained(batches))
    report = trainer.step(batches, loss, enforce=False)
    return sum(float(row.losses_T.sum()) for row in report.rows) / loss.denominator, tiny_moe.gradients(trainer)


def test_the_supervised_loss_and_its_gradient_equal_transformers(untied: Path, one_process: Ranks) -> None:
    rng = np.random.default_rng(7)
    samples = []
    for length in LENGTHS:
        mask = np.arange(length) >= rng.integers(1, length)
        samples.append(TextSample(rng.integers(0, tiny_moe.SPEC.vocab_size, length, dtype=np.int32), mask))
    batches = pack_text_for_ranks(samples, 1, PackOptions(64, Padding(total=4)))[0]
    ((loss, gradients),) = one_process.run(take_text_step, untied, batches)
    judge = tiny_moe.Judge(untied)
    total, count = torch.zeros(()), 0
    for sample in samples:
        targets = torch.from_numpy(np.where(sample.loss_mask[1:], sample.token_ids[1:], -100).astype(np.int64))
        logits_TV = judge.logits(sample.token_ids[:-1])
        total = total + torch.nn.functional.cross_entropy(logits_TV, targets, reduction="sum")
        count += int(sample.loss_mask.sum())
    (total / count).backward()
    assert loss == pytest.approx(total.item() / count, abs=1e-5)
    assert_same_gradients(gradients, judge.gradients())


def test_proximal_log_probs_are_interpolated_by_the_updates_since_a_token_was_sampled() -> None:
    from moerl.trainer.losses import Drift

    trainer_T, rollout_T = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0, -2.0])
    # Sampled by the version that the batch met, one and three versions earlier; the last is of a prompt.
    found_T = Drift(version=5, updates_per_version=4, since=2).proximal(
        trainer_T, rollout_T, torch.tensor([5, 4, 2, -1])
    )
    expected = [-2.0, -2.0 + 4 / 6, -2.0 + 12 / 14, -2.0 + 24 / 26]
    assert found_T.tolist() == pytest.approx(expected)
