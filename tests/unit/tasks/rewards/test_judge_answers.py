"""Answers of a judge that is an enemy: the table of docs/security.md, row by row. Each is a reward that fails by name,
in bounded memory and time, whose error does not show the key.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import zstandard
from memory import traced
from raw_http import Bytes, RawServer, for_ever, whole

from moerl.contract.ports import Prompt
from moerl.errors import RewardError
from moerl.tasks.rewards.judge import Judge
from moerl.tasks.rewards.section import JudgeReward

ROOT = Path(__file__).parents[4]
KEY = "sk-proj-A1/b2+c3=d4e5\"f6g7'h8"
TOO_LATE = "no answer in time"
ZEROS = bytes(64 << 20)
ZSTD, GZIP, DEFLATE = zstandard.compress(ZEROS), gzip.compress(ZEROS, 1), zlib.compress(ZEROS, 1)
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"


def says(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def in_reply(before: bytes, after: bytes) -> list[bytes]:
    """Returns a right answer with something beside its choices."""
    return whole(b'{"beside": ' + before + after + b', "choices": [{"message": {"content": "Score: 5"}}]}')


def drip(server: RawServer, first: bytes, piece: bytes = b"a") -> Iterator[bytes]:
    yield first
    while True:
        server.pause(0.05)
        yield piece


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in text)


ANSWERS: dict[str, Callable[[RawServer], Bytes]] = {
    "zstd that unpacks to 30,000 times its size": lambda _: whole(ZSTD, "Content-Encoding: zstd"),
    "gzip": lambda _: whole(GZIP, "Content-Encoding: gzip"),
    "deflate": lambda _: whole(DEFLATE, "Content-Encoding: deflate"),
    "br": lambda _: whole(b"\xcf\xff\xff\x7f\xf8\x27\x00\xe2\xb1\x40\x20\xf7\xfe\x9f", "Content-Encoding: br"),
    "gzip in zstd, or `identity` with it": lambda _: whole(
        gzip.compress(ZSTD), "Content-Encoding: identity", "content-encoding: zstd, gzip"
    ),
    "zstd that is not called so": lambda _: whole(ZSTD),
    "a transfer encoding of gzip": lambda _: [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(GZIP), GZIP),
    ],
    "a body that never ends": lambda _: for_ever(b"100000\r\n" + b" " * (1 << 20) + b"\r\n", ENDLESS + b"\r\n"),
    "a refusal that never ends": lambda _: for_ever(b"a" * (1 << 16), b"HTTP/1.1 400 No\r\nConnection: close\r\n\r\n"),
    "a body that comes byte by byte": lambda server: drip(server, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
    "headers that come byte by byte": lambda server: drip(server, b"HTTP/1.1 200 OK\r\nX-A: "),
    "nothing at all": lambda server: drip(server, b"", b""),
    "a header that never ends": lambda _: for_ever(b"a" * (1 << 16), b"HTTP/1.1 200 OK\r\nX-A: "),
    "headers without number": lambda _: for_ever(b"X-A: b\r\n" * 1000, b"HTTP/1.1 200 OK\r\n"),
    "a chunk's name that never ends": lambda _: for_ever(b"a" * (1 << 16), ENDLESS + b"\r\n1;"),
    "trailers without number": lambda _: for_ever(b"X-A: b\r\n" * 1000, ENDLESS + b"\r\n0\r\n"),
    "`100 Continue` for ever": lambda _: for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "less than its length": lambda _: [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n{}"],
    "two lengths": lambda _: whole(says("Score: 5"), "Content-Length: 3"),
    "a negative length": lambda _: [b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}"],
    "no HTTP": lambda _: [b"SSH-2.0-OpenSSH_9.6\r\n\r\n"],
    "another protocol": lambda _: [b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"],
    "no body": lambda _: whole(b""),
    "200,000 brackets": lambda _: whole(b"[" * 200_000),
    "200,000 brackets next to the reply": lambda _: in_reply(b"[" * 200_000, b"]" * 200_000),
    "a hundred thousand objects in one another": lambda _: whole(b'{"choices":[' * 100_000),
    "a number of 100,000 digits": lambda _: whole(b"9" * 100_000),
    "NaN": lambda _: whole(b'{"choices": NaN}'),
    "infinity as the score": lambda _: whole(says("Score: 1e999")),
    "no UTF-8": lambda _: whole(b'{"choices": [{"message": {"content": "\xff\xfe Score: 5"}}]}'),
    "half of a surrogate pair": lambda _: whole(b'{"choices": [{"message": {"content": "\\ud800 Score: 5"}}]}'),
    "no choice": lambda _: whole(b'{"choices": []}'),
    "a reply of another type": lambda _: whole(b'{"choices": [{"message": {"content": ["Score: 5"]}}]}'),
    "more text than `max_tokens` have": lambda _: whole(says("9" * (1 << 20))),
    "a redirect": lambda _: whole(b"", "Location: http://127.0.0.1:9/v1", status="307 Temporary Redirect"),
    "an endless pause (`Retry-After`)": lambda _: whole(b"", "Retry-After: " + "9" * 5000, status="429 Too Many"),
    "a negative one": lambda _: whole(b"", "Retry-After: -5", status="503 Busy"),
    "one in superscript digits": lambda _: [
        "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: ²\r\n\r\n".encode()
    ],
    "the key in a refusal": lambda _: whole(f"unknown key {KEY}".encode(), status="401 Who"),
    "the key in the status line": lambda _: whole(b"", status=f"401 {KEY}"),
    "the key in a broken status line": lambda _: [f"HTTP/1.1 {KEY}\r\n\r\n".encode()],
    "the key in a broken header": lambda _: [f"HTTP/1.1 200 OK\r\nBearer {KEY}\r\n\r\n".encode()],
    "the key as the pause": lambda _: whole(b"", f"Retry-After: {KEY}", status="503 Busy"),
    "the key as the content encoding": lambda _: whole(b"", f"Content-Encoding: {KEY}"),
    "the key in place of JSON": lambda _: whole(KEY.encode()),
    "the key as a reply": lambda _: whole(says(KEY)),
    "the key as a score": lambda _: whole(says(f"Score: {KEY}")),
    "the key at the cut of a message": lambda _: whole(b"." * 290 + KEY.encode(), status="400 No"),
    "the key as JSON escapes it": lambda _: whole(json.dumps({"got": KEY}).encode(), status="400 No"),
    "the key in escapes of JSON alone": lambda _: whole(escaped(KEY).encode(), status="400 No"),
    "the key as URLs escape it": lambda _: whole(quote(KEY, safe="").encode(), status="400 No"),
    "the key in base64": lambda _: whole(base64.b64encode(f"user:{KEY}".encode()), status="400 No"),
    "the key in hexadecimal": lambda _: whole(KEY.encode().hex().upper().encode(), status="400 No"),
    "half of the key": lambda _: whole(KEY[: len(KEY) // 2].encode(), status="400 No"),
}


def table() -> dict[str, str]:
    """Returns the rows of the page: the answer, and what its reward fails with."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = page.partition("## Answers of a judge that were tried")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.+?) \| .*`([^`]+)`[^`|]* \|$", section, re.MULTILINE))


