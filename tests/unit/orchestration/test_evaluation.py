"""Scores and samples of a table of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moerl.config.load import load_config
from moerl.contract.trajectory import SamplingParams
from moerl.orchestration.evaluation import GREEDY_SAMPLE, SHOWN_CHARACTERS, Evaluation, sample_texts, score_rows
from moerl.orchestration.reporting import Reporter
from moerl.orchestration.rollouts import evaluation_sampling


def row(
    prompt: str, reward: float, *, sample: int = GREEDY_SAMPLE, of: str = "sums", text: str = "4"
) -> dict[str, Any]:
    return {
        "set": of,
        "prompt_id": prompt,
        "sample": sample,
        "correct": reward == 1.0,
        "num_sampled": 3,
        "finish_reason": "stop",
        "prompt": "2+2=",
        "text": text,
        "reward_reward": reward,
    }


@pytest.mark.parametrize(("keys", "top_k"), [(["evaluation.top_k=20"], 20), ([], 7)], ids=["its own", "of rollouts"])
def test_samples_are_drawn_as_the_keys_of_evaluations_say(keys: list[str], top_k: int):
    given = ["recipe=tiny", "evaluation.temperature=0.6", "evaluation.top_p=0.8", "rollout.top_k=7", *keys]
    config = load_config([*given, "run_dir=runs/x"], command="train")
    sampling = evaluation_sampling(config.evaluation, config.rollout, 3)
    assert sampling == SamplingParams(0.6, 0.8, top_k, seed=3)


def test_scores_are_of_all_problems_and_of_each_set():
    rows = [row("a", 1.0), row("b", 0.0), row("c", 1.0, of="programs")]
    scores = score_rows(rows)
    assert {name: value for name, (value, _, _) in scores.items()} == {
        "accuracy": pytest.approx(2 / 3),
        "sums accuracy": 0.5,
        "programs accuracy": 1.0,
    }
    assert all(low <= value <= high for value, low, high in scores.values())


def test_samples_of_a_problem_give_pass_at_k_and_the_majority():
    rows = [row("a", float(n == 0), sample=n, text="4" if n == 0 else "5") for n in range(4)]
    scores = {name: value for name, (value, _, _) in score_rows(rows).items()}
    assert scores == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "majority@4": 0.0}


def test_samples_show_the_highest_and_the_lowest_reward_of_each_set():
    rows = [
        row("a", 0.5),
        row("b", 1.0, text="# best\n```"),
        row("c", -1.0, text="\x1b[31mworst"),
        row("d", 0.0, of="x"),
    ]
    texts = sample_texts(rows)
    assert set(texts) == {"sums", "x"}
    best, worst = texts["sums"].split("**lowest")
    assert best.startswith("**highest: reward 1** (3 tokens, stop)")
    # Indented, so that a response is never taken for Markdown.
    assert "    # best\n    ```" in best
    assert "reward -1" in worst
    assert "\x1b" not in worst
    assert "lowest" not in texts["x"]
    assert set(sample_texts(rows[:3])) == {""}


def test_a_long_response_is_shown_by_its_start_and_its_end():
    [text] = sample_texts([row("a", 1.0, text="start" + "x" * 100_000 + "end")]).values()
    assert len(text) < 2 * SHOWN_CHARACTERS
    assert "start" in text
    assert text.endswith("end")
    assert "characters ...]" in text


def test_tensorboard_gets_the_samples_of_an_evaluation(tmp_path: Path):
    texts = sample_texts([row("a", 1.0), row("b", 0.0, of="programs")])
    with Reporter(tmp_path, "mine") as reporter:
        reporter.evaluated(2, {"dev": Evaluation(2, 0.5, 3.0, {"reward": 0.5}, samples=texts)}, {})
    events = EventAccumulator(str(tmp_path / "tensorboard" / "evaluation"))
    events.Reload()
    assert events.PluginTagToContent("text").keys() == {"samples/dev/sums", "samples/dev/programs"}
    [event] = events.Tensors("samples/dev/sums")
    assert event.step == 2
    assert event.tensor_proto.string_val[0].decode() == texts["sums"]
