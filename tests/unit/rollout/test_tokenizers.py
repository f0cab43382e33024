"""The tokenizer for models that start from nothing."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moerl.contract.tokenizer import encode_checked
from moerl.errors import ConfigError
from moerl.rollout.tokenizers import build_tokenizer, make_tokenizer
from moerl.tasks.chain_sum import ChainSumTask, ChainSumTaskConfig
from moerl.tasks.jsonl import JsonlTaskConfig


@pytest.fixture(scope="module")
def task() -> ChainSumTask:
    return ChainSumTask(
        ChainSumTaskConfig(
            name="chain_sum",
            min_terms=4,
            max_terms=7,
            min_digits=1,
            max_digits=1,
            num_train=8000,
            worked_probability=dict.fromkeys(range(4, 8), 0.5),
        )
    )


@pytest.fixture(scope="module")
def tokenizer(task: ChainSumTask) -> PreTrainedTokenizerFast:
    return make_tokenizer(task, 512)


def test_the_texts_of_the_task_survive_encoding(task: ChainSumTask, tokenizer: PreTrainedTokenizerFast):
    for split in ("train", "dev", "heldout"):
        for prompt in task.prompts(split, 200):
            for text in (prompt.text, task.worked_solution(prompt), task.bare_answer(prompt)):
                assert tokenizer.decode(encode_checked(tokenizer, text)) == text


def test_the_vocabulary_of_the_sums_is_small_and_starts_with_pad_and_eos(tokenizer: PreTrainedTokenizerFast):
    assert len(tokenizer) < 100
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast):
    assert len(encode_checked(tokenizer, "7024")) == 4


def test_the_work_prefix_is_made_of_the_tokens_that_start_the_worked_solution(
    task: ChainSumTask, tokenizer: PreTrainedTokenizerFast
):
    for prompt in task.prompts("train", 100):
        prefix = encode_checked(tokenizer, task.work_prefix(prompt))
        assert encode_checked(tokenizer, task.worked_solution(prompt))[: len(prefix)] == prefix


def test_a_saved_tokenizer_is_loaded_as_it_was(tokenizer: PreTrainedTokenizerFast, task: ChainSumTask, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    text = task.worked_solution(task.prompts("train", 1)[0])
    assert encode_checked(loaded, text) == encode_checked(tokenizer, text)
    assert loaded.decode(encode_checked(loaded, text)) == text


def test_the_same_texts_give_the_same_tokenizer(task: ChainSumTask, tokenizer: PreTrainedTokenizerFast):
    again = make_tokenizer(task, 512)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("text", ["what? @", "caf\u00e9", "\u4e09"])
def test_a_text_outside_the_alphabet_is_refused_and_not_shortened(tokenizer: PreTrainedTokenizerFast, text: str):
    with pytest.raises(
        ConfigError, match=r"are lost.*remedy: clean the text, or start from a model .* \(model\.path\)"
    ):
        encode_checked(tokenizer, text)


@pytest.mark.parametrize("text", ["what? @", "caf\u00e9", "\u4e09 + \U0001f600", " a  b\t\r\n", "1 ,2 n't"])
def test_a_tokenizer_for_any_text_encodes_any_text(text: str):
    tokenizer = build_tokenizer(["abc"], 300, any_text=True)
    assert tokenizer.decode(encode_checked(tokenizer, text)) == text


def test_a_vocabulary_too_small_for_the_alphabet_is_refused():
    with pytest.raises(ConfigError, match=r"seen: 258 entries.*at most 257.*set model\.architecture\.vocab_size=258"):
        build_tokenizer(["abc"], 257, any_text=True)


def test_a_tokenizer_for_rows_of_a_file_encodes_any_text(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(20)))
    config = JsonlTaskConfig(
        name="jsonl",
        path=path,
        reward="ones:reward",
        prompt_key="prompt",
        response_key=None,
        heldout_fraction=0.1,
        dev_fraction=0.1,
        reward_workers=1,
        reward_timeout_seconds=20.0,
        reward_memory_bytes=1 << 32,
    )
    with closing(config.open()) as task:
        tokenizer = make_tokenizer(task, 400)
    assert tokenizer.decode(encode_checked(tokenizer, "\u00fcber 12")) == "\u00fcber 12"
