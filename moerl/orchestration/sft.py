"""Supervised fine-tuning on a task's demonstrations: the cold start. Runs in every trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moerl.buffer.order import batch_indices
from moerl.buffer.packing import PackOptions
from moerl.contract.batch import TextSample
from moerl.contract.ports import DemonstrationTask
from moerl.orchestration import step_metrics
from moerl.orchestration.batches import pack_options, share_text
from moerl.orchestration.ends import read_ends
from moerl.orchestration.exchange import sum_over
from moerl.orchestration.run import Run
from moerl.orchestration.tokenizer import encode_checked
from moerl.trainer.losses import TextLoss
from moerl.trainer.trainer import MegatronTrainer

STAGE = "sft"


def demonstrations(run: Run, end: int) -> list[TextSample]:
    """The demonstrations to learn from, tokenised; the response and its end are learned, the prompt is not."""
    config, task, tokenizer = run.config, run.task, run.tokenizer
    # `moerl.orchestration.task_texts` refused a task without demonstrations before anything started.
    assert isinstance(task, DemonstrationTask)
    prompts = task.prompts("train", config.sft.num_examples)
    samples = []
    for prompt, response in zip(prompts, task.demonstrations(prompts, config.seed), strict=True):
        prompt_ids = encode_checked(tokenizer, prompt.text)
        response_ids = [*encode_checked(tokenizer, response), end]
        token_ids = np.array(prompt_ids + response_ids, np.int32)
        samples.append(TextSample(token_ids, np.arange(len(token_ids)) >= len(prompt_ids)))
    return samples


def train(run: Run, model_path: Path, output: Path) -> None:
    """Trains from `model_path` and writes a Hugging Face directory to `output`; goes on from a checkpoint if any."""
    config = run.config
    samples = demonstrations(run, read_ends(model_path, run.tokenizer, run.model.spec.vocab_size)[0])
    model = replace(run.model, folder=model_path)
    trainer = MegatronTrainer(
        model,
        run.layout,
        run.model_options(config.sft.moe_aux_loss_coef),
        config.sft.optimizer,
        total_steps=config.sft.steps,
        sharding=config.trainer.distributed_optimizer,
    )
    trainer.watch = run.reporter.within
    packing = pack_options(config, run.layout, model)
    first_step = run.restore(STAGE, trainer)
    run.reporter.begin_stage(STAGE, done=first_step, total=config.sft.steps)
    for step in range(first_step, config.sft.steps):
        indices = batch_indices(len(samples), config.sft.batch_size, step, config.seed)
        _step(run, trainer, step, [samples[i] for i in indices], packing)
        run.checkpoint_if_due(STAGE, step + 1, config.sft.steps, trainer)
    run.write_model(output, like=model_path, trainer=trainer)


def _step(run: Run, trainer: MegatronTrainer, step: int, samples: Sequence[TextSample], packing: PackOptions) -> None:
    with run.span("train"):
        minibatch = share_text(samples, trainer, packing)
        loss = TextLoss(minibatch.batches, trainer.model.vocab_size, minibatch.num_tokens)
        report = trainer.step(minibatch.batches, loss, enforce=False)
    assert report.update is not None
    run.check_update(report.update, f"{STAGE}-{step + 1:06d}")
    own = torch.zeros(1, dtype=torch.float64)
    if trainer.layout.tensor_rank == 0:
        own += sum(float(rows.losses_T.double().sum()) for rows in report.rows if rows.losses_T is not None)
    metrics = {
        "sft/loss": float(sum_over(own)) / minibatch.num_tokens,
        **step_metrics.update_metrics([report.update]),
        **minibatch.metrics,
    }
    run.log(STAGE, step + 1, metrics, round(minibatch.num_tokens))
