"""Settings of a site's SLURM: one YAML file (`--site`), validated before anything else. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from moerl.errors import ConfigError
from moerl.reading import read_text
from moerl.sections import Count, CountOrZero, Positive, Section

OURS = (
    *("job-name", "nodes", "ntasks-per-node", "time", "signal", "requeue", "no-requeue", "open-mode", "output", "mem"),
    *("chdir", "partition", "account", "qos", "gres", "cpus-per-task", "exclusive", "array", "wrap", "parsable"),
)
"""Options of sbatch that a script or the command sets itself, or that would work against those."""


def _one_line(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("one line of printable text")
    return text


def _matching(pattern: str, expected: str, flags: re.RegexFlag = re.NOFLAG) -> AfterValidator:
    """Makes the rule that the whole text has a pattern. expected: the pattern, for people."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, flags):
            raise ValueError(expected)
        return text

    return AfterValidator(check)


def _option(line: str) -> str:
    name = re.fullmatch(r"--([a-z][a-z-]*)(=.*)?", _one_line(line))
    if name is None:
        raise ValueError("an option of sbatch, --NAME or --NAME=VALUE")
    if re.search(r"[\"'\\#]", line):
        raise ValueError("a value without quotes, backslashes and #")
    if name[1] in OURS:
        raise ValueError(f"an option that neither another key nor the job decides; --{name[1]} is decided by one")
    return line


Line = Annotated[str, AfterValidator(_one_line)]
Word = Annotated[str, _matching(r"[\w.,:/+=@%^~-]+", "a word of letters, digits and any of _ . , : / + = @ % ^ ~ -")]
Variable = Annotated[str, _matching(r"[A-Za-z_]\w*", "the name of an environment variable", re.ASCII)]
Option = Annotated[str, AfterValidator(_option)]


class Container(Section):
    """The image that commands of moerl run in."""

    runtime: Literal["enroot", "apptainer", "pyxis"] = Field(
        description="enroot = `enroot start`; apptainer = `apptainer exec --nv`; pyxis = steps of"
        " `srun --container-image`, with SLURM's plugin pyxis."
    )
    image: Line = Field(description="Image file, or what else the runtime's command takes.")
    mounts: list[Word] = Field(
        default=[],
        description="Folders that the container sees, each FROM:TO or PATH. The run directory, and the one that the job"
        " is submitted from, are mounted if none of these shows them.",
    )
    arguments: list[Line] = Field(default=[], description="More options of the runtime's command.")


class Site(Section):
    """Settings of one site. Every key may be left out."""

    partition: Word | None = Field(default=None, description="Partition; null = the site's default.")
    account: Word | None = Field(default=None, description="Account that is charged; null = your default.")
    qos: Word | None = Field(default=None, description="Quality of service; null = your default.")
    gpus_per_node: CountOrZero = Field(default=0, description="GPUs asked for on each node; 0 = none.")
    gres: Word | None = Field(
        default=None, description="The same as this site names it (gpu:h100:8); null = gpu:GPUS_PER_NODE."
    )
    gpu_memory_gib: Positive = Field(default=80.0, description="Memory of one GPU, for checks of what a run needs.")
    cpus_per_node: Count | None = Field(default=None, description="CPU cores asked for on each node; null = exclusive.")
    memory: Word | None = Field(default=None, description="Memory of each node (200G); null = the site's default.")
    container: Container | None = Field(default=None, description="Container of the commands; null = none.")
    python: Line | None = Field(
        default=None,
        description="Interpreter of moerl on the nodes; null = the one that submits, `python` in a container.",
    )
    modules: list[Word] = Field(default=[], description="Loaded with `module load` before anything else.")
    environment: dict[Variable, Line] = Field(default={}, description="Environment variables of the job.")
    sbatch: list[Option] = Field(default=[], description="More options of sbatch, each --NAME or --NAME=VALUE.")

    @property
    def node_gpus(self) -> int | None:
        """GPUs of each node; None if `gres` has another name for them and `gpus_per_node` does not say it."""
        if self.gpus_per_node or self.gres is None:
            return self.gpus_per_node
        return _gpus_of(self.gres)

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        named = None if self.gres is None else _gpus_of(self.gres)
        if self.gpus_per_node and named not in (None, self.gpus_per_node):
            raise ValueError(f"gres with as many GPUs as gpus_per_node = {self.gpus_per_node}, not {named}")
        return self


def _gpus_of(gres: str) -> int | None:
    """Returns the GPUs that an option --gres asks for, such as gpu:h100:8,nvme:1; None if it names none."""
    parts = [each.split("(")[0].split(":") for each in gres.split(",")]
    counts = [int(part[-1]) if part[-1].isdecimal() else 1 for part in parts if part[0] == "gpu"]
    return sum(counts) if counts else None


def load_site(path: Path | None) -> Site:
    """Reads the site of a file; without a file, a node of the default partition, without GPUs.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or wrong.
    """
    if path is None:
        return Site()
    try:
        values = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            "--site: cannot be read", seen=f"{path}: {error}", expected="a YAML file", remedy="give another file"
        ) from error
    try:
        return Site.model_validate_json(json.dumps({} if values is None else values, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        if first["type"] == "extra_forbidden":
            known = Container.model_fields if len(first["loc"]) > 1 else Site.model_fields
            raise ConfigError(
                f"{path}: {key}: unknown key", expected=f"one of {', '.join(known)}", remedy="correct or remove it"
            ) from error
        expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ConfigError(
            f"{path}: {key}: wrong value", seen=repr(first["input"]), expected=expected, remedy="correct it"
        ) from error
