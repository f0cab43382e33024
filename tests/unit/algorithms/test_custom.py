"""A loss and advantages of the user's own: found by name, checked, and called with what the trainer has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_rows import grpo, policy_rows, rewarded_batch
from user_losses import GRPO_BY_HAND

from moerl.algorithms.custom import Custom
from moerl.algorithms.policy import PolicyLoss
from moerl.config.load import load_config
from moerl.errors import ConfigError
from moerl.user_function import load_function

OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 2.0, "kl_coef": 0.1}
BATCH = rewarded_batch([1.0, 0.0, 0.25, 1.0, 0.5, 1.0, 1.0], [0, 0, 0, 1, 1, 2, 2], [3, 4, 5, 6, 7, 8, 9])


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which is looked at for modules; nothing imported from it stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    load_function.cache_clear()
    return tmp_path


def custom(**changes: Any) -> Custom:
    values = {"name": "custom", "loss": "own:loss", "loss_options": {}, "advantages": None, "advantages_options": {}}
    values |= {"scores": []}
    return Custom.model_validate({**values, "kl_support": None, **changes})


def test_grpo_written_by_hand_has_the_digits_of_the_built_in(own: Path) -> None:
    (own / "own.py").write_text(GRPO_BY_HAND)
    by_hand = custom(loss_options=OPTIONS, advantages="own:advantages", kl_support="kept")
    built_in = grpo(kl_coef=0.1)
    by_hand.load()
    generator = torch.Generator().manual_seed(4)
    trainer, proximal, rollout, advantages, kl = torch.randn(5, 40, generator=generator)
    mask = torch.rand(40, generator=generator) < 0.7
    given: dict[str, Any] = {
        "proximal_T": proximal,
        "rollout_T": rollout,
        "advantages_T": advantages,
        "mask_T": mask,
        "kl_T": kl,
    }
    found = []
    for algorithm in (by_hand, built_in):
        leaf = trainer.clone().requires_grad_()
        result = algorithm.compute_loss(policy_rows(leaf, **given))
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        assert result.clipped_T is not None
        found.append((result.loss.item(), gradient.tolist(), result.clipped_T.tolist()))
    assert found[0] == found[1]
    assert algorithm.reference_kl == "kept"
    assert by_hand.compute_advantages(BATCH).tolist() == built_in.compute_advantages(BATCH).tolist()


def test_without_advantages_of_ones_own_those_of_grpo_are_taken() -> None:
    assert custom().compute_advantages(BATCH).tolist() == grpo().compute_advantages(BATCH).tolist()


@pytest.mark.parametrize(
    ("text", "name", "seen"),
    [
        (None, "own:loss", "no module own"),
        ("", "own.inner:loss", "no module own.inner"),
        ("def lost(rows): ...", "own:loss", "own.py defines no loss"),
        ("def loss(rows:", "own:loss", "SyntaxError"),
    ],
)
@pytest.mark.parametrize("key", ["loss", "advantages"])
def test_a_function_that_is_not_there_is_refused_before_anything_is_imported(
    key: str, text: str | None, name: str, seen: str, own: Path
) -> None:
    (own / "right.py").write_text("def loss(rows): ...")
    if text is not None:
        (own / "own.py").write_text(f"raise AssertionError('imported')\n{text}\n")
    overrides = [f"algorithm.{key}={name}"] + (["algorithm.loss=right:loss"] if key != "loss" else [])
    with pytest.raises(ConfigError) as caught:
        load_config(["recipe=tiny", "algorithm=custom", *overrides], command="train")
    assert f"algorithm.{key}: cannot import {name}; seen: " in str(caught.value)
    assert seen in str(caught.value)


def test_a_function_in_a_package_or_imported_from_elsewhere_is_found_without_running_it(own: Path) -> None:
    (own / "folder").mkdir()
    (own / "folder" / "__init__.py").write_text("raise AssertionError('imported')")
    (own / "folder" / "losses.py").write_text("from elsewhere import loss\nif True:\n    advantages = None\n")
    overrides = ["algorithm.loss=folder.losses:loss", "algorithm.advantages=folder.losses:advantages"]
    config = load_config(["recipe=tiny", "algorithm=custom", *overrides], command="train")
    with pytest.raises(ConfigError, match=r"algorithm\.loss: cannot import folder\.losses:loss; seen: AssertionError"):
        config.algorithm.load()


def test_names_that_are_no_functions_and_keys_of_another_algorithm_are_refused() -> None:
    for override, message in (
        ("loss=own", "algorithm.loss: not the name of a function"),
        ("clip_low=0.1", "algorithm.clip_low: not a key of algorithm custom; expected: algorithm=grpo"),
        ("name=ppo", "algorithm.name: unknown algorithm; seen: ppo; expected: 'grpo', 'gspo',"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(
                ["recipe=tiny", "algorithm=custom", "algorithm.loss=a:b", f"algorithm.{override}"], command="train"
            )
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"algorithm\.loss: no value given"):
        load_config(["recipe=tiny", "algorithm=custom"], command="train")


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("return 0.5", "0.5; expected: a PolicyLoss"),
        ("return PolicyLoss(rows.trainer_logprobs_T)", "expected: a scalar with a gradient"),
        ("return PolicyLoss(rows.trainer_logprobs_T.detach().sum())", "expected: a scalar with a gradient"),
    ],
)
def test_what_is_no_loss_is_refused(body: str, seen: str, own: Path) -> None:
    (own / "own.py").write_text(f"from moerl.algorithms.toolbox import PolicyLoss\ndef loss(rows):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        custom().compute_loss(policy_rows(torch.zeros(2, requires_grad=True)))
    assert "algorithm.loss: own:loss returned something else" in str(caught.value)
    assert seen in str(caught.value)


@pytest.mark.parametrize("body", ["batch.rewards_B[:2]", "batch.num_tokens_B", "batch.rewards_B / 0", "[0.0] * 7"])
def test_what_are_no_advantages_is_refused(body: str, own: Path) -> None:
    (own / "own.py").write_text(f"def advantages(batch):\n    return {body}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.advantages: own:advantages returned something else"):
        custom(advantages="own:advantages").compute_advantages(BATCH)


def test_advantages_may_be_one_per_sampled_token(own: Path) -> None:
    (own / "own.py").write_text(
        "def advantages(batch):\n    return batch.rewards_B.repeat_interleave(batch.num_tokens_B) / 2\n"
    )
    found = custom(advantages="own:advantages").compute_advantages(BATCH)
    assert found.tolist() == [0.5] * 3 + [0.0] * 4 + [0.125] * 5 + [0.5] * 6 + [0.25] * 7 + [0.5] * 17


def test_advantages_with_a_gradient_count_by_their_values(own: Path) -> None:
    (own / "own.py").write_text("def advantages(batch):\n    return batch.rewards_B.double().requires_grad_() * 2\n")
    found = custom(advantages="own:advantages").compute_advantages(BATCH)
    assert (found.dtype, found.requires_grad, found[0].item()) == (torch.float32, False, 2.0)


@pytest.mark.parametrize("names", [["teacher", "teacher"], [""], [str(i) for i in range(65)]])
def test_names_of_scores_that_no_rollout_can_have_are_refused(names: list[str], own: Path) -> None:
    (own / "own.py").write_text("def loss(rows): ...")
    with pytest.raises(ConfigError, match=r"algorithm\.scores: .* expected: at most 64 different names"):
        custom(scores=names).check(group_size=4, minibatches=1)


def test_a_file_in_the_current_directory_does_not_take_the_place_of_a_library(own: Path) -> None:
    (own / "fractions.py").write_text("def gcd(rows): ...")
    with pytest.raises(ConfigError, match="defines no gcd"):
        custom(loss="fractions:gcd").check(group_size=4, minibatches=1)


def test_settings_of_algorithms_are_read_without_torch() -> None:
    code = "import sys, moerl.algorithms.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_policy_loss_needs_no_more_than_the_loss() -> None:
    assert PolicyLoss(torch.zeros(())).clipped_T is None
