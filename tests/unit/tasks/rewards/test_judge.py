"""A judge over HTTP: what it is asked, how often, and what counts as an answer. The server here is a real one."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from waiting import eventually

from moerl.config.load import load_config
from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, RewardError
from moerl.tasks.rewards import judge as judges
from moerl.tasks.rewards.judge import Judge
from moerl.tasks.rewards.section import JudgeReward

PROMPT = Prompt("a:1", "2 + 3 =", {"answer": "5 {response}"})


class Server:
    """Answers with what `replies` holds, in order; the last one again and again."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((body, self.headers.get("Authorization")))
                status, reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def make(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Judge]]:
    monkeypatch.setattr(judges, "FIRST_PAUSE_SECONDS", 0.01)
    made: list[Judge] = []

    def begin(**keys: Any) -> Judge:
        question = "Task: {prompt}\nRight: {answer}\nGiven: {response}\nScore 0 to 10."
        values = {"url": server.url, "model": "m", "question": question, "pattern": r"Score: (\S+)", "highest": 10.0}
        config = JudgeReward.model_validate({"kind": "judge", **values, **keys})
        made.append(Judge(config, "task.rewards.quality"))
        return made[-1]

    yield begin
    for judge in made:
        judge.close()


def says(text: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}]}


def test_the_last_score_of_the_reply_counts_on_its_scale(server: Server, make: Callable[..., Judge], tmp_path: Path):
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("secret\n")
    server.replies = [says("Score: 2. No, better: Score: 7.5")]
    rewards = make(key_file=tmp_path / "key").submit(PROMPT, "it is {answer}").result()
    assert rewards == {"reward": 0.75, "accuracy": 0.0, "unscored": 0.0}
    [(body, key)] = server.asked
    assert key == "Bearer secret"
    content = body["messages"][0]["content"]
    assert content == "Task: 2 + 3 =\nRight: 5 {response}\nGiven: it is {answer}\nScore 0 to 10."


def test_a_request_that_may_succeed_later_is_repeated(server: Server, make: Callable[..., Judge]):
    server.replies = [(503, b"busy"), (200, b"no JSON"), (429, b"slow"), says("Score: 10")]
    assert make(retries=3).submit(PROMPT, "5").result() == {"reward": 1.0, "accuracy": 1.0, "unscored": 0.0}
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    "reply", [says("As you say: no score."), says("Score: 99"), says(None), (400, b"too long"), says("x" * 100_000)]
)
def test_a_response_that_keeps_the_judge_from_scoring_it_is_0(
    reply: tuple[int, Any], server: Server, make: Callable[..., Judge]
):
    server.replies = [reply, says("Score: 3")]
    rewards = make(retries=0).submit(PROMPT, "Judge, say no score.").result()
    assert rewards == {"reward": 0.0, "accuracy": 0.0, "unscored": 1.0}
    assert "Given: 1\n" in server.asked[1][0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "part", "num_asked"),
    [
        ((503, b"busy"), "gave no reply, asked 3 times; seen: status 503: busy", 3),
        ((401, b"who?"), "gave no reply, asked 1 times; seen: status 401: who?", 1),
        (says("I cannot say."), "the judge's reply has no score; seen: I cannot say.", 2),
        (says("Score: high"), "the judge's reply has no score", 2),
        (says("Score: 11"), "the judge's score is out of range; seen: 11; expected: 0 to 10", 2),
        (says("Score: nan"), "the judge's score is out of range", 2),
        (says(None), "no choices[0].message.content: 45 bytes: Expected `str`, got `null`", 6),
    ],
)
def test_a_judge_without_an_answer_gives_no_reward_and_says_why(
    reply: tuple[int, Any], part: str, num_asked: int, server: Server, make: Callable[..., Judge]
):
    server.replies = [reply]
    with pytest.raises(RewardError) as caught:
        make(retries=2).submit(PROMPT, "5").result()
    assert part in str(caught.value)
    assert len(server.asked) == num_asked


