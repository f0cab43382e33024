"""Rollouts that stand in two of the named files, and would count twice. numpy only; any process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ConfigError

CERTAIN_NATS = 20.0
"""Surprise of a rollout, less the sum of its log-probs, above which nobody samples it twice: once in 5e8."""

_ROUNDING_NATS = 5.1e-5
"""Most by which log-probs of one token differ if one of two files has four decimals of them."""


def tokens_key(rollout: DumpedRollout) -> bytes:
    """Returns a digest of the tokens and of which of them were sampled."""
    digest = hashlib.blake2b(rollout.token_ids.tobytes(), digest_size=16)
    digest.update(rollout.sampled.tobytes())
    return digest.digest()


def same_step(one: int, other: int) -> bool:
    """Returns True if two steps are the same, or one is not said."""
    return one == other or -1 in (one, other)


class SeenRollouts:
    """Rollouts that were read, by their tokens, over all files of a command."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[Path, int, float]] = {}
        """File and step of a rollout that was seen first, and the sum of its log-probs, nats."""
        self._samples: dict[bytes, Path] = {}

    def checked(self, file: Path, rollouts: Iterator[DumpedRollout], notes: list[str]) -> Iterator[DumpedRollout]:
        """Yields the rollouts of a file. Equal ones within a file are not refused.

        Args:
            notes: gets one if all rollouts may be in other files, and are too likely to be sure of it.

        Raises:
            ConfigError: a rollout stands in another file of the same step, or of none.
        """
        total, both, other = 0, 0, file
        for rollout in rollouts:
            total += 1
            logprob = float(rollout.rollout_logprobs[rollout.sampled].sum(dtype=np.float64))
            key, place = tokens_key(rollout), (file, rollout.step, logprob)
            first, step, first_logprob = self._places.setdefault(key, place)
            if not same_step(step, rollout.step):
                self._places[key] = place
            elif first != file and abs(first_logprob - logprob) <= _ROUNDING_NATS * rollout.num_sampled:
                if -logprob > CERTAIN_NATS:
                    raise ConfigError(
                        "DUMP: a rollout stands in two files",
                        seen=f"{rollout.name}, with the same tokens and log-probs in {first} and {file}",
                        expected="each rollout once",
                        remedy="name one of the two files, or the one that has log-probs of the trainer, or move a copy"
                        " away",
                    )
                both, other = both + 1, first
            yield rollout
        if total and both == total:
            notes.append(
                f"each rollout of {file} has the tokens and log-probs of one of {other}: by chance if answers are"
                " short; else they count twice, and one of the files is enough"
            )

    def once(self, file: Path, samples: Iterator[DumpedRollout], notes: list[str]) -> Iterator[DumpedRollout]:
        """Yields the samples of a rank's train data that no other rank has written. notes: gets one if some were
        dropped."""
        dropped = 0
        for sample in samples:
            digest = hashlib.blake2b(tokens_key(sample), digest_size=16)
            digest.update(re.sub(r"#\d+$", "", sample.name).encode())
            for logprobs in (sample.rollout_logprobs, *sample.trainer_logprobs.values()):
                digest.update(logprobs.tobytes())
            if self._samples.setdefault(digest.digest(), file) == file:
                yield sample
            else:
                dropped += 1
        if dropped:
            notes.append(f"samples that several ranks wrote count once: {dropped} of {file.name} were read before")
