"""Every fault of an engine is found by a check. Sound engines pass all of them: `tests/conformance/test_checks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import conformance_faults as faults
import families
import numpy as np
import pytest
from conformance_faults import FaultInjection, kept, logprobs, next_experts, rows, where, zero_layer

from moerl.models.description import read_model
from moerl.offline.conformance import open_subject
from moerl.rollout.conformance.bench import Bench
from moerl.rollout.conformance.reference import TransformersJudge
from moerl.rollout.conformance.subject import Answer, Ask, EngineUnderTest, ReferenceJudge, Subject
from moerl.rollout.conformance.suite import CHECKS, CheckResult, Outcome, run_checks

FAMILY = families.FAMILIES["qwen3_moe"]
E = FAMILY.spec().num_experts


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Makes every test in this file compute with one thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("model") / "hf", FAMILY, seed=0)


@pytest.fixture(scope="module")
def subject(folder: Path) -> Iterator[Subject]:
    made, _ = open_subject(EngineUnderTest(embedded=folder, updates_weights=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge(folder: Path) -> ReferenceJudge:
    return TransformersJudge(read_model(folder))


def verdict_of(bench: Bench, name: str) -> CheckResult:
    (verdict,) = run_checks(bench, [check for check in CHECKS if check.name == name])
    return verdict


def is_aborted(ask: Ask, answer: Answer) -> bool:
    return answer.finish_reason == "abort"


def is_stopped(ask: Ask, answer: Answer) -> bool:
    return answer.finish_reason == "stop"


def is_long(ask: Ask, answer: Answer) -> bool:
    return len(ask.prompt_ids) > 200


def is_pressed(ask: Ask, answer: Answer) -> bool:
    return "pressure" in ask.cache_key


def goes_on(ask: Ask, answer: Answer) -> bool:
    return ask.first_row > 0


class _Stale:
    """Rows of a beginning that was asked for before, under the same key, are those of other weights."""

    def __init__(self) -> None:
        self.seen: list[Ask] = []

    def __call__(self, ask: Ask, answer: Answer) -> Answer:
        hits = [
            a for a in self.seen if a.cache_key == ask.cache_key and ask.prompt_ids[: len(a.prompt_ids)] == a.prompt_ids
        ]
        self.seen.append(ask)
        if not hits:
            return answer
        return rows(next_experts(E, last=max(len(a.prompt_ids) for a in hits)))(ask, answer)


class _Counter:
    """Ignores seeds: every request gets one of its own."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, ask: Ask) -> Ask:
        self.number += 1
        return replace(ask, sampling=replace(ask.sampling, seed=self.number))


def _without_last_token(ask: Ask, answer: Answer) -> Answer:
    return replace(answer, token_ids=answer.token_ids[:-1])


def _all_new(ask: Ask, answer: Answer) -> Answer:
    return replace(answer, versions=np.ones(len(answer.token_ids), np.int64))


def _other_experts(ask: Ask, answer: Answer) -> Answer:
    return replace(answer, retractions=1, expert_ids=next_experts(E)(np.array(answer.expert_ids, np.int64)))


DAMAGES = {
    "a row is dropped": ("routing-rows", rows(lambda r: r[:-1])),
    "the last token has a row": ("routing-rows", rows(lambda r: np.concatenate([r, r[-1:]]))),
    "prompts have no rows": (
        "routing-rows",
        lambda ask, answer: rows(lambda r: r[len(ask.prompt_ids) - 1 :])(ask, answer),
    ),
    "there are no routes": ("routing-there", lambda ask, answer: replace(answer, expert_ids=None)),
    "dense layers have rows": ("routing-shape", rows(lambda r: np.concatenate([r, r[:, :1]], 1))),
    "layers are shifted": ("reference-routes", rows(lambda r: np.roll(r, 1, 1))),
    "rows are shifted": ("reference-routes", rows(lambda r: np.roll(r, 1, 0))),
    "a layer is zero": ("routing-experts", rows(zero_layer)),
    "experts are physical": ("routing-experts", rows(lambda r: r + E)),
    "a hit brings stale routes": ("prefix-cache", _Stale()),
    "a later piece of a prompt is wrong": ("long-prompts", where(is_long, rows(next_experts(E, 100, 101)))),
    "a retraction overwrites routes": ("retraction", where(is_pressed, _other_experts)),
    "an aborted answer lacks a row": ("abort", where(is_aborted, rows(lambda r: r[:-1]))),
    "an aborted answer has other rows": ("abort", where(is_aborted, rows(next_experts(E)))),
    "rows behind a prefix are one late": ("resume", where(goes_on, rows(lambda r: np.roll(r, 1, 0)))),
    "a later turn lacks a row": ("turns", where(goes_on, rows(lambda r: r[1:]))),
    "no version is old": ("weight-update", _all_new),
    "the sampled token is not kept": ("kept-token", kept(lambda token, ids: ids[ids != token])),
    "a kept token is lost": ("top-k", kept(lambda token, ids: ids[ids != next(iter(set(ids.tolist()) - {token}), -1)])),
    "a lost kept token moves log-probs": (
        "reference-logprobs",
        kept(lambda token, ids: ids[ids != next(iter(set(ids.tolist()) - {token}), -1)]),
    ),
    "kept ids are sorted by probability": ("kept-order", kept(lambda token, ids: ids[::-1])),
    "a kept set is empty": ("kept-there", kept(lambda token, ids: ids[:0])),
    "kept sets are too large": ("kept-size", kept(lambda token, ids: np.arange(91))),
    "log-probs are swapped": ("reference-logprobs", logprobs(faults.swapped)),
    "log-probs are those before the cut": ("top-k", logprobs(lambda values, masses: values + masses)),
    "log-probs are positive": ("logprobs", logprobs(lambda values, masses: -values)),
    "log-probs are those of temperature 1": (
        "temperature",
        lambda ask, answer: logprobs(lambda values, masses: values * ask.sampling.temperature)(ask, answer),
    ),
    "versions are not said": ("contract", lambda ask, answer: replace(answer, versions=None)),
    "a stop id is swallowed": ("stop-ids", where(is_stopped, _without_last_token)),
    "an answer is short": ("answers", _without_last_token),
}  # fmt: skip

