"""`task=textarena`: games of TextArena, alone or against oneself. Runs in the controller.

Each player has a session of its own, with what this player sees and its own rewards. The session of the prompt is
that of the player who moves first; those of the others have the agent ids `player-N`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field

from moerl.contract.episodes import Session, in_thread
from moerl.contract.ports import Prompt
from moerl.errors import SessionOverError
from moerl.sections import Count
from moerl.tasks.games.seeds import SeedsSection, SeedsTask, require_package
from moerl.tasks.games.talk import Talk
from moerl.tasks.games.textarena_game import Game


class TextArenaTaskConfig(SeedsSection):
    """Games of TextArena; with several players, the policy plays all of them."""

    name: Literal["textarena"] = Field(description="Task.")
    game: Annotated[str, Field(min_length=1)] = Field(description="Id of the game, such as TicTacToe-v0.")
    num_players: Annotated[int, Field(ge=1, le=16)] = Field(description="Players of the game.")
    max_moves: Count = Field(description="Most moves of a game, of all players together; then nobody has won.")

    def open(self) -> TextArenaTask:
        require_package("textarena", self.name)
        return TextArenaTask(self)


class TextArenaTask(SeedsTask[TextArenaTaskConfig]):
    """One game for each seed."""

    repeatable = True

    def openings(self, seeds: Sequence[int]) -> list[str]:
        return [self._game(seed).opening for seed in seeds]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns the rewards of the player who moves first; the sessions of the others have their own.

        `reward`: as the game gives it. `accuracy`: 1 from a reward of 1 on. `turns`: turns of this player. `invalid`: 1
        if an invalid move ended the game for it. `finished`: 1 if the game came to its end.

        A player who can sample no more makes empty moves, which the game judges as any other.
        """
        game = await in_thread(lambda: self._game(prompt.facts["seed"]))
        first = self.talk(prompt, session, game.opening)
        # None for a player whose first sight leaves no room to sample.
        talks: dict[int, Talk | None] = {game.first: first}
        number, seen = game.first, ""
        for _ in range(self.config.max_moves):
            if number not in talks:
                talks[number] = None
                with suppress(SessionOverError):  # what the others wrote must not end the run
                    talks[number] = await first.join(seen, f"player-{number}")
            talk = talks[number]
            turn = None if talk is None else await talk.turn(seen)
            text = "" if turn is None else turn.text
            await in_thread(lambda text=text: game.move(text))
            if game.is_over:
                break
            number, seen = game.seen()
        results = game.results()
        for player, talk in talks.items():
            if talk is not None:
                reward, was_invalid = results[player]
                ended = {"invalid": float(was_invalid), "finished": float(game.is_over)}
                talk.session.rewards |= talk.rewards(reward) | ended
        return dict(session.rewards)

    def _game(self, seed: int) -> Game:
        return Game(self.config.game, self.config.num_players, seed)
