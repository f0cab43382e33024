"""No response alone fails or hangs a reward: every kind of reward, each on a table of hostile responses.

Kinds come from the configuration's union, so a new one is tried here by itself. Rewards are asked for as a run does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
from hostile_responses import HOSTILE, SLOW
from pydantic import TypeAdapter

from moerl.contract.ports import Prompt
from moerl.errors import RewardError
from moerl.tasks.rewards.make import make_scorer
from moerl.tasks.rewards.scorer import RewardScorer
from moerl.tasks.rewards.section import Reward

KINDS = {get_args(each.model_fields["kind"].annotation)[0]: each for each in get_args(get_args(Reward)[0])}
BACKTRACKS = "((?:a+)+)b"
SCHEMA = {"anyOf": [{"type": ["number", "object", "array"]}, {"pattern": BACKTRACKS}]}
ROW = {"answer": "x + 1", "tests": "assert answer == 1"}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"pattern": BACKTRACKS},
    "json": {"column": "schema"},
    "code": {"column": "tests", "program_seconds": 0.5, "program_memory_bytes": 1 << 28},
    "judge": {"pattern": "score (.)", "question": "{prompt} {response}", "model": "judge"},
    "function": {"function": "harmless:length"},
}
"""Keys of a kind beside, or in place of, those of `COMMON`."""
COMMON = {"column": "answer", "pattern": BACKTRACKS}


@pytest.fixture
def judge_url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps({"choices": [{"message": {"content": "score 0"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


Make = Callable[..., RewardScorer]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge_url: str) -> Iterator[Make]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "harmless.py").write_text("def length(row, response):\n    return 0.0 * len(response)\n")
    made: list[RewardScorer] = []

    def begin(kind: str, **keys: Any) -> RewardScorer:
        fields = KINDS[kind].model_fields
        settings = {
            "timeout_seconds": 2.0,
            "memory_bytes": 1 << 30,
            "url": judge_url,
            **COMMON,
            **SETTINGS.get(kind, {}),
        }
        asked = {name: value for name, value in {**settings, **keys}.items() if name in fields}
        reward: Reward = TypeAdapter(Reward).validate_python({"kind": kind, **asked})
        made.append(make_scorer({"it": reward}, None))
        return made[-1]

    yield begin
    for scorer in made:
        scorer.close()


def check_rewarded(scorer: RewardScorer, responses: dict[str, str]) -> None:
    prompt = Prompt("a:1", "1 + x =", {**ROW, "schema": json.dumps(SCHEMA)})
    futures = {name: scorer.score(prompt, "a:1", response) for name, response in responses.items()}
    wait(futures.values())
    failed = {name: str(future.exception())[:300] for name, future in futures.items() if future.exception()}
    assert failed == {}


@pytest.mark.parametrize("kind", KINDS)
def test_no_response_alone_fails_or_hangs_a_reward(make: Make, kind: str):
    check_rewarded(make(kind), HOSTILE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_response_alone_fails_or_hangs_a_reward_by_what_takes_long(make: Make, kind: str):
    check_rewarded(make(kind), SLOW)


@pytest.mark.parametrize(
    ("kind", "response", "unscored"),
    [
        ("json", "[" * 100_000, 1.0),
        ("json", "[]", 0.0),
        ("json", "{", 0.0),
        ("regex", "a" * 40_000, 1.0),
        ("regex", "c", 0.0),
        ("regex", "ab", 0.0),
    ],
)
def test_a_reward_says_whether_it_is_0_because_it_could_not_look_at_the_response(
    make: Make, kind: str, response: str, unscored: float
):
    prompt = Prompt("a:1", "", {**ROW, "schema": json.dumps(SCHEMA)})
    rewards = make(kind).score(prompt, "a:1", response).result()
    assert rewards["it.unscored"] == unscored
    assert rewards["it"] == rewards["accuracy"] == float(response in ("[]", "ab"))


@pytest.mark.slow
def test_a_program_that_could_not_be_scored_has_all_names_of_one_that_was(make: Make):
    # Its tests together take longer than the reward may.
    prompt = Prompt("a:1", "", {"tests": [{"input": "", "output": ""}] * 3})
    scorer = make("code", partial=True, program_seconds=2.0, timeout_seconds=4.0)
    scored, unscored = (scorer.score(prompt, "a:1", text) for text in ("1", "while True: pass"))
    assert scored.result()["it.passed"] == 1.0
    assert unscored.result() == {**dict.fromkeys(scored.result(), 0.0), "it.unscored": 1.0}


@pytest.mark.parametrize(
    ("kind", "row", "keys", "message"),
    [
        ("math", {"answer": "$"}, {}, "math-verify reads no answer"),
        ("exact", {}, {}, "no column 'answer'"),
        ("exact", {"answer": "a" * 40_000}, {"answer_pattern": BACKTRACKS, "timeout_seconds": 0.3}, "time limit"),
        ("json", {"schema": "{"}, {}, "JSONDecodeError"),
        ("json", {"schema": {"type": 5}}, {}, "not a JSON schema"),
        ("code", {"tests": ""}, {}, "no tests"),
    ],
)
def test_a_row_that_fails_every_response_fails_hostile_ones_too(
    make: Make, kind: str, row: dict[str, Any], keys: dict[str, Any], message: str
):
    scorer = make(kind, **keys)
    for response in ("5", HOSTILE["brackets"]):
        with pytest.raises(RewardError, match=message):
            scorer.score(Prompt("a:1", "", row), "a:1", response).result()
