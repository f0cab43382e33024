"""Tokens that end a response."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from moerl.config.schema import ArchitectureConfig
from moerl.contract.layers import select_layers
from moerl.contract.ports import Prompt, Task
from moerl.contract.quarantine import Quarantine
from moerl.contract.trajectory import FinishReason, SamplingParams
from moerl.errors import ConfigError
from moerl.models.description import read_model
from moerl.orchestration.ends import describe_ends, read_ends
from moerl.orchestration.rollouts import Collector
from moerl.rollout.factory import embedded_engine
from moerl.rollout.tokenizers import build_tokenizer, read_tokenizer
from moerl.tasks.rewards import at_once
from moerl.trainer.new_model import build_model

ARCHITECTURE = ArchitectureConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=16,
    max_positions=64,
    initializer_range=0.05,
    tie_word_embeddings=True,
    vocab_size=16,
)
EOS, TURN = 1, 5
"""The tokenizer's own end of text, and what a chat model ends its turn with."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose generation_config.json names two ends."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    build_model(ARCHITECTURE, build_tokenizer(["0123456789+="], 16, any_text=False), 0, folder)
    name_ends(folder, [TURN, EOS])
    return folder


def name_ends(folder: Path, ends: Any, file: str = "generation_config.json") -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | {"eos_token_id": ends}))


class Silent:
    """A task whose reward looks at nothing."""

    def reward(self, *_: object) -> Future[dict[str, float]]:
        return at_once({"reward": 0.0, "accuracy": 0.0})


def test_every_end_that_a_model_names_ends_its_responses(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(chat_model)
    model = read_model(chat_model).with_vocabulary(len(tokenizer))
    engine = embedded_engine(model, dtype="float32", max_running=32, version=0)
    ends = read_ends(chat_model, tokenizer, model.spec.vocab_size)
    layers = select_layers(engine.handshake(), model.num_layers, model.moe_layers)
    quarantine = Quarantine(tmp_path, 1.0, spec=model.spec)
    collector = Collector(engine, cast(Task, Silent()), tokenizer, quarantine, 24, layers, ends, print)
    prompts = [Prompt("p", "1+1=")]
    requests = collector.requests(prompts, run="t", count=32, sampling=SamplingParams(seed=3))
    last = set()
    for trajectory in collector.collect(prompts, requests, "t", trainer_version=0):
        response = trajectory.token_ids[trajectory.sampled].tolist()
        assert not set(ends) & set(response[:-1])
        assert (trajectory.finish_reason == FinishReason.STOP) == (response[-1] in ends)
        shown = response[:-1] if response[-1] in ends else response
        assert collector.response(trajectory) == tokenizer.decode(shown, clean_up_tokenization_spaces=False)
        last.add(response[-1])
    assert last.issuperset((EOS, TURN))


def test_the_tokenizers_own_end_comes_first_and_each_is_named_once(chat_model: Path) -> None:
    tokenizer = read_tokenizer(chat_model)
    ends = read_ends(chat_model, tokenizer, 14)
    assert ends == (EOS, TURN)
    assert describe_ends(ends, tokenizer) == f"a response ends with <eos> (1) or {tokenizer.decode([TURN])} (5)"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}<turn>\n{% endfor %}", (EOS, TURN)),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", (EOS,)),
        ("{{ raise_exception('a system prompt is needed') }}", (EOS,)),
    ],
    ids=["names an end", "names none", "wants more"],
)
def test_the_end_that_only_a_chat_template_names_counts_too(template: str, ends: tuple[int, ...], model: Path) -> None:
    tokenizer = build_tokenizer(["question moerl-answer"], 300, any_text=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = template
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    for name in ("config.json", "generation_config.json"):
        name_ends(model, None, name)
    expected = tuple(turn if end == TURN else end for end in ends)
    assert read_ends(model, tokenizer, len(tokenizer)) == expected


@pytest.fixture
def model(chat_model: Path, tmp_path: Path) -> Path:
    """Its settings alone, to change."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((chat_model / name).read_text())
    return tmp_path


class Endless:
    eos_token_id = None


def ends_of(folder: Path, tokenizer: Any = None) -> tuple[int, ...]:
    return read_ends(folder, cast(PreTrainedTokenizerBase, tokenizer or Endless()), 14)


def test_an_end_may_be_a_number_in_either_file_or_in_none(model: Path) -> None:
    name_ends(model, 7)
    name_ends(model, [3, 7], "config.json")
    assert ends_of(model) == (7, 3)
    (model / "generation_config.json").unlink()
    assert ends_of(model) == (3, 7)
    name_ends(model, None, "config.json")
    with pytest.raises(ConfigError, match="names no token that ends a response"):
        ends_of(model)


@pytest.mark.parametrize("ends", [14, -1, [1, 99], "2", [True], 2.0, {"a": 1}])
def test_an_end_that_is_no_token_is_refused_with_its_file(ends: Any, model: Path) -> None:
    name_ends(model, ends)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is not a token of the vocabulary"):
        ends_of(model)


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": \xff}'])
def test_a_damaged_file_of_settings_is_named(content: str, model: Path) -> None:
    (model / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        ends_of(model)
