"""A model that scores tokens in a process of its own, compared with transformers in this one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import FULL, NUCLEUS, Layout, make_from_layout, make_trajectory
from numpy.typing import NDArray
from tiny_moe import SPEC, write_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.errors import ConfigError, ScoreError
from moerl.rollout import scoring_model
from moerl.scorers.messages import ScoreTokens
from moerl.scorers.model import ModelScorer, RemoteModel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher") / "model", tied=False, seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def remote(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteModel]:
    scorer = ModelScorer(kind="model", path=folder).open("scorers.teacher", tmp_path_factory.mktemp("log") / "teacher")
    scorer.start()
    yield scorer
    scorer.close()


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(5)
    two_turns = Layout(
        (
            (TurnKind.PROMPT, 2, None),
            (TurnKind.SAMPLED, 4, NUCLEUS),
            (TurnKind.OBSERVATION, 3, None),
            (TurnKind.SAMPLED, 2, FULL),
        )
    )
    return [
        make_trajectory(rng, SPEC, num_prompt=4, num_sampled=9, sampling=NUCLEUS),
        make_trajectory(rng, SPEC, num_prompt=2, num_sampled=5, sampling=FULL),
        make_from_layout(rng, two_turns, SPEC),
    ]


def expected(model: Any, trajectory: Trajectory, *, kept: bool) -> NDArray[np.float64]:
    """Computes scores token by token, from the logits of one pass."""
    with torch.inference_mode():
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        logits = model(ids[None]).logits[0].double().numpy()
    scores = np.zeros(len(trajectory))
    for place in np.flatnonzero(trajectory.sampled):
        z = logits[place - 1] / trajectory.temperatures[place]
        offsets = trajectory.kept.offsets
        listed = trajectory.kept.ids[offsets[place] : offsets[place + 1]]
        among = z[listed] if kept and len(listed) else z
        scores[place] = z[trajectory.token_ids[place]] - np.log(np.exp(among - among.max()).sum()) - among.max()
    return scores


def asked_for(trajectory: Trajectory) -> ScoreTokens:
    places = np.flatnonzero(trajectory.sampled)
    sizes = trajectory.kept.sizes[places].astype(np.int64)
    return ScoreTokens(
        trajectory.token_ids.tobytes(),
        places.astype(np.int64).tobytes(),
        trajectory.temperatures[places].tobytes(),
        sizes.tobytes(),
        trajectory.kept.ids.tobytes(),
    )


def test_scores_are_log_probs_in_the_kept_set_at_the_temperature_of_each_token(remote: RemoteModel, model: Any):
    futures = [remote.submit(trajectory) for trajectory in trajectories()]
    for trajectory, future in zip(trajectories(), futures, strict=True):
        scores = future.result()
        assert scores.dtype == np.float32
        assert not scores[~trajectory.sampled].any()
        np.testing.assert_allclose(scores, expected(model, trajectory, kept=True), atol=2e-6)


def test_the_whole_vocabulary_is_another_support(model: Any):
    for trajectory in trajectories():
        scores = scoring_model.score_tokens(model, asked_for(trajectory), "full")
        wanted = expected(model, trajectory, kept=False)[trajectory.sampled]
        np.testing.assert_allclose(scores, wanted, atol=2e-6)


def test_tokens_that_are_scored_some_at_a_time_get_the_same_scores(model: Any, monkeypatch: pytest.MonkeyPatch):
    together = [scoring_model.score_tokens(model, asked_for(each), "kept") for each in trajectories()]
    monkeypatch.setattr(scoring_model, "CHUNK_NUMBERS", 2 * SPEC.vocab_size)
    for trajectory, scores in zip(trajectories(), together, strict=True):
        np.testing.assert_allclose(scoring_model.score_tokens(model, asked_for(trajectory), "kept"), scores, atol=1e-6)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start_and_of_every_score(tmp_path: Path):
    path = write_model(tmp_path / "model", tied=False, seed=3)
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), "head_dim": 16}))
    scorer = ModelScorer(kind="model", path=path).open("scorers.teacher", tmp_path / "log")
    try:
        with pytest.raises(ScoreError, match=r"scorers\.teacher: the model of .* does not score"):
            scorer.start()
        with pytest.raises(ScoreError, match="does not score"):
            scorer.submit(trajectories()[0]).result(60)
    finally:
        scorer.close()


@pytest.mark.slow
def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path):
    sizes: dict[str, Any] = {
        **{"vocab_size": SPEC.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 0.01},
    }
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(tmp_path / "model")
    scorer = ModelScorer(kind="model", path=tmp_path / "model").open("scorers.teacher", tmp_path / "log")
    try:
        with pytest.raises(ScoreError, match="changes the logits behind its head"):
            scorer.start()
    finally:
        scorer.close()


@pytest.mark.slow
def test_a_rollout_that_is_longer_than_the_model_reads_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "model", tied=False, seed=3, max_positions=10)
    scorer = ModelScorer(kind="model", path=path).open("scorers.teacher", tmp_path / "log")
    fits, too_long = (make_trajectory(np.random.default_rng(5), SPEC, num_prompt=4, num_sampled=n) for n in (7, 8))
    try:
        assert len(scorer.submit(fits).result(60)) == 11
        with pytest.raises(ScoreError, match="seen: 11 positions; expected: at most 10"):
            scorer.submit(too_long).result(60)
    finally:
        scorer.close()


def test_a_process_that_is_killed_fails_the_scores_that_are_due_and_later_ones(folder: Path, tmp_path: Path):
    scorer = ModelScorer(kind="model", path=folder).open("scorers.teacher", tmp_path / "log")
    try:
        scorer.start()
        os.kill(scorer.pid, signal.SIGKILL)
        futures = [scorer.submit(each) for each in trajectories()]
        for future in futures:
            with pytest.raises(ScoreError, match="killed by SIGKILL"):
                future.result(60)
    finally:
        scorer.close()


def test_a_closed_scorer_has_no_process_and_scores_nothing(folder: Path, tmp_path: Path):
    scorer = ModelScorer(kind="model", path=folder).open("scorers.teacher", tmp_path / "logs" / "teacher.log")
    due = scorer.submit(trajectories()[0])
    scorer.close()
    scorer.close()
    with pytest.raises(ScoreError):
        due.result(60)
    with pytest.raises(ScoreError, match="closed"):
        scorer.submit(trajectories()[0]).result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(scorer.pid, 0)
    assert not (tmp_path / "logs" / "teacher.log").exists()


def test_a_score_that_was_given_up_is_not_computed(remote: RemoteModel):
    first, second = (remote.submit(trajectories()[0]) for _ in range(2))
    second.cancel()
    third = remote.submit(trajectories()[1])
    assert len(third.result(60)) == len(trajectories()[1])
    assert first.done()
    with pytest.raises(CancelledError):
        second.result(0)


@pytest.mark.slow
def test_a_process_that_does_not_answer_in_time_is_an_error(folder: Path, tmp_path: Path):
    settings = ModelScorer(kind="model", path=folder, timeout_seconds=0.5)
    scorer = settings.open("scorers.teacher", tmp_path / "log")
    try:
        scorer.start()
        os.kill(scorer.pid, signal.SIGSTOP)
        with pytest.raises(ScoreError, match=r"no answer for 0\.5 s"):
            scorer.submit(trajectories()[0]).result(60)
    finally:
        scorer.close()


def test_weights_that_are_not_finite_are_refused_with_the_token(tmp_path: Path):
    path = write_model(tmp_path / "model", tied=False, seed=3)
    made: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        made.model.norm.weight.fill_(torch.nan)
    made.save_pretrained(path)
    scorer = ModelScorer(kind="model", path=path).open("scorers.teacher", tmp_path / "log")
    try:
        with pytest.raises(ScoreError, match=r"no finite log-prob; seen: nan for token 4"):
            scorer.submit(trajectories()[0]).result(60)
    finally:
        scorer.close()


def with_tokenizer(path: Path) -> Path:
    (path / "tokenizer.json").write_text("{}")
    return path


def test_files_of_the_model_are_looked_at_before_a_run_starts(tmp_path: Path):
    path = with_tokenizer(write_model(tmp_path / "model", tied=False, seed=3))
    settings = ModelScorer(kind="model", path=path)
    settings.check_files("scorers.teacher", SPEC.vocab_size)
    with pytest.raises(ConfigError, match=r"scorers\.teacher\.path: the model has fewer tokens.*; seen: 91"):
        settings.check_files("scorers.teacher", SPEC.vocab_size + 1)
    missing = ModelScorer(kind="model", path=tmp_path / "nowhere")
    for look in (lambda: missing.check_files("scorers.teacher", None), lambda: missing.host_bytes("scorers.teacher")):
        with pytest.raises(ConfigError, match=r"^scorers\.teacher\.path: "):
            look()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"scorers\.teacher\.path: .*model\.safetensors cannot be used.*: cut"):
        settings.check_files("scorers.teacher", SPEC.vocab_size)


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
def test_memory_is_that_of_the_weights_in_the_precision_that_is_asked_for(
    folder: Path, model: Any, dtype: Any, element: int
):
    settings = ModelScorer(kind="model", path=folder, dtype=dtype)
    assert settings.host_bytes("scorers.teacher") == element * sum(each.numel() for each in model.parameters())
