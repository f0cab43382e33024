"""Weights that a server reports: parts that add up, copies that agree, tensors that are whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from sglang_live import digests, dtypes
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.digests import ServedModel, read_parts

Ranks = list[dict[str, str]]
TENSORS = {"embed": torch.randn(7, 4), "norm": torch.randn(5), "down": torch.randn(3, 6)}
MODEL = ServedModel({name: tuple(tensor.shape) for name, tensor in TENSORS.items()}, 2, {"head": "embed"})


def record(name: str, first_row: int, end_row: int, first_column: int, end_column: int, checksum: str = "") -> str:
    """Makes a rank's record of a part: its checksum is that of the tensor with zeros everywhere else."""
    tensor = TENSORS[name]
    part = torch.zeros_like(tensor[:, None].flatten(1))
    region = slice(first_row, end_row), slice(first_column, end_column)
    part[region] = tensor[:, None].flatten(1)[region]
    checksum = checksum or str(checksums([("part", part)])["part"])
    return f"float32:{first_row}:{end_row}:{first_column}:{end_column}:{checksum}"


def two_ranks() -> Ranks:
    """Rows cut, with padding behind them; copies; columns cut."""
    return [
        {"embed": record("embed", 0, 4, 0, 4), "norm": record("norm", 0, 5, 0, 1), "down": record("down", 0, 3, 0, 3)},
        {"embed": record("embed", 4, 8, 0, 4), "norm": record("norm", 0, 5, 0, 1), "down": record("down", 0, 3, 3, 6)},
    ]


class Server:
    """Answers `/weights_checker` with what a test says; keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.asked: list[tuple[str, str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.asked.append((self.path, self.headers["authorization"], body))
                content = server.answer if isinstance(server.answer, bytes) else json.dumps(server.answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint(f"http://127.0.0.1:{self._http.server_address[1]}", "key", "admin")
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def say(self, ranks: Ranks) -> None:
        answers = [{"checksums": records, "per_gpu_checksum": "", "parallelism_info": {}} for records in ranks]
        self.answer = {"success": True, "message": "Success.", "ranks": answers}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_parts_add_up_to_the_checksums_of_whole_tensors(server: Server):
    server.say(two_ranks())
    expected = checksums(TENSORS.items())
    assert digests(server.endpoint, MODEL) == expected | {"head": expected["embed"]}
    path, key, body = server.asked[0]
    assert (path, key, body["action"]) == ("/weights_checker", "Bearer admin", "held")


def test_dtypes_are_asked_for_without_checksums(server: Server):
    server.say([{name: text.rsplit(":", 1)[0] + ":" for name, text in rank.items()} for rank in two_ranks()])
    assert dtypes(server.endpoint, MODEL) == dict.fromkeys([*TENSORS, "head"], "float32")
    assert server.asked[0][2]["action"] == "held_layout"


def test_a_changed_part_changes_the_checksum_of_its_tensor_alone(server: Server):
    ranks = two_ranks()
    ranks[1]["down"] = record("down", 0, 3, 3, 6, checksum="1")
    server.say(ranks)
    seen = digests(server.endpoint, MODEL)
    expected = checksums(TENSORS.items())
    assert [name for name in expected if seen[name] != expected[name]] == ["down"]


def change(rank: int, name: str, text: str | None) -> Callable[[Ranks], None]:
    def apply(ranks: Ranks) -> None:
        del ranks[rank][name]
        if text is not None:
            ranks[rank][name] = text

    return apply


def add_unknown(ranks: Ranks) -> None:
    ranks[1]["adapter"] = ranks[1]["norm"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(1, "norm", record("norm", 0, 5, 0, 1, checksum="9")), r"copies of 'norm' differ.*rank 0.*rank 1.* 9"),
        (change(1, "norm", record("norm", 0, 5, 0, 1).replace("float32", "bfloat16")), r"copies of 'norm' differ"),
        (change(1, "down", record("down", 0, 3, 3, 6).replace("float32", "bfloat16")), r"parts of 'down'.*one dtype"),
        (change(0, "embed", record("embed", 0, 4, 0, 4) + " " + record("embed", 0, 4, 0, 4, "9")), "'embed' differ"),
        (change(1, "down", None), r"not held whole.*'down': rows \(0, 3\) columns \(0, 3\) \(rank 0\)"),
        (change(0, "embed", record("embed", 0, 3, 0, 4)), r"not held whole.*'embed'"),
        (change(0, "embed", record("embed", 0, 5, 0, 4)), r"not held whole.*'embed'"),
        (change(0, "embed", record("embed", 0, 4, 0, 3)), r"not held whole.*'embed'"),
        (change(1, "embed", "!quantized"), r"cannot tell what it holds of 'embed'.*rank 1: quantized"),
        (change(1, "embed", "float32:4:8:0:9"), r"record of 'embed'.*rank 1"),
        (change(1, "embed", "float32:4:8:0:4:x"), r"record of 'embed'.*rank 1"),
        (add_unknown, r"the checkpoint has not.*'adapter' \(rank 1\)"),
        (lambda ranks: ranks.pop(), r"ranks that answered.*1.*2"),
    ],
)
def test_answers_that_are_no_whole_model_are_refused_by_name(spoil: Callable[[Ranks], None], message: str):
    ranks = two_ranks()
    spoil(ranks)
    with pytest.raises(WeightSyncError, match=message):
        read_parts(ranks, MODEL)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"success": False, "message": "Unsupported action='held'"}, "Unsupported action"),
        (b"{", "no answer"),
        ({"success": True, "message": "", "ranks": [{"checksums": {"a": 1}}]}, "no answer"),
        (b" " * 300_000, "too long"),
        (b"[" * 100_000, "no answer"),
    ],
)
def test_unreadable_answers_are_refused(server: Server, answer: Any, message: str):
    server.answer = answer
    with pytest.raises(WeightSyncError, match=message):
        digests(server.endpoint, MODEL)


def test_a_server_that_is_gone_is_an_error(server: Server):
    server.close()
    with pytest.raises(WeightSyncError, match="no answer"):
        digests(server.endpoint, MODEL)


def test_copies_of_a_part_count_once():
    ranks = two_ranks() + two_ranks()
    parts = read_parts(ranks, ServedModel(MODEL.shapes, 4, {}))
    assert {name: len(held) for name, held in parts.items()} == {"embed": 2, "norm": 1, "down": 2}


def test_a_rank_that_holds_nothing_but_padding_is_left_out():
    whole: Tensor = TENSORS["embed"]
    ranks = two_ranks()
    ranks[0]["embed"] = record("embed", 0, len(whole), 0, 4)
    ranks[1]["embed"] = f"float32:{len(whole)}:{len(whole) + 8}:0:4:0"
    assert len(read_parts(ranks, MODEL)["embed"]) == 1
