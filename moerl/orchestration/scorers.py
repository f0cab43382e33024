"""Scorers of a run, made from its configuration. Runs in the controller."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from moerl.config.schema import RunConfig
from moerl.contract.scoring import TokenScorer
from moerl.errors import ConfigError, undoing
from moerl.orchestration.models import read_tokenizer
from moerl.orchestration.scoring import Scoring


def open_scorers(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Scoring:
    """Starts the scorers of a configuration, and waits for none of them; the caller has to close them.

    tokenizer: that of the run.

    Raises:
        ConfigError: the tokens of a scorer's model have other ids.
    """
    own, opened = tokenizer.get_vocab().items(), dict[str, TokenScorer]()
    for name, section in config.scorers.items():
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
        for name, section in config.scorers.items():
            opened[name] = section.open(f"scorers.{name}", config.run_dir / "logs" / f"scorer-{name}.log")
    return Scoring(opened)
