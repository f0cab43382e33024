"""`task=textarena` on the real games: alone, against oneself, and by the rules of the game."""

from __future__ import annotations

import random

import pytest
from game_streams import agents, opened, played, rewards, texts

from moerl.errors import ConfigError
from moerl.tasks.games.textarena_game import Game

pytest.importorskip("textarena")
pytestmark = pytest.mark.environments

ALONE = (
    *("GuessTheNumber-v0", "Mastermind-v0", "TowerOfHanoi-v0", "FrozenLake-v0", "LightsOut-v0", "Minesweeper-v0"),
    *("2048-v0", "Blackjack-v0", "Sudoku-v0", "FifteenPuzzle-v0", "PegJump-v0", "Bandit-v0"),
)
FOR_TWO = (
    *("TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0", "Chess-v0", "Othello-v0", "Checkers-v0"),
    *("IteratedPrisonersDilemma-v0", "TruthAndDeception-v0", "SimpleNegotiation-v0", "LiarsDice-v0", "PigDice-v0"),
)


TWO = ("task.game=TicTacToe-v0", "task.num_players=2")


def secret(seed: int) -> int:
    """Returns the number to guess in the game of a seed."""
    game = Game("GuessTheNumber-v0", 1, seed)
    return game._env.state.game_state["game_number"]


def test_a_game_for_one_is_a_session_and_its_hints_are_messages() -> None:
    task, right = opened("task=textarena"), secret(0)
    wrong = 1 if right > 1 else 2
    episode = played(task, f"I say [{wrong}]", f"[{right}]")
    assert rewards(episode) == [{"reward": 1.0, "accuracy": 1.0, "turns": 2.0, "invalid": 0.0, "finished": 1.0}]
    (text,) = texts(episode)
    assert text.count("I say") == 1, "a player's own moves are its turns, and not observed again"
    assert "higher" in text.split("I say")[1]


def test_a_move_without_brackets_gets_them_as_the_game_has_it() -> None:
    assert rewards(played(opened("task=textarena"), str(secret(0))))[0]["reward"] == 1.0


def test_two_players_have_sessions_views_and_rewards_of_their_own() -> None:
    task = opened("task=textarena", *TWO)
    episode = played(task, "[0]", "[3]", "[1]", "[4]", "[2]")
    first, second = rewards(episode)
    assert first == {"reward": 1.0, "accuracy": 1.0, "turns": 3.0, "invalid": 0.0, "finished": 1.0}
    assert second == {"reward": -1.0, "accuracy": 0.0, "turns": 2.0, "invalid": 0.0, "finished": 1.0}
    assert agents(episode) == [("", "r0"), ("player-1", "r0")]
    views = texts(episode)
    assert "You are Player 0" in views[0]
    assert "You are Player 1" not in views[0]
    assert "You are Player 1" in views[1]
    assert "[Player 1]" in views[0]
    assert "[Player 0]" in views[1]
    assert [int(record.values["sampled"].sum()) for record in episode.records] == [3 * 4, 2 * 4]


def test_a_player_who_moves_invalidly_twice_loses_by_the_rules() -> None:
    task = opened("task=textarena", *TWO, "task.text_as=raw")
    first, second = rewards(played(task, "[0]", "[0]", "[9]"))
    assert (first["reward"], first["invalid"]) == (1.0, 0.0)
    assert (second["reward"], second["invalid"]) == (-1.0, 1.0)


def test_a_player_who_can_sample_no_more_makes_empty_moves() -> None:
    task = opened("task=textarena", *TWO, "task.text_as=raw", "task.max_turn_tokens=null")
    # The long move uses up the tokens of whoever reads it, too: the others move next.
    first, second = rewards(played(task, "[0]", "[3]" + "x" * 5000, max_tokens=2000))
    assert (first["reward"], first["turns"], second["reward"], second["turns"]) == (-1.0, 1.0, 1.0, 1.0)


def test_a_player_whose_first_view_leaves_no_room_makes_empty_moves_without_a_session() -> None:
    task = opened("task=textarena", *TWO, "task.max_turn_tokens=null")
    (only,) = rewards(played(task, "[0]" + "x" * 5000, max_tokens=2000))
    assert (only["reward"], only["finished"]) == (1.0, 1.0)


def test_a_turn_has_no_more_tokens_than_the_task_allows() -> None:
    task = opened("task=textarena", *TWO, "task.max_turn_tokens=3")
    episode = played(task, "[0]!!!!", "[3]!!", "[1]", "[4]", "[2]")
    assert [each["turns"] for each in rewards(episode)] == [3.0, 2.0]


def test_a_game_that_does_not_end_has_no_winner() -> None:
    task = opened("task=textarena", *TWO, "task.max_moves=2")
    assert [(each["reward"], each["finished"]) for each in rewards(played(task, "[0]", "[3]"))] == [(0.0, 0.0)] * 2


def test_the_session_of_the_prompt_is_that_of_the_player_who_moves_first() -> None:
    task = opened("task=textarena", "task.game=KuhnPoker-v0", "task.num_players=2")
    (prompt,) = task.prompts("train", 1)
    episode = played(task, *["[check]", "[check]"] * 3)
    assert prompt.facts["opening"] in texts(episode)[0]
    assert sum(each["reward"] for each in rewards(episode)) == 0.0
    assert len({name for name, _ in agents(episode)}) == 2


def test_all_draws_of_a_game_follow_from_its_seed_and_leave_those_of_others_alone() -> None:
    def rolls(seed: int, *, disturbed: bool = False) -> list[str]:
        game, seen = Game("PigDice-v0", 2, seed), list[str]()
        while not game.is_over and len(seen) < 30:
            if disturbed:
                random.seed(len(seen))
            game.move("[roll]")
            seen.append(game.seen()[1])
        return seen

    random.seed(5)
    expected = random.Random(5).random()
    plain = rolls(3)
    assert random.random() == expected
    assert rolls(3, disturbed=True) == plain
    assert rolls(4) != plain


@pytest.mark.parametrize(
    ("game", "players"), [*((name, 1) for name in ALONE), *((name, 2) for name in FOR_TWO), ("ThreePlayerIPD-v0", 3)]
)
def test_games_that_the_page_names_begin_without_a_network_and_judge_any_text(game: str, players: int) -> None:
    odd = [
        "",
        "x",
        "[1]",
        "[0 1]",
        "[a]",
        "[up]",
        "\u00e9" * 50,
        f"[{'9' * 400}]",
        "((((",
        "[[[",
        "]]",
        "[-1]",
        "[1 1 5]",
    ]
    draw = random.Random(0)
    for seed in range(3):
        task = Game(game, players, seed)
        assert Game(game, players, seed).opening == task.opening
        for _ in range(60):
            task.move(draw.choice(odd))
            if task.is_over:
                break
            task.seen()
        assert set(task.results()) == set(range(players))


def test_a_game_that_is_not_there_and_one_for_other_players_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a game of TextArena"):
        opened("task=textarena", "task.game=TicTacToe-v0-raw")
    with pytest.raises(ConfigError, match=r"does not begin with 1 players.*set task\.num_players"):
        opened("task=textarena", "task.game=TicTacToe-v0")
    with pytest.raises(ConfigError, match="no key and no download"):
        opened("task=textarena", "task.game=TwentyQuestions-v0")
