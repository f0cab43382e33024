"""Faults planted in dumps of a real engine are named with what they cost; sound dumps accuse nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_faults import (
    FAULTS,
    Ground,
    first_token_again,
    layer_late,
    lost_first_token,
    one_engine_from,
    one_layer_constant,
    row_late,
    sample,
    scorer,
    stale_prefix,
    write_moe,
    wrong_temperature,
)

from moerl.contract.fields import KeptSets
from moerl.contract.trajectory import SamplingParams
from moerl.diagnostics.causes.diagnosis import Diagnosis, diagnose
from moerl.diagnostics.causes.gaps import Repair
from moerl.diagnostics.causes.masks import at_least_by_chance, containment, held_by_chance, shifted, with_tokens
from moerl.diagnostics.causes.values import with_logprobs_of
from moerl.diagnostics.dump_report import verdict
from moerl.diagnostics.dumps.rollout import DumpedRollout, turns_of
from moerl.diagnostics.scoring import Question
from moerl.errors import EngineError
from moerl.rollout.loading import load_model

pytestmark = pytest.mark.usefixtures("one_thread")
MISSING_BOS = [(Repair("prompt: with BOS", first_token_again), "prompts lack the BOS token")]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("models")
    now, old = write_moe(folder / "now"), write_moe(folder / "old", seed=7, drift_from=0, drift=0.2)
    return Ground.of(now, old, num_groups=4)


def first_tokens(rollout: DumpedRollout, count: int) -> DumpedRollout:
    assert rollout.kept is not None
    assert rollout.expert_ids is not None
    names = ("token_ids", "sampled", "rollout_logprobs", "temperatures", "top_ps", "policy_versions")
    offsets = rollout.kept.offsets[: count + 1]
    return replace(
        rollout,
        **{name: getattr(rollout, name)[:count] for name in names},
        turns=turns_of(rollout.sampled[:count]),
        expert_ids=rollout.expert_ids[: count - 1],
        routed=None,
        kept=KeptSets(offsets, rollout.kept.ids[: offsets[-1]]),
    )


def causes(diagnosis: Diagnosis) -> set[str]:
    return {finding.cause for finding in diagnosis.findings if finding.level == "fault"}


def assert_adds_up(diagnosis: Diagnosis) -> None:
    for gap in diagnosis.decompositions:
        assert sum(share.nats.value for share in gap.shares) == pytest.approx(gap.total.value, rel=1e-9, abs=1e-12)
        for share in gap.shares:
            assert share.nats.low <= share.nats.value <= share.nats.high


def share_of(diagnosis: Diagnosis, cause: str) -> float:
    recorded = diagnosis.decompositions[-1]
    return next(share.nats.value for share in recorded.shares if share.cause == cause) / recorded.total.value


def test_a_sound_dump_accuses_nothing_and_its_gap_is_masks_routing_and_rounding(ground: Ground):
    found = ground.diagnose(ground.clean, edits=MISSING_BOS)
    assert causes(found) == set()
    assert_adds_up(found)
    nothing, recorded = found.decompositions
    shares = {share.cause: share.nats.value for share in nothing.shares}
    assert shares["masks"] > 0.5 * nothing.total.value
    assert shares["routing"] > 0.0
    assert recorded.total.value < 1.3 * found.floor
    assert verdict(found.findings, found.decompositions, found.floor).level == "good"


# `test_fault_matrix.py` plants those of every cause.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("no masks", "layer late"))) for name in FAULTS]
)
def test_a_planted_fault_is_named_alone_with_its_cost(ground: Ground, name: str):
    plant, cause = FAULTS[name]
    found = ground.diagnose(plant(ground.clean))
    assert causes(found) == {cause}
    assert_adds_up(found)
    if cause != "top_p":  # a wrong word about the filter costs nothing where the sets themselves are right
        assert share_of(found, cause) > 0.4
    assert found.residual.mean < 3 * found.floor


def test_prompts_without_their_first_token_are_named_where_the_candidate_is_tried(ground: Ground):
    found = ground.diagnose([lost_first_token(rollout) for rollout in ground.clean], edits=MISSING_BOS)
    assert causes(found) == {"template"}
    assert share_of(found, "template") > 0.8
    assert_adds_up(found)


def test_routes_of_prompts_from_older_weights_are_called_a_stale_prefix(ground: Ground):
    found = ground.diagnose(stale_prefix(ground.clean, ground.old))
    assert causes(found) == {"stale_prefix"}
    assert share_of(found, "stale_prefix") > 0.4


def test_an_engine_with_other_weights_is_told_from_the_others(ground: Ground):
    found = ground.diagnose(one_engine_from(ground.clean, ground.of_old))
    assert causes(found) == {"bad_engine"}
    assert [finding.title for finding in found.findings] == ["engine 'engine-1' does not sample as the others do"]
    assert share_of(found, "bad_engine") > 0.5
    assert_adds_up(found)


def test_stale_weights_are_named_by_their_version_where_the_checkpoint_is_given(ground: Ground):
    found = diagnose(ground.of_old, [ground.now, ground.old], ground.finer)
    assert causes(found) == {"stale_weights"}
    assert share_of(found, "stale_weights") > 0.8
    assert causes(diagnose(ground.clean, [ground.now, ground.old], ground.finer)) == set()


def test_tokens_of_older_weights_are_staleness_where_the_versions_are_known(ground: Ground):
    aged = [replace(r, policy_versions=np.where(r.sampled, 2, -1).astype(np.int32)) for r in ground.of_old]
    mixed = [old if i % 2 else now for i, (now, old) in enumerate(zip(ground.clean, aged, strict=True))]
    mixed = [replace(rollout, engine="") for rollout in mixed]
    found = ground.diagnose(mixed)
    assert causes(found) == set()
    (finding,) = found.findings
    assert (finding.cause, finding.level, finding.confidence) == ("staleness", "note", "possible")
    assert finding.title == "tokens of age 1 (versions) were sampled by weights that were not given"
    assert "--model DIRECTORY@VERSION" in finding.remedy
    assert share_of(found, "staleness") > 0.8
    assert_adds_up(found)


def test_other_weights_without_their_checkpoint_are_left_over_and_said(ground: Ground):
    found = ground.diagnose(ground.of_old)
    assert causes(found) == {"weights"}
    assert share_of(found, "unexplained") > 0.8


def with_noise(rollout: DumpedRollout, nats: float) -> DumpedRollout:
    """Log-probs of an engine whose arithmetic is off by this much."""
    rng = np.random.default_rng(len(rollout))
    noise = rng.normal(0.0, nats * np.sqrt(np.pi / 2), len(rollout)) * rollout.sampled
    return replace(rollout, rollout_logprobs=np.minimum(rollout.rollout_logprobs + noise, 0.0).astype(np.float32))


def mixed(some: Sequence[DumpedRollout], others: Sequence[DumpedRollout], every: int) -> list[DumpedRollout]:
    """Every so many of the rollouts are those of another dump."""
    return [other if i % every == 0 else one for i, (one, other) in enumerate(zip(some, others, strict=True))]


@pytest.mark.parametrize("times", [3.0, *(pytest.param(each, marks=pytest.mark.slow) for each in (5.0, 8.0))])
def test_noise_of_a_few_times_rounding_is_never_in_order(ground: Ground, times: float):
    floor = ground.diagnose(ground.clean).floor
    found = ground.diagnose([with_noise(rollout, times * floor) for rollout in ground.clean])
    (finding,) = found.findings
    assert finding.cause in ("unexplained", "weights")
    said = verdict(found.findings, found.decompositions, found.floor)
    assert said.level != "good"
    assert "rounding" in said.text or said.level == "fault"


def test_a_few_rollouts_of_other_weights_are_never_in_order(ground: Ground):
    unnamed = [replace(rollout, engine="") for rollout in mixed(ground.clean, ground.of_old, 5)]
    found = ground.diagnose(unnamed)
    assert {"unexplained", "weights"} & {finding.cause for finding in found.findings}
    assert verdict(found.findings, found.decompositions, found.floor).level != "good"


def test_one_odd_rollout_is_named_whatever_the_mean_of_all(ground: Ground):
    odd = next(i for i, rollout in enumerate(ground.clean) if rollout.num_sampled >= 20)
    rollouts = list(ground.clean)
    rollouts[odd] = with_noise(rollouts[odd], 10 * ground.diagnose(ground.clean).floor)
    found = ground.diagnose(rollouts)
    (finding,) = found.findings
    assert (finding.cause, finding.level) == ("unexplained", "note")
    assert finding.title.startswith(f"1 of {len(rollouts)} rollouts")
    assert finding.rollouts == (rollouts[odd].name,)
    assert verdict(found.findings, found.decompositions, found.floor).level == "note"


def test_a_temperature_at_the_edge_of_those_that_are_tried_is_no_answer(ground: Ground):
    far = [replace(r, temperatures=np.where(r.sampled, 0.1, 1.0).astype(np.float32)) for r in ground.clean]
    found = ground.diagnose(far)
    assert "temperature" not in causes(found)
    assert verdict(found.findings, found.decompositions, found.floor).level != "good"


def test_a_model_whose_log_probs_are_not_numbers_is_an_error_and_never_in_order(ground: Ground, tmp_path: Path):
    model = load_model(write_moe(tmp_path / "whole"), dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    broken = scorer(tmp_path / "broken")
    with pytest.raises(EngineError, match="not finite"):
        diagnose(ground.clean, [broken], ground.finer)


def test_under_a_coarse_arithmetic_nothing_is_in_order(ground: Ground):
    found = diagnose(ground.clean, [ground.now], ground.old)  # as if that were the same weights in a finer arithmetic
    assert found.floor > 0.1
    assert verdict(found.findings, found.decompositions, found.floor).level == "note"
    assert "too much to see" in found.findings[-1].title


def test_sets_that_are_late_in_some_rollouts_and_early_in_others_are_both_named(ground: Ground):
    parts = {1: ground.clean[:4], -1: ground.clean[4:8]}
    moved = [shifted(rollout, shift) for shift, rollouts in parts.items() for rollout in rollouts]
    found = ground.diagnose([*moved, *ground.clean[8:]])
    told = {finding.title.partition(",")[0]: set(finding.rollouts) for finding in found.findings}
    assert told.keys() == {"kept sets are 1 token too late", "kept sets are 1 token too early"}
    assert told["kept sets are 1 token too early"] <= {rollout.name for rollout in parts[1]}
    assert told["kept sets are 1 token too late"] <= {rollout.name for rollout in parts[-1]}


def test_sets_that_hold_every_token_where_those_of_others_do_are_moved_like_them(ground: Ground):
    moved = [shifted(rollout, -1) for rollout in ground.clean]
    late = [rollout for rollout in moved if containment([rollout]).num_outside][:4]
    names = {rollout.name for rollout in late}
    # Rounding in one of them favours its own sets, with the tokens put into them.
    (scored,) = ground.now.score([with_tokens(late[0])], Question())
    logprobs = np.zeros(len(late[0]), np.float32)
    logprobs[late[0].sampled] = scored.kept_TF[:, 0]
    late[0] = replace(late[0], rollout_logprobs=logprobs)
    assert containment(late[:1]).num_outside
    found = ground.diagnose([*late, *(rollout for rollout in ground.clean if rollout.name not in names)])
    (sets,) = [finding for finding in found.findings if finding.cause.startswith("mask")]
    assert (sets.cause, set(sets.rollouts)) == ("mask_shift", names)


def test_few_tokens_in_large_sets_are_in_those_of_their_neighbours_by_chance(ground: Ground):
    everything = np.arange(1 + max(int(each.token_ids.max()) for each in ground.clean), dtype=np.int32)
    rollout = max(ground.clean, key=len)
    sizes = np.where(rollout.sampled, len(everything), 0)
    kept = KeptSets(np.concatenate([[0], np.cumsum(sizes)]), np.tile(everything, int(rollout.sampled.sum())))
    assert held_by_chance([replace(rollout, kept=kept)], 1) == 1.0
    chances, lengths = held_by_chance(ground.clean, 1), [rollout.sampled.sum() for rollout in ground.clean]
    assert np.array_equal(np.argsort(-chances, kind="stable"), np.argsort(lengths, kind="stable"))
    assert 0.0 < chances.min() < chances.max() < 1.0
    assert at_least_by_chance(0, 3.0) == 1.0
    assert at_least_by_chance(1, 0.6) == pytest.approx(0.4512, abs=1e-4)
    assert at_least_by_chance(7, 0.6) < 1e-5
    assert at_least_by_chance(2, 0.0) == 0.0
    assert at_least_by_chance(400, 3.0) == pytest.approx(0.0, abs=1e-9)


def early_logprobs(rollouts: Sequence[DumpedRollout]) -> list[DumpedRollout]:
    early = [with_logprobs_of(rollout, shift=1) for rollout in rollouts]
    return [replace(each, rollout_logprobs=np.nan_to_num(each.rollout_logprobs, nan=-1.0)) for each in early]


def test_a_shift_that_does_nothing_but_leave_a_far_token_out_is_none(ground: Ground):
    early, two = early_logprobs(ground.clean[:4]), np.flatnonzero(ground.clean[4].sampled)[:2]
    short = first_tokens(ground.clean[4], int(two[1]) + 1)
    said = short.rollout_logprobs.copy()
    said[two[0]] = said[two[1]] = said[two].max()
    short = replace(short, rollout_logprobs=said)
    found = ground.diagnose([*early, short, *ground.clean[5:]])
    (moved,) = [finding for finding in found.findings if finding.cause == "logprob_shift"]
    assert set(moved.rollouts) == {rollout.name for rollout in early}


def test_a_rollout_of_one_token_has_no_shift_of_its_log_probs(ground: Ground):
    early = early_logprobs(ground.clean[:4])
    last = int(np.flatnonzero(ground.clean[4].sampled)[0])
    short = first_tokens(ground.clean[4], last + 1)
    off = np.where(short.sampled, 3 * ground.diagnose(ground.clean).floor, 0.0).astype(np.float32)
    short = replace(short, rollout_logprobs=short.rollout_logprobs - off)
    found = ground.diagnose([*early, short, *ground.clean[5:]])
    (moved,) = [finding for finding in found.findings if finding.cause == "logprob_shift"]
    assert set(moved.rollouts) == {rollout.name for rollout in early}


@pytest.mark.parametrize("share", [2, 1])
def test_a_temperature_that_is_not_said_is_a_fault_where_only_some_tokens_were_drawn_at_it(ground: Ground, share: int):
    unsaid = [replace(rollout, says_temperature=False) for rollout in ground.clean]
    found = ground.diagnose([wrong_temperature(r) if i % share == 0 else r for i, r in enumerate(unsaid)])
    assert causes(found) == ({"temperature"} if share == 2 else set())
    assert found.findings != ()


@pytest.mark.parametrize("size", [1, 2])
def test_a_small_dump_accuses_nothing(ground: Ground, size: int):
    assert causes(ground.diagnose(ground.clean[:size])) == set()


def test_a_dump_without_routes_or_kept_sets_is_scored_as_far_as_it_goes(ground: Ground):
    bare = [replace(rollout, expert_ids=None, routed=None, kept=None) for rollout in ground.clean]
    found = ground.diagnose(bare)
    assert found.route_agreement is None
    assert causes(found) == {"hidden_masks"}
    assert_adds_up(found)


def test_a_pass_of_several_rollouts_scores_each_as_if_alone(ground: Ground):
    finer = ground.finer
    together = finer.score(ground.clean[:6], Question((1.0, 0.7), (0.9,)))
    for rollout, scored in zip(ground.clean[:6], together, strict=True):
        (alone,) = finer.score([rollout], Question((1.0, 0.7), (0.9,)))
        for name in ("kept_TF", "full_TF", "rebuilt_TP", "mass_T", "least_T", "margins"):
            assert getattr(scored, name) == pytest.approx(getattr(alone, name), abs=2e-4)


PAIRS = {
    "layer late": layer_late,
    "row late": row_late,
    "layer constant": one_layer_constant,
    "temperature": wrong_temperature,
}


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), list(combinations(PAIRS, 2)))
def test_two_faults_at_once_are_both_named(ground: Ground, one: str, other: str):
    planted = [PAIRS[other](PAIRS[one](rollout)) for rollout in ground.clean]
    found = ground.diagnose(planted)
    assert causes(found) == {FAULTS[one][1], FAULTS[other][1]}
    assert_adds_up(found)


@pytest.mark.slow
def test_two_faults_of_which_one_is_of_the_weights_are_both_named(ground: Ground):
    planted = [layer_late(rollout) for rollout in ground.of_old]
    assert causes(diagnose(planted, [ground.now, ground.old], ground.finer)) == {"layer_shift", "stale_weights"}
    engine_and_temperature = [wrong_temperature(r) for r in one_engine_from(ground.clean, ground.of_old)]
    assert causes(ground.diagnose(engine_and_temperature)) == {"bad_engine", "temperature"}


@pytest.mark.slow
def test_fifty_sound_dumps_of_as_many_models_and_samplings_accuse_nothing(tmp_path: Path):
    samplings = (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=8),
        SamplingParams(temperature=0.6, min_p=0.05),
    )
    for seed in range(50):
        model = write_moe(tmp_path / str(seed), seed)
        clean = sample(model, seed=seed, num_groups=3, sampling=samplings[seed % 4])
        found = diagnose(clean, [scorer(model, version=3)], scorer(model, dtype=torch.float32), MISSING_BOS)
        assert causes(found) == set(), f"seed {seed}: {[finding.title for finding in found.findings]}"
        assert_adds_up(found)
