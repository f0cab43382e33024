"""Prompts from a JSON-lines file, scored by a user's function. Runs in the controller."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Field

from moerl.contract.ports import DemonstrationTask, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, RewardError
from moerl.sections import FilePath, FunctionName, Part, Positive
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess
from moerl.tasks.section import TaskSection
from moerl.telemetry.terminal import excerpt

MAX_LINE_BYTES = 1 << 24
"""Longest line of a file of rows."""

MAX_DEPTH = 64
"""Lists and objects in one another, the row itself counted."""

SPLITS = ("train", "dev", "heldout")

DUMMY_RESPONSE = "This text tries the reward function; no model wrote it."
"""What the reward function is tried on where no row has a demonstration."""


class JsonlTaskConfig(TaskSection):
    """Prompts from a JSONL file and a reward function of your own."""

    may_change: ClassVar = frozenset({"reward_workers", "reward_timeout_seconds", "reward_memory_bytes"})
    plan_values: ClassVar = {"path": "unnamed.jsonl", "reward": "unnamed:unnamed"}

    name: Literal["jsonl"] = Field(description="Task.")
    path: FilePath = Field(description="JSONL file, one object per problem.")
    reward: FunctionName = Field(description='Reward function, as "package.module:function".')
    prompt_key: Annotated[str, Field(min_length=1)] = Field(description="Key of the prompt text in a row.")
    response_key: Annotated[str, Field(min_length=1)] | None = Field(
        description="Key of a demonstration in a row; null = the file has none."
    )
    heldout_fraction: Part = Field(description="Share of rows kept for the final numbers.")
    dev_fraction: Part = Field(description="Share of rows kept for evaluation while training.")
    reward_workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Most processes of the reward function side by side; sampling waits for none of them."
    )
    reward_timeout_seconds: Positive = Field(description="Longest time one reward may take.")
    reward_memory_bytes: Annotated[int, Field(ge=2**27)] = Field(
        description="Most memory of one process of the reward function, and of each that it starts; at least 128 MiB."
    )

    def open(self) -> JsonlTask:
        return JsonlTask(self)

    def check(self, *, sft_steps: int) -> None:
        if self.heldout_fraction + self.dev_fraction >= 1.0:
            raise ConfigError(
                "task.heldout_fraction and task.dev_fraction: nothing is left to train on",
                seen=f"{self.heldout_fraction} + {self.dev_fraction}",
                expected="a sum below 1",
                remedy="lower one of them, for example task.heldout_fraction=0.1",
            )
        if sft_steps > 0 and self.response_key is None:
            raise ConfigError(
                "sft.steps: a cold start needs demonstrations and the task has none",
                seen=f"sft.steps = {sft_steps}, task.response_key = null",
                expected="sft.steps = 0, or a response_key",
                remedy="set sft.steps=0, or name the key that holds demonstrations with task.response_key",
            )

    def check_files(self) -> None:
        if not self.path.is_file():
            raise ConfigError(
                "task.path: a directory" if self.path.is_dir() else "task.path: no such file",
                seen=self.path,
                expected="a JSONL file",
                remedy="give the path of your JSONL file",
            )


class JsonlTask(DemonstrationTask):
    """Rows of a file; those that have responses are demonstrations.

    A prompt's split is a pure function of its text: the same prompt never appears in two splits, and adding
    rows moves no other row. Within a split prompts keep the order of the file.
    """

    open_vocabulary = True
    """The texts of this task may hold any character."""

    def __init__(self, config: JsonlTaskConfig) -> None:
        self.config = config
        self._splits: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
        for number, row in _read_rows(config.path):
            prompt = self._prompt(number, row)
            self._splits[self._split_of(prompt.text)].append(prompt)
        self._rewards = RewardPool(
            [
                RewardProcess(config.reward, config.reward_timeout_seconds, config.reward_memory_bytes)
                for _ in range(config.reward_workers)
            ]
        )

    def size(self, split: str) -> int:
        """How many prompts a split has."""
        return len(self._of(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """The first `count` prompts of a split. `ConfigError` where it has fewer."""
        prompts = self._of(split)
        if not 0 <= count <= len(prompts):
            raise ConfigError(
                f"the {split} split of {self.config.path} does not have that many prompts",
                seen=count,
                expected=f"0 to {len(prompts)}",
                remedy="add rows, ask for fewer prompts, or change task.dev_fraction and task.heldout_fraction",
            )
        return prompts[:count]

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """What the user's function says of the text, whatever the finish reason; `accuracy`, where it does
        not say, is 1 if reward >= 1. `RewardError` where it fails, with the row: the sample has no reward, which
        is not a reward of 0. `ConfigError` where the function cannot be imported."""
        return self._rewards.submit(lambda process: self._score(process, prompt, response))

    def _score(self, process: RewardProcess, prompt: Prompt, response: str) -> dict[str, float]:
        try:
            return process.score(prompt.facts, response)
        except RewardError as error:
            row = excerpt(json.dumps(prompt.facts, ensure_ascii=False), 200)
            raise RewardError(
                f"{error.what} at {self.place(prompt)}",
                seen=f"{error.seen}; row: {row}; response: '{excerpt(response, 80)}'",
                expected=error.expected,
                remedy=error.remedy,
            ) from error

    def place(self, prompt: Prompt) -> str:
        """The file and line of a prompt."""
        return str(self.config.path.with_name(prompt.prompt_id))

    def check(self, *, num_demonstrations: int) -> None:
        """Looks for the demonstrations, then calls the reward function once, on one of them if there are any."""
        self.demonstrations(self.prompts("train", num_demonstrations), seed=0)
        firsts = [prompt for split in SPLITS for prompt in self._of(split)[:1]]
        samples = [(prompt, response) for prompt in firsts if (response := self.response(prompt)) is not None]
        prompt, response = samples[0] if samples else (firsts[0], DUMMY_RESPONSE)
        try:
            self.reward(prompt, response, FinishReason.STOP).result()
        except RewardError as error:
            raise ConfigError(
                f"task.reward: tried before the run, {error.what}",
                seen=error.seen,
                expected=error.expected,
                remedy=error.remedy,
            ) from error

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """The rows' responses; `seed` changes nothing, since a row has only one."""
        responses = [self.response(prompt) for prompt in prompts]
        missing = [p.prompt_id for p, text in zip(prompts, responses, strict=True) if text is None]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(prompts)} rows have no demonstration",
                seen=f"nothing under task.response_key={self.config.response_key!r} in {', '.join(missing[:3])}",
                expected="a response in every row used for supervised training",
                remedy="add responses, set task.response_key, or start from a trained model with sft.steps=0",
            )
        return [text for text in responses if text is not None]

    def tokenizer_texts(self, count: int) -> list[str]:
        """Prompts, and responses where there are any, of the first `count` training rows: what a tokenizer
        is trained on."""
        prompts = self._of("train")[:count]
        responses = [self.response(prompt) for prompt in prompts]
        return [prompt.text for prompt in prompts] + [text for text in responses if text is not None]

    def close(self) -> None:
        """Ends the processes of the reward function, and all that the function has started."""
        self._rewards.close()

    def _of(self, split: str) -> list[Prompt]:
        if split not in self._splits:
            raise ConfigError(
                "unknown split", seen=split, expected=", ".join(SPLITS), remedy="name one of these splits"
            )
        return self._splits[split]

    def _split_of(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "little") / 2**64
        if position < self.config.dev_fraction:
            return "dev"
        return "heldout" if position < self.config.dev_fraction + self.config.heldout_fraction else "train"

    def _prompt(self, number: int, row: dict[str, Any]) -> Prompt:
        prompt_key, response_key = self.config.prompt_key, self.config.response_key
        if prompt_key not in row:
            keys = excerpt(", ".join(map(repr, row)) or "none", 120)
            _refuse_line(self.config.path, number, f"keys {keys}", f"{prompt_key!r} among them, or task.prompt_key=...")
        text = row[prompt_key]
        if not isinstance(text, str) or not text:
            seen = f"{excerpt(repr(text), 120)} under key {prompt_key!r}"
            _refuse_line(self.config.path, number, seen, "a non-empty text")
        if response_key in row and not isinstance(row[response_key], str):
            seen = f"{excerpt(repr(row[response_key]), 120)} under key {response_key!r}"
            _refuse_line(self.config.path, number, seen, "a text")
        return Prompt(f"{self.config.path.name}:{number}", text, row)

    def response(self, prompt: Prompt) -> str | None:
        """The demonstration of a row; None where it has none."""
        key = self.config.response_key
        return None if key is None else prompt.facts.get(key)


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers, from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    _refuse_line(path, number, "a longer line", f"at most {MAX_LINE_BYTES:,} bytes")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, _read_row(path, number, line)
    except OSError as error:
        raise ConfigError(
            f"task.path: cannot read {path}",
            seen=error.strerror,
            expected="a readable JSON-lines file",
            remedy="check the path and its permissions",
        ) from error


def _read_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(
            line.decode(),
            object_pairs_hook=_unrepeated,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
        _check_depth(row, MAX_DEPTH)
        # Escapes can spell half a surrogate pair, which no tokenizer and no later file takes.
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        _refuse_line(path, number, excerpt(str(error)), "a JSON object in UTF-8")
    if not isinstance(row, dict):
        _refuse_line(path, number, f"a JSON {type(row).__name__}", "a JSON object")
    return row


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the numbers of float64")
    return value


def _check_depth(value: object, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"more than {MAX_DEPTH} lists and objects in one another")
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, depth - 1)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_line(path: Path, number: int, seen: str, expected: str) -> NoReturn:
    raise ConfigError(
        f"task.path: bad line {path}:{number}",
        seen=seen,
        expected=expected,
        remedy="correct or remove the line",
    )