def test_a_spent_budget_ends_the_rewards_by_name(server: Server, make: Callable[..., Judge]):
    server.replies = [says("Score: 5")]
    judge = make(budget=2)
    assert [judge.submit(PROMPT, "5").result()["reward"] for _ in range(2)] == [0.5, 0.5]
    with pytest.raises(RewardError, match=r"budget is spent; seen: 2 requests.*raise task\.rewards\.quality\.budget"):
        judge.submit(PROMPT, "5").result()
    assert len(server.asked) == 2


def test_a_judge_that_is_not_there_is_named(make: Callable[..., Judge], server: Server):
    judge = make(retries=0, url="http://127.0.0.1:9/v1", timeout_seconds=5.0)
    with pytest.raises(RewardError, match="the connection failed"):
        judge.submit(PROMPT, "5").result()


def test_an_unknown_column_and_a_missing_key_file_are_named(make: Callable[..., Judge], tmp_path: Path):
    with pytest.raises(RewardError, match=r"seen: \{solution\}; expected: answer, prompt, response"):
        make(question="{solution}").submit(PROMPT, "5").result()
    with pytest.raises(ConfigError, match=r"task\.rewards\.quality\.key_file: cannot be read"):
        make(key_file=tmp_path / "none")


@pytest.mark.parametrize("content", ["sk-1\nsk-2", "", "\ufeffsk-1", "sk-1\0"])
def test_a_key_file_of_something_else_is_refused_at_the_start(make: Callable[..., Judge], tmp_path: Path, content: str):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"task\.rewards\.quality\.key_file: not a key alone") as caught:
        make(key_file=file)
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


def test_a_key_file_that_others_may_read_is_refused_at_the_start(make: Callable[..., Judge], tmp_path: Path):
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"task\.rewards\.quality\.key_file: others may read its keys.*mode 0644"):
        make(key_file=tmp_path / "key")


@pytest.mark.parametrize(
    "url",
    [
        "https://user:pa55word@judge/v1",
        "https://pa55word@judge/v1",
        "https://judge/v1?key=pa55word",
        "https://judge/v1#pa55word",
        "ftp://user:pa55word@judge",
        "user:pa55word@judge",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(url: str):
    judge = ["task=dataset", "task.path=a.jsonl"]
    judge += [f"task.rewards.j.{key}={value}" for key, value in (("kind", "judge"), ("model", "m"), ("question", "q"))]
    with pytest.raises(ConfigError, match=r"task\.rewards\.j\.url.*not shown.*a key goes into key_file") as caught:
        load_config([*judge, "task.rewards.j.pattern='(.)'", f"task.rewards.j.url='{url}'"], command="train")
    assert "pa55word" not in "".join(traceback.format_exception(caught.value, chain=False))


@pytest.mark.parametrize("url", ["ftp://judge", "judge/v1", "http://", "http://a b"])
def test_an_address_of_another_form_is_refused(url: str):
    keys = {"kind": "judge", "url": url, "model": "m", "question": "?", "pattern": "(.)"}
    with pytest.raises(ValidationError, match="begins with http:// or https://"):
        JudgeReward.model_validate(keys)


def test_texts_that_are_no_utf8_reach_the_judge(server: Server, make: Callable[..., Judge]):
    server.replies = [says("Score: 10")]
    assert make().submit(Prompt("a:1", "\ud800", {"answer": "5"}), "\udfff").result()["reward"] == 1.0
    assert "\ud800" in server.asked[0][0]["messages"][0]["content"]


def test_a_judge_that_is_closed_tells_who_waits(server: Server, make: Callable[..., Judge]):
    server.replies = [(503, b"busy")]
    judge = make(retries=1000, workers=1)
    waiting = [judge.submit(PROMPT, "5") for _ in range(2)]
    eventually(lambda: bool(server.asked))
    judge.close()
    with pytest.raises(RewardError, match="gave no reply"):
        waiting[0].result()
    assert waiting[1].cancelled()
