"""Base of the settings of a scorer: its keys, and how to open it. Torch-free; any process."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from moerl.contract.ports import TokenScorer
from moerl.sections import Section

ScorerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,31}$")]
"""Name of a scorer, and of its scores; becomes part of metrics and columns."""


class ScorerSection(Section):
    """Base of every kind of scorer. A subclass gives `kind` a literal type and adds its keys."""

    kind: Any
    """Kind, by which a configuration chooses it."""
    only_at_one: ClassVar[bool] = False
    """True if it scores at a temperature of 1 alone, so that samples of another one are refused."""

    @property
    def tokenizer(self) -> Path | None:
        """Directory of a model whose tokenizer has to be that of the run; None = there is none to compare."""
        return None

    def host_bytes(self, key: str) -> int:
        """Returns the bytes of memory that the scorer holds on the machine of the controller.

        Raises:
            ConfigError: they cannot be known. `key` as in `check_files`.
        """
        return 0

    def check_files(self, key: str, vocab_size: int | None) -> None:
        """Checks the files that the keys name.

        Args:
            key: path of the scorer's keys, for errors.
            vocab_size: token ids of the model that is trained; None if it is not known yet.

        Raises:
            ConfigError: they cannot be used.
        """

    @property
    def service(self) -> str:
        """Address of a service that scores; empty if there is none."""
        return ""

    def reach(self, key: str) -> None:
        """Asks the service whether it is there, once. Raises `ScoreError` if it is not. `key` as in `check_files`."""

    @abstractmethod
    def open(self, key: str, log: Path) -> TokenScorer:
        """Starts the scorer, and does not wait for it.

        Args:
            key: path of the scorer's keys, for errors.
            log: file for the output of a process.
        """
