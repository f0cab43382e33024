"""One game of TextArena: its players' texts, moves and rewards. Any thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from moerl.contract.requirements import is_finite, is_number
from moerl.errors import ConfigError, EpisodeError

_RANDOM = threading.Lock()
"""Lock of Python's own random numbers, which every game draws from."""


class Game:
    """A game that has begun. All draws of chance follow from its seed.

    Attributes:
        is_over: True once the game has ended.
        first: number of the player who moves first.
        opening: text that the first player sees at the beginning.
    """

    def __init__(self, name: str, num_players: int, seed: int) -> None:
        """Begins a game.

        Args:
            name: id in TextArena's registry.

        Raises:
            ConfigError: there is no such game, or it does not begin.
        """
        self._draws = random.Random(seed).getstate()
        try:
            self._env = self._alone(lambda: _begun(name, num_players, seed))
        except ConfigError:
            raise
        except Exception as error:  # process boundary: a game's own code
            raise ConfigError(
                f"task.game: {name} does not begin with {num_players} players",
                seen=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                expected="a game that needs no key and no download, and its number of players",
                remedy="set task.num_players, fetch the lists of words that nltk names, or choose another game",
            ) from error
        self.is_over = False
        self.first, self.opening = self.seen()

    def seen(self) -> tuple[int, str]:
        """Returns the player whose move it is, and what is new for this player."""
        number, messages = self._env.get_observation()
        return int(number), self._text(int(number), messages)

    def move(self, text: str) -> None:
        """Makes a move of the player whose move it is; the game judges it. Raises whatever the game's code raises."""
        self.is_over = bool(self._alone(lambda: self._env.step(action=text))[0])

    def results(self) -> Mapping[int, tuple[float, bool]]:
        """Returns the results of the players, by number: the reward that the game gives, 0 if it has not ended; and
        True if an invalid move of this player ended its game.

        Raises:
            EpisodeError: the game gives something else than numbers.
        """
        rewards, players = self._env.close()
        found: dict[int, tuple[float, bool]] = {}
        for number, player in players.items():
            reward: Any = (rewards or {}).get(number, 0) if self.is_over else 0
            if not is_number(reward) or not is_finite(reward):
                raise EpisodeError("task.game: a reward of the game", seen=repr(reward)[:80], expected="a number")
            found[int(number)] = (float(reward), bool(player.get("invalid_move")))
        return found

    def _alone[T](self, call: Callable[[], T]) -> T:
        """Calls code of the game with random numbers of its own."""
        with _RANDOM:
            others = random.getstate()
            random.setstate(self._draws)
            try:
                return call()
            finally:
                self._draws = random.getstate()
                random.setstate(others)

    def _text(self, number: int, messages: list[tuple[int, str, Any]]) -> str:
        """Returns messages as lines. A player's own moves are left out: they are its turns."""
        names: Mapping[int, str] = self._env.state.role_mapping
        lines: list[str] = []
        for speaker, text, kind in messages:
            if kind.name == "PLAYER_ACTION" and speaker == number:
                continue
            name = names.get(speaker, f"Player {speaker}")
            lines.append(f"[{name}] {text}" if kind.name == "PLAYER_ACTION" else str(text))
        return "\n".join(lines).strip()


def _begun(name: str, num_players: int, seed: int) -> Any:
    """Returns an environment of the registry that has begun, without the wrappers that repeat a player's whole
    history."""
    textarena = import_module("textarena")
    registry = import_module("textarena.envs.registration").ENV_REGISTRY
    if f"{name}-raw" not in registry:
        raise ConfigError(
            "task.game: not a game of TextArena",
            seen=name,
            expected="an id of its registry without -raw or -train, such as TicTacToe-v0",
            remedy="name one that `textarena.pprint_registry_detailed()` lists",
        )
    env = textarena.make(f"{name}-raw")
    for wrapper in registry[name].default_wrappers or ():
        if issubclass(wrapper, textarena.ActionWrapper):
            env = wrapper(env)
    env.reset(num_players=num_players, seed=seed)
    return env
