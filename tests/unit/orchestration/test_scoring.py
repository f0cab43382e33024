"""Scores of tokens on their way to a batch."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from factories import make_trajectory
from numpy.typing import NDArray
from tiny_moe import write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from moerl.config.load import load_config
from moerl.contract.quarantine import Refusal
from moerl.contract.trajectory import Trajectory
from moerl.errors import ConfigError, ContractError, ScoreError
from moerl.orchestration.outcome import RolloutOutcome
from moerl.orchestration.scoring import Scoring, open_scorers
from moerl.orchestration.step_metrics import rollout_metrics
from moerl.rollout.tokenizers import read_tokenizer

TINY = "recipe=tiny"


class FakeScorer:
    """Scores when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Trajectory, Future[NDArray[np.float32]]]] = []
        self.is_closed = False

    def start(self) -> None: ...

    def submit(self, trajectory: Trajectory) -> Future[NDArray[np.float32]]:
        self.asked.append((trajectory, Future()))
        return self.asked[-1][1]

    def score(self, number: int, value: float = 0.5) -> None:
        trajectory, future = self.asked[number]
        future.set_result(np.where(trajectory.sampled, np.float32(value), np.float32(0.0)))

    def close(self) -> None:
        self.is_closed = True


def outcome(name: str, count: int = 1) -> RolloutOutcome:
    rng = np.random.default_rng(0)
    return RolloutOutcome(name, tuple(make_trajectory(rng, rollout_id=f"{name}~{i}") for i in range(count)))


class Sampled:
    """Outcomes of an engine, and how far it was asked for them."""

    def __init__(self, *outcomes: RolloutOutcome) -> None:
        self.outcomes, self.num_asked, self.is_closed = outcomes, 0, False

    def __iter__(self) -> Generator[RolloutOutcome]:
        try:
            for each in self.outcomes:
                self.num_asked += 1
                yield each
        finally:
            self.is_closed = True


def test_outcomes_come_in_their_order_with_the_scores_of_every_trajectory():
    first, second = FakeScorer(), FakeScorer()
    sampled = Sampled(outcome("a"), outcome("b", 2), RolloutOutcome("c", refusal=Refusal("too_short", "why")))

    def answer_all() -> Generator[RolloutOutcome]:
        # Sampling goes to its end before a score is there.
        yield from sampled
        assert len(first.asked) == len(second.asked) == 3
        for number in (2, 0, 1):
            first.score(number, value=number)
            second.score(number, value=-1.0)

    found = Scoring({"teacher": first, "judge": second}).outcomes(answer_all())
    a, b, c = found
    assert [each.rollout_id for each in (a, b, c)] == ["a", "b", "c"]
    assert c.refusal is not None
    teacher = [t.scores["teacher"][t.sampled].tolist() for t in (*a.trajectories, *b.trajectories)]
    assert teacher == [[0.0] * 5, [1.0] * 5, [2.0] * 5]
    assert all((t.scores["judge"][t.sampled] == -1.0).all() for t in (*a.trajectories, *b.trajectories))


def test_an_outcome_whose_scores_are_there_does_not_wait_for_those_behind_it():
    scorer, sampled = FakeScorer(), Sampled(outcome("a"), outcome("b"), outcome("c"))

    def sample() -> Generator[RolloutOutcome]:
        for number, each in enumerate(sampled):
            yield each
            scorer.score(number)

    found = Scoring({"teacher": scorer}).outcomes(sample())
    assert next(found).rollout_id == "a"
    assert sampled.num_asked == 2, "asked for the next when the scores of the first were not there"
    found.close()
    assert sampled.is_closed


def test_a_score_that_fails_ends_the_batch_and_gives_up_the_others():
    scorer, sampled = FakeScorer(), Sampled(outcome("a"), outcome("b"), outcome("c"))

    def sample() -> Generator[RolloutOutcome]:
        yield from sampled
        scorer.asked[0][1].set_exception(ScoreError("the teacher is gone"))

    found = Scoring({"teacher": scorer}).outcomes(sample())
    with pytest.raises(ScoreError, match="the teacher is gone"):
        list(found)
    assert [future.cancelled() for _, future in scorer.asked] == [False, True, True]


def test_a_score_that_is_not_finite_is_never_trained_on():
    scorer = FakeScorer()

    def sample() -> Generator[RolloutOutcome]:
        yield outcome("a")
        scorer.score(0, value=np.nan)

    found = Scoring({"teacher": scorer}).outcomes(sample())
    with pytest.raises(ContractError, match="value_not_finite"):
        list(found)


def test_without_scorers_outcomes_are_those_that_came():
    sampled = Sampled(outcome("a"), outcome("b"))
    assert [*Scoring({}).outcomes(iter(sampled))] == [*sampled.outcomes]
    assert Scoring({}).of(sampled.outcomes[0].trajectories) == [*sampled.outcomes[0].trajectories]


def test_metrics_have_the_mean_of_a_score_and_its_gap_to_the_policy():
    trajectories = [
        each.with_scores({"teacher": np.where(each.sampled, each.rollout_logprobs - np.float32(0.25), np.float32(0.0))})
        for each in outcome("a", 3).trajectories
    ]
    metrics = rollout_metrics(trajectories)
    logprobs = np.concatenate([t.rollout_logprobs[t.sampled] for t in trajectories])
    assert metrics["score/teacher/policy_gap"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["score/teacher/mean"] == pytest.approx(logprobs.mean() - 0.25, abs=1e-6)
    assert not [name for name in rollout_metrics(outcome("a", 3).trajectories) if name.startswith("score/")]


def write_tokenizer(folder: Path, *words: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, "a")))
    made.save_pretrained(folder)
    return made


def test_a_model_with_other_tokens_scores_nothing(tmp_path: Path):
    own = write_tokenizer(tmp_path / "own", "a", "b", "c")
    write_tokenizer(write_model(tmp_path / "teacher", tied=True, seed=0), "a", "c", "b", "d")
    keys = [TINY, f"scorers={{teacher: {{kind: model, path: '{tmp_path / 'teacher'}'}}}}"]
    config = load_config(keys, command="train")
    wrong = r"scorers\.teacher\.path: its tokenizer is not.*2 tokens .* first 'b', here 1"
    with pytest.raises(ConfigError, match=wrong):
        open_scorers(config.scorers, tmp_path, own, read_tokenizer)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (("algorithm=custom", "algorithm.loss=os:getcwd", "algorithm.scores=[teacher]"), "nothing gives these scores"),
        (("rollout=dumps", "rollout.path=/tmp", "{teacher}"), "a run from dumps scores no tokens"),
        (("rollout.temperature=0.0", "{teacher}"), "greedy samples have no distribution"),
        (("scorers={a.b: {kind: model, path: /tmp}}",), "scorers.a.b: wrong value"),
        (
            ("scorers={teacher: {kind: model, path: /tmp, speed: 3}}",),
            "scorers.teacher.speed: unknown key of a scorer of the kind model; expected: one of kind, path",
        ),
        (("scorers={teacher: {kind: model}}",), "scorers.teacher.path: no value given"),
    ],
)
def test_scorers_that_could_not_work_are_refused(keys: tuple[str, ...], error: str):
    given = [key.replace("{teacher}", "scorers={teacher: {kind: model, path: /tmp}}") for key in keys]
    with pytest.raises(ConfigError) as caught:
        load_config([TINY, *given], command="train")
    assert error in str(caught.value)
