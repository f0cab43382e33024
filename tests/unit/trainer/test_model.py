"""The model is the one of the Hugging Face directory: same log-probs, same tensors back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks
from safetensors.numpy import load_file

from moerl.config.megatron_names import MEGATRON_FIXED, MEGATRON_KEYS, MEGATRON_OPEN
from moerl.errors import ConfigError

LENGTHS = (5, 30, 17, 41, 9, 24)


def score_naturally(layout: Any, path: Path, batches: list[Any]) -> dict[str, Any]:
    from moerl.trainer.losses import Scorer

    trainer = tiny_moe.build(layout, path, optimizer=None)
    rows = trainer.score(batches, Scorer(batches, keep_mask=False), enforce=False)
    return {
        "logprobs": tiny_moe.by_sample(batches, [row.logprobs_T.numpy() for row in rows]),
        "weights": tiny_moe.exported(trainer),
    }


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_one_process_agrees_with_transformers_and_exports_what_it_loaded(
    model: str, one_process: Ranks, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    samples = tiny_moe.make_samples(3, LENGTHS)
    (batches,) = tiny_moe.pack(samples)
    assert len(batches) > 1
    (result,) = one_process.run(score_naturally, path, batches)
    judge = tiny_moe.Judge(path)
    for index, sample in enumerate(samples):
        with torch.no_grad():
            logits_TV = judge.logits(sample.trajectory.token_ids[:-1])
        expected_TV = tiny_moe.support_logprobs(logits_TV, sample, keep_mask=False)
        expected_T = tiny_moe.target_logprobs(expected_TV, sample).numpy()
        sampled_T = sample.trajectory.sampled[1:]
        np.testing.assert_allclose(result["logprobs"][index][sampled_T], expected_T[sampled_T], rtol=0, atol=1e-5)
    original = load_file(path / "model.safetensors")
    assert result["weights"].keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(result["weights"][name], tensor, err_msg=name)


def see_what_losses_get(layout: Any, path: Path, batches: list[Any]) -> list[tuple[Any, ...]]:
    from moerl.trainer.trainer import RowScores

    trainer = tiny_moe.build(layout, path, optimizer=None)
    seen = []

    def loss(hidden_tH: torch.Tensor, head: Any, microbatch: int) -> Any:
        seen.append((microbatch, tuple(hidden_tH.shape), tuple(head.weight_VpH.shape), head.shard.vocab_size))
        return hidden_tH.sum(), RowScores(torch.zeros(0), torch.zeros(0))

    trainer.score(batches, loss, enforce=False)
    return seen


def test_the_model_ends_before_its_head_so_that_no_logits_exist(tied: Path, one_process: Ranks) -> None:
    (batches,) = tiny_moe.pack(tiny_moe.make_samples(3, LENGTHS))
    (seen,) = one_process.run(see_what_losses_get, tied, batches)
    assert [microbatch for microbatch, *_ in seen] == list(range(len(batches)))
    for batch, (_, hidden, weight, vocab_size) in zip(batches, seen, strict=True):
        assert hidden == (batch.num_rows, weight[1])
        assert vocab_size == tiny_moe.SPEC.vocab_size <= weight[0]


def test_a_head_with_a_bias_is_refused() -> None:
    from moerl.trainer.model import _end_before_head

    last = torch.nn.Module()
    last.output_layer = torch.nn.Linear(4, 8)
    with pytest.raises(ConfigError, match="head has a bias"):
        _end_before_head(last)


def build_with(layout: Any, path: Path, passed: dict[str, Any]) -> Any:
    try:
        trainer = tiny_moe.build(layout, path, optimizer=None, megatron=passed)
    except ConfigError as error:
        return str(error)
    return {name: getattr(trainer.model.config, name) for name in passed}


def test_a_setting_that_is_passed_on_reaches_megatron(tied: Path, one_process: Ranks) -> None:
    passed = {"moe_deepep_num_sms": 8, "moe_per_layer_logging": True}
    assert one_process.run(build_with, tied, passed) == [passed]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("moe_deepep_num_smss", "Megatron has no such setting; .*did you mean moe_deepep_num_sms?"),
        ("provide", "Megatron has no such setting"),
        ("use_cpu_initialization", "set by moerl for this model on this machine; seen: 8; .* it is True"),
    ],
)
def test_a_setting_that_megatron_lacks_or_that_we_make_is_refused(
    name: str, said: str, tied: Path, one_process: Ranks
) -> None:
    (message,) = one_process.run(build_with, tied, {name: 8})
    assert re.match(rf"trainer\.megatron\.{name}: {said}", message)


def test_settings_that_megatron_refuses_together_are_an_error_of_the_configuration(
    tied: Path, one_process: Ranks
) -> None:
    (message,) = one_process.run(build_with, tied, {"overlap_p2p_comm_warmup_flush": True})
    assert message.startswith("trainer.megatron: Megatron refuses these settings")
    assert "seen: {'overlap_p2p_comm_warmup_flush': True}" in message


def settings_of_a_gpu(layout: Any, path: Path) -> set[str]:
    from moerl.models.description import read_model
    from moerl.trainer import model, platform, provider

    names = set[str]()
    for recompute in ("none", "selective", "full"):
        names |= model._settings(model.ModelOptions(recompute=recompute)).keys()  # pyright: ignore[reportPrivateUsage]
    names |= model._parallel_settings(layout.dims, 2).keys()  # pyright: ignore[reportPrivateUsage]
    names |= platform.gpu_overrides().keys()
    return names | provider.provider_settings(read_model(path), moe_aux_loss_coef=0.1, tensor=1).keys()


def test_every_setting_that_a_gpu_gets_is_refused_before_a_run_starts(tied: Path, one_process: Ranks) -> None:
    (names,) = one_process.run(settings_of_a_gpu, tied)
    assert names <= MEGATRON_KEYS.keys() | MEGATRON_FIXED.keys()


HOW_ALONE = {
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "persist_layer_norm",
}
"""Settings that bridges choose for a model and that say how it is computed, not what."""


def settings_of_bridges(layout: Any, configs: list[Any]) -> tuple[set[str], set[str]]:
    """Returns the names of all settings, and of those to which the bridge of a model gives a value of its own."""
    from dataclasses import fields

    from moerl.trainer.bridge import import_bridge, quiet

    auto_bridge = import_bridge()
    names, made = set[str](), set[str]()
    for config in configs:
        with quiet():
            provider = auto_bridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        plain = type(provider)(num_layers=1, hidden_size=8, num_attention_heads=1)
        every = {each.name for each in fields(provider)}
        names |= every
        made |= {name for name in every if repr(getattr(provider, name)) != repr(getattr(plain, name))}
    return names, made


def test_every_setting_of_megatron_stands_in_one_table_and_none_that_makes_the_model_can_be_passed_on(
    one_process: Ranks,
) -> None:
    configs = []
    for family in families.FAMILIES.values():
        config = family.config()
        config.architectures = [family.config_class.replace("Config", "ForCausalLM")]
        configs.append(config)
    ((names, made),) = one_process.run(settings_of_bridges, configs)
    tables = [*MEGATRON_KEYS, *MEGATRON_FIXED, *MEGATRON_OPEN]
    assert len(tables) == len(set(tables))
    # A key holds lower case alone; what begins with an underscore is not set from outside.
    assert set(tables) == {name for name in names if re.fullmatch(r"[a-z][a-z0-9_]*", name)}
    assert made & MEGATRON_OPEN == HOW_ALONE
