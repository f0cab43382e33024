"""slime: samples filled by its own code from SGLang's answers, then its two debug dumps."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.foreign_dumps.drawn import EXPERTS_PER_TOKEN, NUM_LAYERS, STEP, Conversation, meta_info
from scripts.golden.stand_ins import without_code_of

SOURCES = ("slime",)
REQUIRES = ("pybase64==1.4.3",)


def write(conversations: list[Conversation], folder: Path) -> None:
    """Writes the rollout dump and the train dump."""
    types: Any = importlib.import_module("slime.utils.types")
    rollout_data: Any = importlib.import_module("slime.observability.rollout_data_utils")
    args = SimpleNamespace(num_layers=NUM_LAYERS, moe_router_topk=EXPERTS_PER_TOKEN)
    samples = [_sample(types.Sample, args, each, index) for index, each in enumerate(conversations)]
    rollout_data.save_debug_rollout_data(str(folder / "rollout.pt"), samples, rollout_id=STEP, evaluation=False)
    _write_train(rollout_data, samples, conversations, folder / "train.pt")


def _sample(kind: Any, args: Any, conversation: Conversation, index: int) -> Any:
    sample = kind(group_index=7, index=index, prompt=conversation.prompt_text, tokens=list(conversation.prompt))
    for number, answer in enumerate(conversation.answers):
        if number:
            sample.append_response_tokens(args, tokens=conversation.tools[number - 1], trainable=False, text=" tool ")
        sample.append_response_tokens(
            args,
            tokens=answer.tokens,
            log_probs=answer.logprobs,
            meta_info=meta_info(conversation, number, ("top_p_token_ids", "top_p_token_offsets")),
            text=answer.text,
        )
    sample.reward = 1.0
    return sample


def _write_train(rollout_data: Any, samples: list[Any], conversations: list[Conversation], path: Path) -> None:
    """Writes the train dump that slime's only rank has after a step."""
    without_code_of("slime.backends", "slime.backends.megatron_utils")
    train_data: Any = importlib.import_module("slime.observability.train_data_utils")
    parallel: Any = importlib.import_module("megatron.core.parallel_state")
    columns: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "rollout_top_p_token_ids": [sample.rollout_top_p_token_ids for sample in samples],
        "rollout_top_p_token_offsets": [sample.rollout_top_p_token_offsets for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "partition": list(range(len(samples))),
        "raw_reward": [sample.reward for sample in samples],
    }
    rollout_data.tensorize_rollout_data_for_training(columns)
    columns["log_probs"] = [
        torch.tensor(each.trainer_logprobs[len(each.prompt) :], dtype=torch.float32) for each in conversations
    ]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel.initialize_model_parallel()
        args = SimpleNamespace(save_debug_train_data=str(path))
        train_data.save_debug_train_data(args, rollout_id=STEP, rollout_data=columns)
    finally:
        parallel.destroy_model_parallel()
        torch.distributed.destroy_process_group()
