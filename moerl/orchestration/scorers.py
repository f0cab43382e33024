"""Scorers of a run, made from its configuration. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moerl.contract.scoring import TokenScorer
from moerl.contract.tokenizer import Tokenizer
from moerl.errors import ConfigError, undoing
from moerl.orchestration.scoring import Scoring
from moerl.scorers.section import ScorerSection


def open_scorers(
    sections: Mapping[str, ScorerSection],
    logs: Path,
    tokenizer: Tokenizer,
    read_tokenizer: Callable[[Path, str], Tokenizer],
) -> Scoring:
    """Starts the scorers of a configuration, and waits for none of them; the caller has to close them.

    Args:
        sections: section of each scorer, by its name.
        logs: folder for the logs of their processes.
        tokenizer: tokenizer of the run.
        read_tokenizer: reads the tokenizer of a directory, which a key names.

    Raises:
        ConfigError: the tokens of a scorer's model have other ids.
    """
    own, opened = tokenizer.get_vocab().items(), dict[str, TokenScorer]()
    for name, section in sections.items():
        if section.tokenizer is not None:
            key = f"scorers.{name}.path"
            theirs = read_tokenizer(section.tokenizer, key).get_vocab().items()
            if other := sorted(own - theirs):
                raise ConfigError(
                    f"{key}: its tokenizer is not that of the run",
                    seen=f"{len(other)} tokens with another id or none, first {other[0][0]!r}, here {other[0][1]}",
                    expected="every token of the run under the same id",
                    remedy="take a model with the tokenizer of the one that is trained",
                )
    with undoing(lambda: [scorer.close() for scorer in opened.values()]):
        for name, section in sections.items():
            opened[name] = section.open(f"scorers.{name}", logs / f"scorer-{name}.log")
    return Scoring(opened)
