"""Scores by transformers models, of which not all are in memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import sample, write_moe

from moerl.diagnostics.scoring import Question
from moerl.models.description import read_model
from moerl.offline import rescoring
from moerl.offline.rescoring import LoadedModels, TransformersScorer

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_moe(folder / str(seed), seed) for seed in range(3)]


def scorers(folders: list[Path], most: int) -> list[TransformersScorer]:
    held = LoadedModels(torch.bfloat16, CPU, CPU, most)
    models = [read_model(folder) for folder in folders]
    return [TransformersScorer(held, each, dtype=torch.bfloat16, name="", version=None) for each in models]


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_models_are_in_memory_than_fit_and_each_scores_as_if_all_were(
    most: int, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []
    load = rescoring.load_model

    def counted(*arguments: Any, **settings: Any) -> Any:
        model = load(*arguments, **settings)
        alive.add(model)
        counts.append(len(alive))
        return model

    rollouts = sample(folders[0], num_groups=1)
    wanted = [each.score(rollouts, Question()) for each in scorers(folders, 3)]
    monkeypatch.setattr(rescoring, "load_model", counted)
    few = scorers(folders, most)
    for number in (0, 1, 2, 2, 0, 1):
        found = few[number].score(rollouts, Question())
        for one, other in zip(found, wanted[number], strict=True):
            assert np.array_equal(one.full_TF, other.full_TF)
    assert max(counts) == most
    assert len(counts) == 5


def test_the_progress_of_a_call_is_told_after_every_pass(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescoring, "PASS_ROWS", 50)
    told: list[tuple[int, int, int]] = []
    held = LoadedModels(torch.bfloat16, CPU, CPU, progress=lambda *numbers: told.append(numbers))
    rollouts = sample(folders[0], num_groups=2)
    scorer = TransformersScorer(held, read_model(folders[0]), dtype=torch.bfloat16, name="", version=None)
    scorer.score(rollouts, Question())
    assert len(told) > 3
    assert told == sorted(told)
    assert told[0] == (0, len(rollouts), 0)
    assert told[-1] == (len(rollouts), len(rollouts), sum(map(len, rollouts)))
