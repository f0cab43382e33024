"""`moerl conformance`: the checks of the data contract, run against one engine. One process; loads torch only if it is
needed (the embedded engine, a reference, a weight update)."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError, closing
from moerl.machine.model_tensors import TIED, check_weights, checkpoint_shapes
from moerl.models.description import read_model
from moerl.rollout.conformance.bench import Bench
from moerl.rollout.conformance.dialects import PatchedDialect, UpstreamDialect
from moerl.rollout.conformance.servers import NO_KEY, ServerSays, ServerSubject, Update, look_at
from moerl.rollout.conformance.subject import AcrossUpdate, Ask, EngineUnderTest, ReferenceJudge, Subject, SubjectFacts
from moerl.rollout.conformance.suite import (
    CHECKS,
    CheckResult,
    ConformanceCheck,
    as_json,
    conforms,
    counts,
    run_checks,
    verdict_lines,
)
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint
from moerl.rollout.sglang.handshake import read_version

_ANSWER_SECONDS, _CALL_SECONDS = 600.0, 60.0
_MAX_RUNNING = 64
_BUCKET_BYTES = 1 << 28


def run_conformance(
    target: EngineUnderTest, checks: Sequence[ConformanceCheck] = CHECKS, *, prints_json: bool = False
) -> int:
    """Runs the checks, and prints which pass, which fail and why.

    Returns:
        Exit code: 0, or 1 if a check failed.

    Raises:
        ConfigError: a model is damaged, or not the one of the engine. EngineError: the engine cannot be reached.
    """
    subject, judge = open_subject(target)
    with closing(subject):
        bench = Bench(subject, secrets.token_hex(4), judge, target.updates_weights)
        name, verdicts = subject.facts.name, list[CheckResult]()
        if not prints_json:
            print(f"{name}\n")
        for verdict in run_checks(bench, checks):
            verdicts.append(verdict)
            lines = [f"{verdict.check}: {verdict.outcome}"] if prints_json else verdict_lines(verdict)
            print("\n".join(lines), file=sys.stderr if prints_json else sys.stdout, flush=True)
        print(as_json(name, verdicts) if prints_json else f"\n{counts(verdicts)}")
    return 0 if conforms(verdicts) else 1


def open_subject(target: EngineUnderTest) -> tuple[Subject, ReferenceJudge | None]:
    """Opens the engine, and the reference if a model is given.

    Raises:
        ConfigError, EngineError: as `run_conformance`.
    """
    model = target.model or target.embedded
    subject = _server(target) if target.embedded is None else _embedded(target.embedded, target.updates_weights)
    return subject, None if model is None else _judge(model, subject.facts.spec)


def _embedded(folder: Path, updates_weights: bool) -> Subject:
    from moerl.ranks.libraries import quiet_libraries
    from moerl.rollout.conformance.engines import EngineSubject, RenumberedWeights
    from moerl.rollout.factory import embedded_engine

    model = read_model(folder)
    check_weights(folder)
    quiet_libraries()
    weights = RenumberedWeights(model, checkpoint_shapes(folder, model.hf_config)) if updates_weights else None
    engine = embedded_engine(model, dtype="float32", max_running=_MAX_RUNNING, version=0)
    name = f"embedded engine, {model.folder}, float32"
    return EngineSubject(engine, SubjectFacts(name, model.spec, model.max_positions, "float32", pool_tokens=0), weights)


def _judge(folder: Path, spec: ModelSpec) -> ReferenceJudge:
    """Loads the reference. Raises `ConfigError` if its model is not the one under test."""
    model = read_model(folder)
    seen, expected = (
        {"MoE layers": each.num_moe_layers, "experts": each.num_experts, "experts per token": each.experts_per_token}
        for each in (model.spec, spec)
    )
    if seen != expected:
        raise ConfigError("--model: not the model of the engine", seen=seen, expected=expected)
    check_weights(folder)
    from moerl.ranks.libraries import quiet_libraries
    from moerl.rollout.conformance.reference import TransformersJudge

    quiet_libraries()
    return TransformersJudge(replace(model, spec=spec))


# --- servers ---------------------------------------------------------------------------------------------------------


def _server(target: EngineUnderTest) -> Subject:
    file = target.server_file
    endpoint = Endpoint(target.url, NO_KEY, NO_KEY) if file is None else read_endpoint(file)
    says = look_at(endpoint)
    if says.report is None:
        return _upstream(endpoint, says, target.model)
    report = says.report
    num_layers = len(report.moe_layers)
    spec = ModelSpec(num_layers, report.experts_per_token, report.num_experts, report.vocab_size, "conformance")
    name = f"SGLang {says.release} with patches {report.fingerprint}, {endpoint.url}, {says.dtype}"
    facts = SubjectFacts(name, spec, report.max_request_tokens, says.dtype, says.pool_tokens)
    update = _update(endpoint, facts, says, target.model) if target.updates_weights and target.model else None
    return ServerSubject(endpoint, facts, PatchedDialect(spec), seconds=_ANSWER_SECONDS, update=update)


def _upstream(endpoint: Endpoint, says: ServerSays, folder: Path | None) -> Subject:
    """Describes a server without our patches. Raises `ConfigError` if the config.json of its model is not on this
    machine: such a server does not say how many layers and experts the model has."""
    served = folder or Path(says.model_path)
    if not (served / "config.json").is_file():
        raise ConfigError(
            "--model: the server has not our patches, and so does not say what its model is",
            seen=f"model {says.model_path!r}, which is not on this machine",
            expected="its Hugging Face directory; config.json is enough with --check",
            remedy="give --model HF_DIR",
        )
    model = read_model(served)
    name = f"SGLang {says.release} without patches, {endpoint.url}, {says.dtype}"
    longest = min(says.context_tokens or model.max_positions, model.max_positions) - 2
    facts = SubjectFacts(name, model.spec, longest, says.dtype, says.pool_tokens)
    dialect = UpstreamDialect(model.spec, model.num_layers, takes_seeds=says.takes_seeds)
    return ServerSubject(endpoint, facts, dialect, seconds=_ANSWER_SECONDS, update=None)


def _update(endpoint: Endpoint, facts: SubjectFacts, says: ServerSays, folder: Path) -> Update:
    """Returns a function that asks, and updates weights meanwhile, by the one client that a trainer has, too."""

    def across(asks: Sequence[Ask]) -> AcrossUpdate:
        from moerl.rollout.conformance.engines import EngineSubject, RenumberedWeights
        from moerl.rollout.fleet.engine import FleetEngine
        from moerl.rollout.fleet.options import EngineOptions
        from moerl.rollout.sglang.backend import SGLangConnect

        assert says.report is not None
        model = replace(read_model(folder), spec=facts.spec)
        shapes = checkpoint_shapes(folder, model.hf_config)
        options = EngineOptions(
            engine_id="conformance",
            dtype=says.dtype,
            max_running=_MAX_RUNNING,
            response_seconds=_ANSWER_SECONDS,
            probe_seconds=_CALL_SECONDS,
            update_seconds=_ANSWER_SECONDS,
            bucket_bytes=_BUCKET_BYTES,
            shapes=shapes,
            tied=TIED if model.tie_word_embeddings else {},
            notify=lambda text: print(text, file=sys.stderr),
            keeps_copy=False,
        )
        served = ModelFacts(model.spec, tuple(says.report.moe_layers))
        weights = RenumberedWeights(model, shapes)
        engine = FleetEngine([_Running(endpoint)], SGLangConnect(served, options), served, options, -1)
        with closing(EngineSubject(engine, facts, weights)) as subject:
            # A version label alone does not prove that the server has the weights of this folder.
            subject.update(read_version(says.policy_version), renumbered=False)
            return subject.across_update(asks)

    return across


@dataclass(frozen=True, slots=True)
class _Running:
    """A launcher of a server that runs already."""

    endpoint: Endpoint

    def open(self) -> Endpoint:
        return self.endpoint

    def close(self) -> None:
        """Leaves the server running."""
