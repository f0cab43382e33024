"""JSON schemas of strangers: they are read without network and files, and an endless one ends."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_http import RawServer, whole
from scored_process import ScoredProcess

from moerl.errors import RewardError
from moerl.tasks.rewards import builtin

DRAFTS = ["https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"] + [
    f"http://json-schema.org/draft-0{number}/schema#" for number in (7, 6, 4)
]


@pytest.fixture
def server() -> Iterator[RawServer]:
    """Yields an address with schemas that any value meets; nobody may ask it."""
    made = RawServer(lambda: whole(b"{}"))
    yield made
    made.close()
    assert made.asked == []


@pytest.fixture(autouse=True)
def no_sockets(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses sockets, names that are looked up, and addresses that are read."""

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the network was asked")

    for owner, name in (
        (socket.socket, "connect"),
        (socket, "getaddrinfo"),
        (socket, "create_connection"),
        (urllib.request, "urlopen"),
    ):
        monkeypatch.setattr(owner, name, refuse)


def score(schema: Any, response: str) -> float:
    return builtin.json_schema(schema=None, column="schema")({"schema": schema}, response)


OUTSIDE: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "an address": lambda url, _: {"$ref": url},
    "a file": lambda _, file: {"$ref": file},
    "an address without protocol": lambda url, _: {"$ref": url.removeprefix("http:")},
    "a place at an address": lambda url, _: {"$ref": f"{url}#/$defs/a"},
    "a dynamic reference": lambda url, _: {"$dynamicRef": f"{url}#a"},
    "a base address and a name": lambda url, _: {"$id": f"{url}/base", "$ref": "other.json"},
    "a base file and a name": lambda _, file: {"$id": f"{file}.base", "$ref": file.rpartition("/")[2]},
    "a base address further in": lambda url, _: {"properties": {"a": {"$id": f"{url}/base", "$ref": "other"}}},
    "a property": lambda url, _: {"properties": {"a": {"$ref": url}}},
    "a condition": lambda url, _: {"if": {"required": ["a"]}, "then": {"$ref": url}},
    "a place that is no schema": lambda url, _: {"$ref": "#/more/a", "more": {"a": {"$ref": url}}},
    "a definition that nothing uses": lambda url, _: {"$defs": {"a": {"items": {"$ref": url}}}},
    "an unknown draft as well": lambda url, _: {"$schema": url, "$ref": url},
    "a draft further in": lambda url, _: {"$defs": {"a": {"$schema": url, "$id": url, "$ref": "b"}}},
    "a name": lambda *_: {"$ref": "urn:a:b"},
    "a place that is not there": lambda *_: {"$ref": "#/$defs/none"},
    "an anchor that is not there": lambda *_: {"$ref": "#none"},
}


@pytest.mark.parametrize("response", ["{}", '{"a": 1}', "no JSON"])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_schema_that_refers_to_something_outside_fails_its_row(
    kind: str, response: str, server: RawServer, tmp_path: Path
):
    (tmp_path / "schema.json").write_text("{}")
    schema = OUTSIDE[kind](server.url, (tmp_path / "schema.json").as_uri())
    with pytest.raises(ValueError, match=r"the JSON schema has \$(ref|dynamicRef) '.*nothing is fetched"):
        score(schema, response)
    with pytest.raises(ValueError, match="nothing is fetched"):
        score(json.dumps(schema), response)
    with pytest.raises(ValueError, match="nothing is fetched"):
        builtin.json_schema(schema=schema, column=None)


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_address_is_refused_in_every_draft(draft: str, server: RawServer):
    with pytest.raises(ValueError, match="nothing is fetched"):
        score({"$schema": draft, "allOf": [{"$ref": server.url}]}, "{}")


INTEGER = {"type": "integer"}
INSIDE: dict[str, dict[str, Any]] = {
    "a place": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": INTEGER}},
    "an old place": {"$schema": DRAFTS[2], "items": {"$ref": "#/definitions/a"}, "definitions": {"a": INTEGER}},
    "an anchor": {"items": {"$ref": "#a"}, "$defs": {"b": {"$anchor": "a", **INTEGER}}},
    "a dynamic anchor": {"items": {"$dynamicRef": "#a"}, "$defs": {"b": {"$dynamicAnchor": "a", **INTEGER}}},
    "its own address": {"$id": "http://127.0.0.1:9/base", "items": {"$ref": "base#/$defs/a"}, "$defs": {"a": INTEGER}},
    "the address of a part": {
        "items": {"$ref": "http://127.0.0.1:9/a"},
        "$defs": {"a": {"$id": "http://127.0.0.1:9/a", **INTEGER}},
    },
    "a place that is no schema": {"items": {"$ref": "#/more/a"}, "more": {"a": INTEGER}},
    "an unknown draft": {"$schema": "http://127.0.0.1:9/draft", "items": INTEGER},
    "names that only look like references": {
        "items": INTEGER,
        "not": {"enum": [{"$ref": "http://127.0.0.1:9"}]},
        "properties": {"$ref": {"const": {"$ref": "http://127.0.0.1:9"}}},
    },
}


@pytest.mark.parametrize("kind", INSIDE)
def test_a_schema_may_refer_to_itself(kind: str):
    assert (score(INSIDE[kind], "[1, 2]"), score(INSIDE[kind], '["a"]')) == (1.0, 0.0)


def test_a_schema_of_trees_refers_to_itself_and_ends():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert score(tree, '{"left": {"left": {}}, "right": {}}') == 1.0
    assert score(tree, '{"left": {"left": 5}}') == 0.0


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_itself_may_be_referred_to(draft: str):
    assert score({"$ref": draft}, '{"type": "object"}') == 1.0
    assert score({"$ref": draft}, '{"type": 5}') == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"if": {"type": "object"}, "then": {"$ref": "#"}},
        json.loads('{"not":' * 300 + "{}" + "}" * 300),
    ],
)
def test_a_schema_that_leads_round_in_a_circle_fails_its_row(schema: Any):
    with pytest.raises(ValueError, match="without end, or is nested too deep"):
        score(schema, "no JSON")


@pytest.mark.parametrize("schema", [5, None, "5", "null", [], {"type": 5}, {"$ref": 5}, {"pattern": "("}])
def test_what_is_no_schema_fails_its_row(schema: Any):
    with pytest.raises(ValueError, match="not a JSON schema"):
        score(schema, "{}")


DOUBLED = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]} for n in range(40)}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoredProcess]:
    monkeypatch.undo()
    maker = "moerl.tasks.rewards.builtin:json_schema"
    settings = {"schema": None, "column": "schema"}
    process = ScoredProcess(maker, 1.5, 1 << 32, "task.rewards.form.function", settings)
    yield process
    process.close()


def test_a_schema_that_takes_for_ever_ends_at_the_time_limit_of_its_reward(impatient: ScoredProcess):
    schema = {"$ref": "#/$defs/0", "$defs": DOUBLED | {"40": {}}}
    with pytest.raises(RewardError, match="time limit passed"):
        impatient.score({"schema": schema}, "5")


def test_a_response_that_a_pattern_takes_for_ever_over_is_0(impatient: ScoredProcess):
    rewards = impatient.score({"schema": {"pattern": "^(a+)+$"}}, json.dumps("a" * 60 + "!"))
    assert (rewards["reward"], rewards["unscored"]) == (0.0, 1.0)
