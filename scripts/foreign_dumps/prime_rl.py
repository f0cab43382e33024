"""prime-rl: turns committed to traces of verifiers, its monitor of files, and its export of tokens."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.foreign_dumps.drawn import STEP, Conversation
from scripts.golden.stand_ins import stand_in_for, without_code_of

SOURCES = ("prime_rl/src", "prime_rl/packages/prime-rl-configs/src")
REQUIRES = ("verifiers==0.4.0", "orjson==3.13.0", "beartype==0.22.9", "jaxtyping==0.3.11")
WITH_DEPENDENCIES = True


def write(conversations: list[Conversation], folder: Path) -> None:
    """Writes the traces of a step that were trained on, and the export of their tokens."""
    stand_in_for("wandb")
    importlib.import_module("prime_rl")
    without_code_of("prime_rl.monitors", "prime_rl.trainer", "prime_rl.trainer.rl")
    verifiers: Any = importlib.import_module("verifiers.v1")
    monitor: Any = importlib.import_module("prime_rl.monitors.file")
    files = monitor.FileMonitor(monitor.FileMonitorConfig())
    episodes = [_episode(verifiers, each, number) for number, each in enumerate(conversations)]

    async def log() -> None:
        await files.init(output_dir=folder)
        await files.log(episodes, step=STEP, kind="train", subset="effective")

    asyncio.run(log())
    files.file.close()
    files.path.unlink()
    _export(conversations, folder)


def _episode(verifiers: Any, conversation: Conversation, number: int) -> Any:
    graph: Any = importlib.import_module("verifiers.v1.graph")
    traces: Any = importlib.import_module("verifiers.v1.trace")
    agents: Any = importlib.import_module("verifiers.v1.configs.agent")
    tasks: Any = importlib.import_module("verifiers.v1.task")
    task = traces.TraceTask(type="Task", data=tasks.WireTaskData(prompt=conversation.prompt_text, idx=number))
    trace = verifiers.WireTrace(
        id=f"trace-{number}", task=task, agent=traces.AgentInfo(config=agents.WireAgentConfig()), ok=True
    )
    _commit(graph, trace, conversation)
    versions = [answer.version for answer in conversation.answers]
    episode = verifiers.WireEpisode(id=f"episode-{number}", task=task, ok=True, traces=[trace])
    episode.group = verifiers.GroupInfo(id="7")
    work = verifiers.TrainWorkInfo(step=STEP, policy=verifiers.PolicySpan(start=min(versions), end=max(versions)))
    episode.record_run(verifiers.TrainRunInfo(id="run", work=work))
    return episode


def _commit(graph: Any, trace: Any, conversation: Conversation) -> None:
    """Turn for turn, as its clients do."""
    types: Any = importlib.import_module("verifiers.v1.types")
    messages, spans, tokens = list[Any](), list[tuple[int, int]](), list[int]()
    for answer, span in conversation.spans():
        if answer is None:
            text = " tool " if messages else conversation.prompt_text
            messages.append(types.UserMessage(content=text))
            spans.append((len(tokens), len(tokens) + len(span)))
        else:
            message = types.AssistantMessage(content=answer.text)
            counted = types.TurnTokens(
                prompt_ids=list(tokens),
                completion_ids=list(answer.tokens),
                completion_logprobs=list(answer.logprobs),
                message_spans=list(spans),
            )
            reply = types.Response(
                id="0", created=0, model="m", message=message, finish_reason=answer.finish, tokens=counted
            )
            graph.prepare_turn(trace, list(messages)).commit(reply)
            messages.append(message)
            spans.append((len(tokens), len(tokens) + len(span)))
        tokens += span


def _export(conversations: list[Conversation], folder: Path) -> None:
    """All conversations in one packed row, as its trainer has them, with padding behind."""
    exporter: Any = importlib.import_module("prime_rl.trainer.rl.token_export")
    lengths = [len(each.tokens) for each in conversations]
    padding = -sum(lengths) % 8
    masks = [answer is not None for each in conversations for answer, span in each.spans() for _ in span]
    sampled = [
        value
        for each in conversations
        for answer, span in each.spans()
        for value in (answer.logprobs if answer else [0.0] * len(span))
    ]
    batch = {
        "input_ids": torch.tensor([[*(token for each in conversations for token in each.tokens), *[0] * padding]]),
        "position_ids": torch.tensor([[*(at for length in lengths for at in range(length)), *range(padding)]]),
        "loss_mask": torch.tensor([[*masks, *[False] * padding]]),
        "advantages": torch.tensor([[*map(float, masks), *[0.0] * padding]]),
        "inference_logprobs": torch.tensor([[*sampled, *[0.0] * padding]]),
        "env_names": ["env"] * sum(lengths) + [""] * padding,
    }
    trained = [value for each in conversations for value in each.trainer_logprobs]
    output = {"logprobs": torch.tensor([[*trained, *[0.0] * padding]]), "entropy": torch.zeros(1, len(masks) + padding)}
    written = exporter.TokenExporter(folder, rank=0)
    written.export(STEP, 0, batch, output, [*lengths[:-1], lengths[-1] + padding], SimpleNamespace())
    written.close()
