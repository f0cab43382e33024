"""miles: samples filled by its own code from SGLang's answers, then its rollout dump, columns and train dump."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.foreign_dumps.drawn import NUM_LAYERS, STEP, Conversation, meta_info
from scripts.golden.stand_ins import stand_in_for

SOURCES = ("miles",)
REQUIRES = ("pybase64==1.4.3", "polars==1.35.2", "polars-runtime-32==1.35.2")


def write(conversations: list[Conversation], folder: Path) -> None:
    """Writes the rollout dump, the columns and one rank's train dump."""
    stand_in_for("openai", "sglang", "sglang_router")
    types: Any = importlib.import_module("miles.utils.types")
    debug_data: Any = importlib.import_module("miles.ray.rollout.debug_data")
    train_dump: Any = importlib.import_module("miles.utils.train_dump_utils")
    args = SimpleNamespace(
        num_layers=NUM_LAYERS,
        sglang_speculative_algorithm=None,
        save_debug_rollout_data=str(folder / "rollout_data" / "{rollout_id}.pt"),
        save_debug_train_data=str(folder / "train_data" / "{rollout_id}_{rank}.pt"),
        save_debug_trajectory_data=None,
        qkv_format="thd",
    )
    samples = [asyncio.run(_sample(types.Sample, args, each, index)) for index, each in enumerate(conversations)]
    debug_data.save_debug_rollout_data(args, samples, STEP, evaluation=False, metadata={})
    columns = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in samples],
        "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) for sample in samples],
        "log_probs": [torch.tensor(each.trainer_logprobs[len(each.prompt) :]) for each in conversations],
        "sample_indices": [sample.index for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
    }
    train_dump.save_debug_train_data_for_rank(args, rollout_id=STEP, rollout_data=columns, rank=0)


async def _sample(kind: Any, args: Any, conversation: Conversation, index: int) -> Any:
    endpoint: Any = importlib.import_module("miles.rollout.generate_utils.generate_endpoint_utils")
    tools: Any = importlib.import_module("miles.rollout.generate_utils.tool_call_utils")
    sample = kind(group_index=7, index=index, prompt=conversation.prompt_text)
    for number, answer in enumerate(conversation.answers):
        if number:
            _add_tool(tools, sample, conversation.tools[number - 1])
        output = {"text": answer.text, "meta_info": meta_info(conversation, number)}
        payload = {"input_ids": list(conversation.prompt)}
        await endpoint.update_sample_from_response(args, sample, payload, output, update_loss_mask=True)
    sample.reward = 1.0
    sample.validate()
    return sample


def _add_tool(tools: Any, sample: Any, tokens: list[int]) -> None:
    """The tokens are drawn, not those of a template, so its own function gets them in place of the template's."""
    tools.tokenize_tool_responses = lambda *_, **__: list(tokens)
    tools.update_sample_with_tool_responses(sample, [], tokenizer=SimpleNamespace(decode=lambda _: " tool "))
