"""Problems from rows, and rewards of responses to them, for `task=dataset` and `task=jsonl`. Runs in the controller."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, RewardError, as_config_error
from moerl.tasks.data.problems import ProblemRows
from moerl.tasks.data.section import DataSet
from moerl.tasks.data.splits import SPLITS, Cut
from moerl.tasks.rewards.process import UNSCORED
from moerl.tasks.rewards.scorer import RewardScorer
from moerl.telemetry.terminal import excerpt

DUMMY_RESPONSE = "This text tries the reward function; no model wrote it."
"""Response on which rewards are tried if no row has a demonstration."""


class RowsTask(ProblemRows):
    """Rows and the rewards of responses.

    Args:
        sets, cut, response_keys: as in `ProblemRows`.
        scorer: gives the rewards; closed with the task.
        thinking_end: rewards see the text behind its last occurrence; None = all of a response.
        columns: columns that rewards read in every row, by the key that names them.

    Attributes:
        scorer: as the argument.
    """

    def __init__(
        self,
        sets: Sequence[DataSet],
        cut: Cut,
        scorer: RewardScorer,
        *,
        response_keys: str,
        thinking_end: str | None = None,
        columns: Mapping[str, Sequence[str]] = {},
    ) -> None:
        self._columns, self.scorer, self._thinking_end = columns, scorer, thinking_end
        super().__init__(sets, cut, response_keys=response_keys)

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Asks for the rewards of the text, whatever the finish reason. The future raises `RewardError`, with the row,
        if one of the rewards fails: the sample then has no reward, which is not a reward of 0. It raises `ConfigError`
        if no sample can have one."""
        if self._thinking_end is not None:
            # A response that is cut off in its thinking has no answer, whatever it drafted.
            _, end, after = response.rpartition(self._thinking_end)
            response = after if end else ""
        return self.scorer.score(prompt, self.place(prompt), response)

    def check(self, *, num_demonstrations: int) -> None:
        """Checks as `ProblemRows` does, and in every row what rewards read. Raises `ConfigError`."""
        super().check(num_demonstrations=num_demonstrations)
        for key, columns in self._columns.items():
            for column, split in itertools.product(columns, SPLITS):
                problems = self.problems(split)
                lacking = [each for each in problems if each.prompt.facts.get(column) is None]
                if lacking:
                    names = ", ".join(map(repr, lacking[0].prompt.facts))
                    raise ConfigError(
                        f"{key}: rows of the {split} split have no value in column {column!r}",
                        seen=f"{len(lacking)} of {len(problems)}, first {lacking[0].place}, with {excerpt(names, 120)}",
                        expected="a value in every row, or no sample of it has a reward",
                        remedy="name another column, correct the rows, or leave them out by a filter on this column"
                        " (task.filters), which no row without a value passes",
                    )

    def try_rewards(self) -> None:
        """Asks for the rewards of one response to a row of each split: of a demonstration, or of a dummy if the row has
        none."""
        for first in self.first_problems():
            response = DUMMY_RESPONSE if first.response is None else first.response
            try:
                rewards = self.scorer.score(first.prompt, first.place, response).result()
            except RewardError as error:
                raise as_config_error(error, f"task.reward: tried before the run, {error.what}") from error
            unscored = [name for name, value in rewards.items() if name.endswith(f".{UNSCORED}") and value]
            if unscored:
                # A harmless response fails, so others will fail, too, and each would silently get 0.
                raise ConfigError(
                    f"task.rewards.{unscored[0].removesuffix(f'.{UNSCORED}')}: tried before the run, it could not"
                    f" score a response to {first.place}",
                    seen=f"'{excerpt(response)}'",
                    expected="a reward within the limits of time and memory",
                    remedy="check its pattern or its row, or raise its timeout_seconds or memory_bytes",
                )

    def close(self) -> None:
        """Ends the processes of the rewards, and all that they have started."""
        self.scorer.close()