CHANGES = {
    "seeds are ignored": ("seeds", _Counter()),
    "temperature 0 samples": ("greedy", lambda ask: replace(ask, sampling=replace(ask.sampling, temperature=1.0))),
    "top-p is ignored": ("top-p", lambda ask: replace(ask, sampling=replace(ask.sampling, top_p=0.95))),
    "min-p is ignored": ("min-p", lambda ask: replace(ask, sampling=replace(ask.sampling, min_p=0.0))),
    "first rows are ignored": ("turns", lambda ask: replace(ask, first_row=0)),
    "first rows are ignored, resumed": ("resume", lambda ask: replace(ask, first_row=0)),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_answer_fails_its_check(fault: str, subject: Subject, judge: ReferenceJudge):
    name, damage = DAMAGES[fault]
    pool = 160 if name == "retraction" else None
    broken = FaultInjection(subject, damage, pool_tokens=pool)
    verdict = verdict_of(Bench(broken, "faults", judge, updates_weights=True), name)
    assert verdict.outcome == Outcome.FAIL, verdict
    assert verdict.seen or verdict.what


@pytest.mark.parametrize("fault", CHANGES)
def test_an_engine_that_does_something_else_than_asked_fails_its_check(
    fault: str, subject: Subject, judge: ReferenceJudge
):
    name, change = CHANGES[fault]
    verdict = verdict_of(Bench(FaultInjection(subject, change=change), "faults", judge), name)
    assert verdict.outcome == Outcome.FAIL, verdict


def test_routes_that_depend_on_the_batch_are_found(subject: Subject):
    broken = FaultInjection(subject)
    broken.damage = lambda ask, answer: (
        answer if len(broken.calls[-1]) == 1 else rows(next_experts(E, 0, 1))(ask, answer)
    )
    assert verdict_of(Bench(broken, "faults"), "batch").outcome == Outcome.FAIL


def test_routes_computed_again_under_new_weights_are_found(subject: Subject):
    """Keeps old tokens, log-probs and versions, with routes of the new weights, as upstream's retraction does."""
    broken = FaultInjection(subject)

    def damage(ask: Ask, answer: Answer) -> Answer:
        if not ask.cache_key.endswith("update") or answer.versions is None:
            return answer
        num_old = int((np.asarray(answer.versions) == answer.versions.min()).sum())
        return rows(next_experts(E, last=len(ask.prompt_ids) - 1 + num_old))(ask, answer)

    broken.damage = damage
    verdict = verdict_of(Bench(broken, "faults", updates_weights=True), "weight-update")
    assert verdict.outcome == Outcome.FAIL
    assert "routes differ" in verdict.what


def test_what_an_engine_lacks_cannot_be_asked(subject: Subject):
    bare = FaultInjection(subject, lambda ask, answer: Answer(answer.token_ids, answer.finish_reason))
    names = ["routing-there", "routing-rows", "batch", "kept-token", "top-k", "contract", "reference-routes"]
    outcomes = {name: verdict_of(Bench(bare, "bare"), name) for name in names}
    failed = {name for name, verdict in outcomes.items() if verdict.outcome == Outcome.FAIL}
    assert failed == {"routing-there", "contract"}
    assert outcomes["kept-token"].what == "the engine returns no kept sets"
    assert outcomes["contract"].seen.startswith("no routes, no log-probs")
