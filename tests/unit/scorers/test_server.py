"""A server that scores tokens, asked over HTTP: its answers, and what is no answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import FULL, SPEC, make_trajectory
from raw_http import Bytes, RawServer, whole

from moerl.config.load import load_config
from moerl.errors import ConfigError, ScoreError
from moerl.scorers import server as module
from moerl.scorers.server import AskedServer, ServerScorer

KEY = "sk-1234567890abcdef"
TRAJECTORY = make_trajectory(np.random.default_rng(1), SPEC, num_prompt=4, num_sampled=3, sampling=FULL)
IDS = TRAJECTORY.token_ids.tolist()
Make = Callable[..., AskedServer]


def answer(*logprobs: float | None, ids: list[int] | None = None) -> bytes:
    tokens = IDS[-len(logprobs) :] if ids is None else ids
    rows = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    return json.dumps({"text": "x", "meta_info": {"input_token_logprobs": rows, "id": "a"}}).encode()


GOOD = answer(None, -1.5, -0.25, -3.0)


@pytest.fixture
def raw() -> Iterator[RawServer]:
    server = RawServer(lambda: whole(GOOD))
    yield server
    server.close()


@pytest.fixture
def make(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    opened: list[AskedServer] = []

    def scorer(**changes: Any) -> AskedServer:
        opened.append(ServerScorer(kind="server", url=raw.url.removesuffix("/v1"), **changes).open("scorers.t", Path()))
        return opened[-1]

    yield scorer
    for each in opened:
        each.close()


def in_turn(*answers: Bytes) -> Callable[[], Bytes]:
    left = iter(answers)
    return lambda: next(left)


def test_a_sampled_token_gets_the_log_prob_that_the_server_gives_it(make: Make, raw: RawServer):
    scores = make().submit(TRAJECTORY).result(60)
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0, 0.0, 0.0, 0.0, -1.5, -0.25, -3.0]
    body = json.loads(raw.asked[0].partition("\n\n")[2])
    assert (body["input_ids"], body["logprob_start_len"]) == (IDS, 3)


def test_a_request_that_may_succeed_later_is_asked_again(make: Make, raw: RawServer):
    raw.answer = in_turn(whole(b"busy", status="503 Service Unavailable"), [], whole(GOOD))
    assert make(retries=2).submit(TRAJECTORY).result(60)[-1] == -3.0
    assert len(raw.asked) == 3


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (whole(answer(None, -1.5, -0.25, None)), "no finite log-prob of token 6"),
        (whole(answer(None, -1.5, -0.25)), "3 tokens from 3 on, and others than were sent"),
        (whole(answer(None, -1.5, -0.25, -3.0, ids=[1, 2, 3, 4])), "and others than were sent"),
        (whole(b"{}"), "meta_info"),
        (whole(b"no such token", status="400 Bad Request"), "status 400: no such token; asked 1 times"),
        (whole(b"busy", status="503 Service Unavailable"), "status 503: busy; asked 2 times"),
        (whole(KEY.encode(), status="401 Unauthorized"), r"status 401: \[key\]"),
    ],
)
def test_an_answer_without_the_scores_ends_the_run_with_its_cause(
    said: Bytes, why: str, make: Make, raw: RawServer, tmp_path: Path
):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    raw.answer = lambda: said
    with pytest.raises(ScoreError, match=why) as caught:
        make(retries=1, key_file=tmp_path / "key").submit(TRAJECTORY).result(60)
    assert str(caught.value).startswith("scorers.t: the server at http://127.0.0.1:")
    assert KEY not in str(caught.value)


def test_a_server_that_is_not_there_is_an_error_of_the_start(make: Make, raw: RawServer):
    scorer = make(retries=0)
    raw.close()
    try:
        with pytest.raises(ScoreError, match="does not score"):
            scorer.start()
    finally:
        raw.__init__(lambda: whole(GOOD))  # the fixture closes it


def test_a_closed_scorer_asks_nothing(make: Make, raw: RawServer):
    scorer = make()
    scorer.close()
    scorer.close()
    with pytest.raises(ScoreError, match="closed"):
        scorer.submit(TRAJECTORY).result(60)
    assert raw.asked == []


def test_a_key_file_that_others_may_read_is_refused_before_a_run(tmp_path: Path):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o644)
    settings = ServerScorer(kind="server", url="http://127.0.0.1:1", key_file=tmp_path / "key")
    with pytest.raises(ConfigError, match=r"scorers\.t\.key_file"):
        settings.check_files("scorers.t", None)


def test_samples_of_another_temperature_are_refused():
    keys = ["recipe=tiny", "scorers={t: {kind: server, url: 'http://127.0.0.1:1'}}"]
    assert load_config(keys, command="train").scorers["t"].host_bytes("scorers.t") == 0
    with pytest.raises(ConfigError, match=r"scorers\.t: a server scores at a temperature of 1 alone; seen: .*=0\.7"):
        load_config([*keys, "rollout.temperature=0.7"], command="train")


def test_a_kind_that_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"scorers\.t\.kind: unknown kind; seen: oracle; expected: 'model', 'server'"):
        load_config(["recipe=tiny", "scorers={t: {kind: oracle}}"], command="train")
