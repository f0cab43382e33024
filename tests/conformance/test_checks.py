"""The checks of `moerl conformance` pass on every engine of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conformance_cases import MAX_POSITIONS, Build, Subject

from moerl.machine.model_tensors import checkpoint_shapes
from moerl.models.description import read_model
from moerl.rollout.conformance.bench import Bench
from moerl.rollout.conformance.engines import EngineSubject, RenumberedWeights
from moerl.rollout.conformance.reference import TransformersJudge
from moerl.rollout.conformance.subject import SubjectFacts
from moerl.rollout.conformance.suite import Outcome, run_checks


def test_every_check_passes_or_cannot_be_asked_of_an_engine(build: Build, subject: Subject, tmp_path: Path):
    subject.model(0).save_pretrained(tmp_path / "model")
    model = replace(read_model(tmp_path / "model"), spec=subject.spec)
    weights = RenumberedWeights(model, checkpoint_shapes(tmp_path / "model", model.hf_config))
    facts = SubjectFacts("engine", subject.spec, MAX_POSITIONS - 2, "float32", pool_tokens=0)
    bench = Bench(EngineSubject(build(), facts, weights), "own", TransformersJudge(model), updates_weights=True)
    others = {v.check: v for v in run_checks(bench) if v.outcome != Outcome.PASS}
    assert set(others) == {"retraction"}, others
    assert others["retraction"].outcome == Outcome.CANNOT_ASK