@pytest.fixture
def server() -> Iterator[RawServer]:
    made = RawServer(list)
    yield made
    made.close()


@pytest.fixture
def make(server: RawServer, tmp_path: Path) -> Iterator[Callable[[float], Judge]]:
    file, made = tmp_path / "key", list[Judge]()
    file.touch(0o600)
    file.write_text(KEY)

    def begin(seconds: float) -> Judge:
        keys = {"url": server.url, "model": "m", "question": "?", "pattern": r"Score: (\S+)", "key_file": file}
        config = JudgeReward.model_validate(
            {"kind": "judge", **keys, "timeout_seconds": seconds, "retries": 0, "highest": 10.0}
        )
        made.append(Judge(config, "task.rewards.quality"))
        return made[-1]

    yield begin
    for judge in made:
        judge.close()


def shown(error: BaseException) -> str:
    """Returns all that anybody may see of an error: its text, those of its causes, and a traceback."""
    return str(error) + repr(error) + "".join(traceback.format_exception(error))


def test_the_page_lists_the_answers_that_are_tried_here():
    assert list(table()) == list(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_reply_is_a_reward_that_fails_by_name(
    name: str, server: RawServer, make: Callable[[float], Judge]
):
    server.answer = lambda: ANSWERS[name](server)
    judge = make(1.0 if table()[name] == TOO_LATE else 60.0)
    with traced() as peak, pytest.raises(RewardError) as caught:
        judge.submit(Prompt("a:1", "2 + 3 =", {}), "5").result()
    assert table()[name] in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert peak() < 32 << 20
    assert "Accept-Encoding: identity\r\n" in server.asked[0]
    assert f"Authorization: Bearer {KEY}\r\n" in server.asked[0]
    text = shown(caught.value)
    for form in (KEY, KEY[: len(KEY) // 2], KEY[-12:], escaped(KEY), quote(KEY, safe=""), json.dumps(KEY)[1:-1]):
        assert form not in text
    for form in (base64.b64encode(f"user:{KEY}".encode()).decode()[7:-4], KEY.encode().hex()):
        assert form.lower() not in text.lower()


def test_the_key_goes_to_no_other_address(server: RawServer, make: Callable[[float], Judge]):
    other = RawServer(lambda: whole(says("Score: 5")))
    server.answer = lambda: whole(b"", f"Location: {other.url}", status="308 Permanent Redirect")
    with pytest.raises(RewardError, match="status 308"):
        make(60.0).submit(Prompt("a:1", "2 + 3 =", {}), "5").result()
    other.close()
    assert other.asked == []


def test_a_cookie_is_not_sent_back(server: RawServer, make: Callable[[float], Judge]):
    server.answer = lambda: whole(says("Score: 5"), "Set-Cookie: a=b", "Connection: close")
    judge = make(60.0)
    for _ in range(2):
        assert judge.submit(Prompt("a:1", "2 + 3 =", {}), "5").result()["reward"] == 0.5
    assert not any("cookie" in each.lower() for each in server.asked)
