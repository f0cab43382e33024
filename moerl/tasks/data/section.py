"""Settings of data sets: the place of their rows, the meaning of columns, the rows that are left out.

Torch-free; any process.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moerl.errors import ConfigError
from moerl.sections import Count, FilePath, Positive, Section

Column = Annotated[str, Field(min_length=1)]
Scalar = str | bool | int | float
Split = Literal["train", "dev", "heldout"]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,63}$")]


class RowFilter(Section):
    """Filter of rows: a row stays if it meets every condition given here."""

    column: Column = Field(description="Column that is looked at.")
    equals: Scalar | None = Field(default=None, description="Its value.")
    one_of: list[Scalar] | None = Field(default=None, description="Its value is one of these.")
    at_least: float | None = Field(default=None, description="Its value is this number or more.")
    at_most: float | None = Field(default=None, description="Its value is this number or less.")
    shortest: Count | None = Field(default=None, description="Fewest characters of a text, or items of a list.")
    longest: Count | None = Field(default=None, description="Most characters of a text, or items of a list.")


class SetKeys(Section):
    """Place of the rows of a set, and the meaning of their columns. In an entry of `sets`, null = as for all sets."""

    path: FilePath | None = Field(
        default=None,
        description="Rows on disk: a JSONL or Parquet file, a directory of Parquet files, or one that save_to_disk of"
        " Hugging Face datasets wrote.",
    )
    hub: Annotated[str, Field(pattern=r"^[\w.\-]+(/[\w.\-]+)?$")] | None = Field(
        default=None, description="Data set of the Hugging Face hub, OWNER/NAME, instead of path."
    )
    subset: str | None = Field(default=None, description="Subset of the data set of the hub (its configuration).")
    revision: str | None = Field(default=None, description="Commit, tag or branch of the data set of the hub.")
    splits: dict[Split, str] | None = Field(
        default=None,
        description="By train, dev and heldout: the split of the set that it is; for a directory of Parquet files, what"
        " their names begin with. One that is not named is cut out of train by a hash of the prompt.",
    )
    prompt: Column | None = Field(
        default=None, description="Column of the prompt: a text, or messages with role and content."
    )
    response: Column | None = Field(
        default=None,
        description="Column of a demonstration; null = the last message if that is the assistant's, else none.",
    )
    tools: Column | None = Field(
        default=None,
        description="Column of the tools of the first turn: JSON schemas, or a JSON text of a list of them.",
    )
    system: str | None = Field(
        default=None, description="System message put before the messages of rows that have none of their own."
    )
    wording: str | None = Field(
        default=None, description="Text around a prompt that is a text, with {prompt} in its place."
    )
    filters: list[RowFilter] | None = Field(default=None, description="Filters; a row stays if it meets all of them.")
    streaming: bool | None = Field(
        default=None,
        description="Read the first max_rows rows of a shuffled stream, and nothing beyond; for sets that are too large"
        " to fetch.",
    )
    max_rows: Count | None = Field(default=None, description="Most rows that are read of a split; null = all.")


class SetEntry(SetKeys):
    """One of several sets."""

    weight: Positive | None = Field(
        default=None, description="Share of training prompts relative to the other sets; null = by its size."
    )


class DataSet(SetEntry):
    """A set as it is read: keys of its own, and for the rest those of all sets."""

    name: str
    """Name of the set in `task.sets`; empty if there is only one, without entries."""

    def of(self, key: str) -> str:
        """Returns the dotted path of a key of this set, for messages."""
        return f"task.sets.{self.name}.{key}" if self.name else f"task.{key}"


def check_set(data: DataSet) -> None:
    """Checks the rules between the keys of a set; reads no files. Raises `ConfigError`."""
    if data.path is not None and data.hub is not None:
        raise ConfigError(
            f"{data.of('path')} and {data.of('hub')}: both are given",
            seen=f"{data.path}, {data.hub}",
            expected="one of them",
            remedy="set the other to null",
        )
    if not data.prompt:
        raise ConfigError(
            f"{data.of('prompt')}: no column of the prompt",
            seen=data.prompt,
            expected="a column",
            remedy="name it, for example prompt",
        )
    if data.wording is not None and data.wording.count("{prompt}") != 1:
        raise ConfigError(
            f"{data.of('wording')}: must hold {{prompt}} once",
            seen=repr(data.wording),
            expected="a text with {prompt} in one place",
            remedy='for example "{prompt}\\n\\nPut the final answer into \\\\boxed{}."',
        )
    if data.streaming and data.max_rows is None:
        raise ConfigError(
            f"{data.of('streaming')}: a stream has no end of its own",
            seen="max_rows = null",
            expected="a number of rows",
            remedy=f"set {data.of('max_rows')}, for example 100000",
        )
    for number, each in enumerate(data.filters or ()):
        if len(each.model_dump(exclude_none=True)) == 1:
            raise ConfigError(
                f"{data.of('filters')}[{number}]: has no condition",
                seen=f"column {each.column} alone",
                expected="equals, one_of, at_least, at_most, shortest or longest",
                remedy="say what the column must be",
            )


def check_place(data: DataSet) -> None:
    """Checks that a set names its rows, and that a path exists. Raises `ConfigError`."""
    if data.path is None and data.hub is None:
        raise ConfigError(
            f"{data.of('path')} and {data.of('hub')}: none of them is given",
            expected="one of them",
            remedy=f"add {data.of('path')}=FILE, or {data.of('hub')}=OWNER/NAME",
        )
    if data.path is not None and not data.path.exists():
        raise ConfigError(
            f"{data.of('path')}: no such file or directory", seen=data.path, expected="rows", remedy="check the path"
        )
