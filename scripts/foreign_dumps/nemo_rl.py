"""NeMo-RL: its flattening of message logs, and its logger of batches."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from scripts.foreign_dumps.drawn import STEP, Conversation
from scripts.golden.stand_ins import stand_in_for

SOURCES = ("nemo_rl",)
REQUIRES = ()

_TRACKERS = ("mlflow", "swanlab", "wandb", "prometheus_client", "ray")
_OFF = dict.fromkeys(
    ("wandb_enabled", "swanlab_enabled", "tensorboard_enabled", "mlflow_enabled", "monitor_gpus"), False
)


def write(conversations: list[Conversation], folder: Path) -> None:
    """Writes the train data of a step."""
    stand_in_for(*_TRACKERS)
    logger: Any = importlib.import_module("nemo_rl.utils.logger")
    messages: Any = importlib.import_module("nemo_rl.data.llm_message_utils")
    flat, lengths = messages.batched_message_log_to_flat_message(
        [_messages(each) for each in conversations],
        pad_value_dict={"token_ids": 0},
        make_sequence_length_divisible_by=8,
    )
    width = flat["token_ids"].shape[1]
    trained = [each.trainer_logprobs + [0.0] * (width - len(each.trainer_logprobs)) for each in conversations]
    # The names under which its GRPO logs them.
    columns = {
        "content": flat["content"],
        "rewards": [1.0] * len(conversations),
        "input_lengths": lengths.tolist(),
        "token_ids": flat["token_ids"].tolist(),
        "token_loss_mask": flat["token_loss_mask"].tolist(),
        "sample_loss_mask": [1.0] * len(conversations),
        "advantages": flat["token_loss_mask"].float().tolist(),
        "generation_logprobs": flat["generation_logprobs"].tolist(),
        "prev_logprobs": torch.tensor(trained).tolist(),
    }
    logger.Logger({"log_dir": str(folder), **_OFF}).log_batched_dict_as_jsonl(columns, f"train_data_step{STEP}.jsonl")


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    log = []
    for number, (answer, tokens) in enumerate(conversation.spans()):
        role = "assistant" if answer else "environment" if number else "user"
        content = answer.text if answer else " tool " if number else conversation.prompt_text
        log.append(
            {
                "role": role,
                "content": content,
                "token_ids": torch.tensor(tokens),
                "token_loss_mask": torch.full((len(tokens),), int(answer is not None)),
                "generation_logprobs": torch.tensor(answer.logprobs if answer else [0.0] * len(tokens)),
            }
        )
    return log
