"""A small tokenizer for models that start from nothing, and checked encoding. Runs in the controller.

Byte-level BPE with every digit a token of its own, so that numbers of any length are read digit by digit.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moerl.contract.ports import ChatTask, Task
from moerl.errors import ConfigError

TOKENIZER_PROMPTS = 2000
"""Training prompts that a tokenizer is trained on."""

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
PAD_ID = 0
EOS_ID = 1

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
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    if chats:
        made.chat_template = CHAT_TEMPLATE
    return made


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns how many ids a model needs for a tokenizer: one more than its largest. Ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def encode_checked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a text, without added special tokens; markup of special tokens inside the text becomes
    these tokens.

    Raises:
        ConfigError: decoding does not give the text back, so characters were dropped or changed.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded != _normalised(tokenizer, text):
        lost = sorted(set(text) - set(decoded))
        raise ConfigError(
            f"the tokenizer cannot represent a text ({len(text)} characters)",
            seen=f"characters {lost} are lost" if lost else f"it decodes to {decoded[:80]!r}",
            expected=f"{text[:80]!r}",
            remedy="clean the text, or start from a model whose tokenizer knows these characters (model.path)",
        )
    return ids


def _normalised(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Returns the text as the tokenizer's own normaliser (Unicode NFC in some models) writes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    return text if normalizer is None else normalizer.normalize_str(text)
