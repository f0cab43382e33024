"""Settings of rewards: kinds by name, each with its keys. Torch-free; any process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from moerl.sections import Count, CountOrZero, FilePath, FunctionName, HttpAddress, Positive, Section

Column = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression; this one has {error}") from error
    return pattern


def _has_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups != 1:
        raise ValueError("a regular expression with one group, which is the answer")
    return pattern


FIELD = r"\{(\w+)\}"
"""Place of a column in the question of a judge; prompt and response stand for these."""

Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
AnswerPattern = Annotated[str, Field(min_length=1), AfterValidator(_has_group)]


class RewardKeys(Section):
    """Keys of every reward."""

    weight: Weight = Field(default=1.0, description="Its factor in the sum that is trained on; 0 = it is logged alone.")
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=2, description="Most processes, or requests to a judge, side by side; sampling waits for none of them."
    )
    timeout_seconds: Positive = Field(default=10.0, description="Longest time one call may take.")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Columns that every row must have a value in, by the key that names them."""
        column = getattr(self, "column", None)
        return {} if column is None else {"column": (column,)}

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the keys name."""
        found = (getattr(self, name, None) for name in ("file", "key_file"))
        return tuple(each for each in found if each is not None)


class ProcessKeys(RewardKeys):
    """Keys of every reward that runs in processes of its own."""

    memory_bytes: Annotated[int, Field(ge=2**27)] = Field(
        default=8 << 30, description="Most memory of one of the processes, and of each that it starts."
    )


class FunctionReward(ProcessKeys):
    """A function of your own, called with a row and a response; async functions are awaited."""

    kind: Literal["function"]
    """Chooses this kind; each reward of `task.rewards` has one."""
    function: FunctionName = Field(description='"package.module:function".')
    takes: Literal["one", "many"] = Field(
        default="one", description="many = it is called with lists of rows and responses, and returns a list."
    )
    batch_size: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="Most responses that a process is handed at once: for takes=many and async functions."
    )


class MathReward(ProcessKeys):
    """Reward of 1 if math-verify finds the response's answer equal to the row's, else 0."""

    kind: Literal["math"]
    """Chooses this kind."""
    column: Column = Field(description="Column of the right answer, in LaTeX or as a number.")
    answer_pattern: AnswerPattern | None = Field(
        default=None, description="Its group is the answer in the column, for example '#### (.+)'; null = all of it."
    )


class ExactReward(ProcessKeys):
    """Reward of 1 if the response's answer is the row's, character by character but for blanks around it, else 0."""

    kind: Literal["exact"]
    """Chooses this kind."""
    column: Column = Field(description="Column of the right answer.")
    answer_pattern: AnswerPattern | None = Field(default=None, description="As for math.")
    pattern: AnswerPattern | None = Field(
        default=None, description="Its group, in the last match, is the answer in the response; null = all of it."
    )
    ignore_case: bool = Field(default=False, description="Capitals do not matter.")


class RegexReward(ProcessKeys):
    """Reward of 1 if a regular expression is found in the response, else 0."""

    kind: Literal["regex"]
    """Chooses this kind."""
    pattern: Pattern = Field(description="What is looked for; a dot matches line ends, too.")


class JsonReward(ProcessKeys):
    """Reward of 1 if the response, or the last fenced block in it, is JSON that meets a JSON schema, else 0."""

    kind: Literal["json"]
    """Chooses this kind."""
    file: FilePath | None = Field(default=None, description="JSON schema of all rows.")
    column: Column | None = Field(default=None, description="Column of a row's schema, instead.")


class CodeReward(ProcessKeys):
    """Reward of the program in the response, run in a sandbox against the row's tests."""

    kind: Literal["code"]
    """Chooses this kind."""
    column: Column = Field(
        description="Column of the tests: Python that follows the program and raises if it is wrong, or a list of"
        " mappings with input and output, texts for standard input and from standard output."
    )
    partial: bool = Field(default=False, description="The share of tests that pass, instead of 1 if all pass.")
    timeout_seconds: Positive = Field(default=60.0, description="Longest time for all tests of one response.")
    program_seconds: Positive = Field(default=5.0, description="Longest time of one run of a program.")
    program_memory_bytes: Annotated[int, Field(ge=2**26)] = Field(default=1 << 30, description="Most memory of one.")


class JudgeReward(RewardKeys):
    """Score that a language model behind an OpenAI-compatible address gives the response."""

    kind: Literal["judge"]
    """Chooses this kind."""
    url: HttpAddress = Field(description="Address that ends in /v1.")
    model: Annotated[str, Field(min_length=1)] = Field(description="Name of the model there.")
    question: Annotated[str, Field(min_length=1)] = Field(
        description="What it is asked, with {prompt}, {response} and {COLUMN} in their places."
    )
    pattern: AnswerPattern = Field(description="Its group, in the last match in the reply, is the score.")
    lowest: float = Field(default=0.0, description="Score that becomes 0.")
    highest: float = Field(default=1.0, description="Score that becomes 1.")
    key_file: FilePath | None = Field(default=None, description="File of mode 0600 that holds the API key alone.")
    max_tokens: Count = Field(default=1024, description="Most tokens of a reply.")
    timeout_seconds: Positive = Field(default=60.0, description="Longest time of one request.")
    retries: CountOrZero = Field(default=3, description="Further requests if one fails.")
    budget: Count | None = Field(default=None, description="Most requests of one process of a run; null = no limit.")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        asked = dict.fromkeys(re.findall(FIELD, self.question))
        return {"question": tuple(name for name in asked if name not in ("prompt", "response"))}


Reward = Annotated[
    FunctionReward | MathReward | ExactReward | RegexReward | JsonReward | CodeReward | JudgeReward,
    Field(discriminator="kind"),
]


def _is_free(name: str) -> str:
    if name in ("reward", "accuracy"):
        raise ValueError(f"a name of its own: {name} is that of the sum, or of the reported one")
    return name


RewardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,31}$"), AfterValidator(_is_free)]
"""Name of a reward, which becomes a metric."""
