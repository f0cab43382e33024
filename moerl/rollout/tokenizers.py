"""Tokenizers of transformers: read from model directories, or trained for models that start from nothing. Runs in the
controller.

A trained one is byte-level BPE with every digit a token of its own, so that numbers of any length are read digit by
digit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moerl.config.schema import ModelConfig
from moerl.contract.ports import ChatTask, Task
from moerl.contract.tokenizer import num_ids
from moerl.errors import ConfigError
from moerl.machine.model_files import check_tokenizer

TOKENIZER_PROMPTS = 2000
"""Training prompts that a tokenizer is trained on."""

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: the chat template of a tokenizer for a new model whose task has messages."""


def make_tokenizer(task: Task, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer for a model that starts from nothing, on the task's own texts.

    Args:
        task: task whose first training prompts, with their solutions if it has them, are the training texts.
        vocab_size: entries of the tokenizer, at most.

    Raises:
        ConfigError: `vocab_size` does not hold the task's characters.
    """
    texts = task.tokenizer_texts(TOKENIZER_PROMPTS)
    chats = isinstance(task, ChatTask) and task.has_chats
    return build_tokenizer(texts, vocab_size, any_text=task.open_vocabulary, chats=chats)


def build_tokenizer(
    texts: Iterable[str], vocab_size: int, *, any_text: bool, chats: bool = False
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer; the same texts give the same tokenizer.

    Args:
        texts: texts that the tokenizer will have to encode, or a good sample of them.
        vocab_size: entries of the tokenizer, at most, `<pad>` (id 0) and `<eos>` (id 1) included.
        any_text: True adds all 256 bytes, so that every text can be encoded; False keeps to the characters of `texts`,
            and `encode_checked` refuses others.
        chats: True gives the tokenizer a chat template, and the end of a turn as its end (id 1).

    Raises:
        ConfigError: the characters alone need more entries than `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    # Typed as read-only properties by the library's stubs, documented as settable.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    end = TURN_END if chats else EOS_TOKEN
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, end, *([TURN_START] if chats else [])],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if any_text else [],
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            "the tokenizer's alphabet does not fit in its vocabulary",
            seen=f"{tokenizer.get_vocab_size()} entries without any merge",
            expected=f"at most {vocab_size}",
            remedy=f"set model.architecture.vocab_size={tokenizer.get_vocab_size()} or more",
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=end, clean_up_tokenization_spaces=False
    )
    if chats:
        made.chat_template = CHAT_TEMPLATE
    return made


def new_tokenizer(model: ModelConfig, task: Task) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model to build: that of `model.tokenizer`, or one trained on the texts of the task.

    Raises:
        ConfigError: the tokenizer cannot be read, has more ids than the model may have, or names no end of a response.
    """
    assert model.architecture is not None
    limit = model.architecture.vocab_size
    if model.tokenizer is None:
        return make_tokenizer(task, limit)
    tokenizer = read_tokenizer(model.tokenizer, "model.tokenizer")
    ids = num_ids(tokenizer)
    if ids > limit:
        raise ConfigError(
            "model.tokenizer: more ids than the model may have",
            seen=f"ids up to {ids - 1} in {model.tokenizer}",
            expected=f"at most model.architecture.vocab_size = {limit} ids",
            remedy=f"set model.architecture.vocab_size={ids} or more",
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model.tokenizer: it names no token that ends a response",
            seen=f"no eos_token in {model.tokenizer / 'tokenizer_config.json'}",
            expected="the token that demonstrations end with",
            remedy="set eos_token there",
        )
    return tokenizer


def read_tokenizer(folder: Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a directory.

    Args:
        key: the key that names the directory, for messages.

    Raises:
        ConfigError: the directory has no tokenizer that can be read.
    """
    check_tokenizer(folder, key)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises whatever its parsers do, plain `Exception` too
        raise ConfigError(
            f"{key}: {folder}: the tokenizer cannot be read",
            seen=" ".join(f"{type(error).__name__}: {error}".split())[:500],
            expected="a tokenizer that transformers reads",
            remedy="copy the files of the tokenizer into the directory again",
        ) from error


def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a Hugging Face directory; returns None if it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
