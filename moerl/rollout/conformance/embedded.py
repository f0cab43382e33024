"""The embedded engine on a model directory, under test."""

from __future__ import annotations

from moerl.models.description import ModelDescription
from moerl.rollout.conformance.engines import EngineSubject, WeightSets
from moerl.rollout.conformance.subject import SubjectFacts
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_sampler

_MAX_RUNNING = 64


def embedded_subject(model: ModelDescription, dtype: str, weights: WeightSets | None) -> EngineSubject:
    """Returns the embedded engine on a model directory, under test.

    Args:
        dtype: as `rollout.dtype`. weights: those of the directory and others; None if they are not to be replaced.

    Raises:
        EngineError: the model cannot be loaded.
    """
    assert model.folder is not None
    loaded = load_sampler(model.folder, dtype)
    engine = EmbeddedEngine(loaded, model.spec, engine_id="embedded", max_running=_MAX_RUNNING, policy_version=0)
    name = f"embedded engine, {model.folder}, {dtype}"
    return EngineSubject(engine, SubjectFacts(name, model.spec, model.max_positions, dtype, pool_tokens=0), weights)
