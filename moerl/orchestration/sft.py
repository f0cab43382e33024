"""Supervised fine-tuning on a task's demonstrations, the cold start of a run: trained, found whole, or written again
from its checkpoint. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from moerl.batching.order import batch_indices
from moerl.batching.packing import PackOptions
from moerl.contract.batch import TextSample
from moerl.contract.episodes import ExpertTask
from moerl.contract.ports import DemonstrationTask
from moerl.contract.sealed import find_damage
from moerl.contract.tokenizer import encode_checked
from moerl.episodes.expert import play_expert
from moerl.episodes.session import Texts
from moerl.errors import CheckpointError, closing
from moerl.orchestration import step_metrics
from moerl.orchestration.batches import pack_text_minibatch
from moerl.orchestration.chat import ChatWriter
from moerl.orchestration.ends import read_ends
from moerl.orchestration.run import Run
from moerl.orchestration.run_state import STAGE_ORDER
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointName, find_problem

STAGE = "sft"
FOLDER = "cold_start"
"""Folder of the cold start's weights in the run directory."""


def cold_start(run: Run, model_path: Path, *, for_its_weights: bool = True) -> Path:
    """Trains the cold start, unless the run goes on after it; returns its directory. A damaged directory is written
    again from the stage's last checkpoint.

    Args:
        model_path: model directory that the cold start is trained from.
        for_its_weights: False if weights of a newer checkpoint will replace those of the directory, so that any model
            of this shape will do. If the directory is damaged and cannot be written again, `model_path` is returned.

    Raises:
        CheckpointError: the directory is damaged, its weights are needed, and the checkpoint is gone.
    """
    output = run.config.run_dir / FOLDER
    if not run.has_done(STAGE, run.config.sft.steps):
        train(run, model_path, output)
        return output
    name = CheckpointName(STAGE_ORDER.index(STAGE), STAGE, run.config.sft.steps)
    checkpoint = run.config.run_dir / CHECKPOINTS / str(name)
    damage = find_damage(output)
    if damage is None:
        return output
    problem = find_problem(checkpoint)
    if problem is not None and not for_its_weights:
        run.reporter.notify(
            f"WARNING: {output}: {damage}; {checkpoint.name}: {problem}. It stays as it is: the run goes on from the"
            " weights of its newest checkpoint"
        )
        return model_path
    if problem is not None:
        raise CheckpointError(
            f"the cold start {output} is damaged and cannot be written again",
            seen=f"{damage}; {checkpoint.name}: {problem}",
            expected=f"a whole {FOLDER}, or the checkpoint of the end of its stage",
            remedy=f"restore {FOLDER} from a copy, or start a new run",
        )
    run.reporter.notify(f"WARNING: {output}: {damage}; writing it again from {checkpoint}")
    run.trainer.rewrite(model_path, checkpoint, output)
    return output


def demonstrations(run: Run, end: int) -> list[TextSample]:
    """Returns the demonstrations to learn from, tokenised; the response and its end are learned, the prompt is not.
    Of episodes, an expert's turns."""
    config, task, tokenizer = run.config, run.task, run.tokenizer
    if isinstance(task, ExpertTask):
        return _played(run, task, end)
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


def _played(run: Run, task: ExpertTask, end: int) -> list[TextSample]:
    """Returns the sessions of an expert's episodes; its turns are learned."""
    config, tokenizer = run.config, run.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    with closing(ChatWriter(tokenizer, config.task.template_options)) as writer:
        sessions = play_expert(
            task,
            task.prompts("train", config.sft.num_examples),
            Texts(partial(encode_checked, tokenizer), decode, writer.write),
            end,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.seed,
        )
    learned = [session.learned for session in sessions]
    return [TextSample(np.array(ids, np.int32), np.array(is_learned)) for ids, is_learned in learned]


def train(run: Run, model_path: Path, output: Path) -> None:
    """Trains from `model_path` and writes a Hugging Face directory to `output`; goes on from a checkpoint of the stage
    if there is one."""
    config = run.config
    samples = demonstrations(run, read_ends(model_path, run.tokenizer, run.model.spec.vocab_size)[0])
    run.build(STAGE, model_path)
    packing = run.packing(run.model)
    first_step = run.restore(STAGE)
    run.reporter.begin_stage(STAGE, done=first_step, total=config.sft.steps)
    for step in range(first_step, config.sft.steps):
        indices = batch_indices(len(samples), config.sft.batch_size, step, config.seed)
        _step(run, step, [samples[i] for i in indices], packing)
        run.checkpoint_if_due(STAGE, step + 1, config.sft.steps)
    run.trainer.export(output, model_path)


def _step(run: Run, step: int, samples: Sequence[TextSample], packing: PackOptions) -> None:
    with run.span("train"):
        minibatch = pack_text_minibatch(samples, run.trainer.coordinates, packing)
        run.trainer.load([minibatch.frames])
        report = run.trainer.step(0, prove=False)
    assert report.update is not None
    assert report.loss_sum is not None
    run.check_update(report.update, f"{STAGE}-{step + 1:06d}")
    metrics = {
        "sft/loss": report.loss_sum / minibatch.num_tokens,
        **step_metrics.update_metrics([report.update]),
        **minibatch.metrics,
    }
    run.log(STAGE, step + 1, metrics, [minibatch])
