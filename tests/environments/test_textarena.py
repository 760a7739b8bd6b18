"""Games of TextArena: who plays, what is shown, which start state, and what is refused."""

from __future__ import annotations

import ast
import asyncio
import random
import re
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, play
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import TaskError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts import load_task
from inflight.wire import Completion, GenerateRequest, SamplingParams
from tests.environments.apart import need
from tests.environments.scripted import play_scripted, text_of
from tests.servers import ServerProcess

need("textarena")

import textarena  # noqa: E402

from inflight.environments.adapters.textarena import REFUSED, Game, TextArena, listed_moves  # noqa: E402


def first_listed(prompt: str) -> str:
    """What a model states that takes the first move of the last list."""
    return str(re.findall(r"Available Moves: '(\[\d\])'", prompt)[-1])


def answers(*said: str) -> Callable[[str], str]:
    turns = iter(said)
    return lambda prompt: next(turns)


def board(game: Any, player: int, told: Any) -> str:
    """Show nothing but the board."""
    cells = game.state.game_state["board"]
    return f"player {player}: " + "".join(cell or "." for row in cells for cell in row)


def fourth_or_next(shown: str, rng: random.Random) -> str:
    """Play the first free field from the fourth on."""
    return f"[{shown.removeprefix('player 1: ').removeprefix('player 0: ').index('.', 3)}]"


def test_in_self_play_each_player_has_its_own_conversation_and_reward() -> None:
    played = play_scripted(TextArena(0, "TicTacToe-v0"), 0, answers("[0]", "[3]", "I take [1]", "[4]", "[2]"))
    assert played.failure is None
    assert [call.role for call in played.calls] == [f"player {i % 2}" for i in range(5)]
    rollouts = {rollout.role: rollout for rollout in played.rollouts(0, 1.0)}
    assert {role: rollout.reward for role, rollout in rollouts.items()} == {"player 0": 1.0, "player 1": -1.0}
    assert {role: len(rollout.turns) for role, rollout in rollouts.items()} == {"player 0": 3, "player 1": 2}
    assert played.reward == 0.0
    assert "you will be 'X'" in text_of(played, 1)
    assert "you will be 'X'" not in text_of(played, 0)
    assert "[Player 0] [0]" in text_of(played, 1)


def test_a_turn_shows_what_is_new_and_not_the_players_own_action() -> None:
    played = play_scripted(TextArena(0, "TicTacToe-v0"), 0, answers("[0]", "[3]", "I take [1]", "[4]", "[2]"))
    last = text_of(played, 4)
    new = last[last.rindex("I take [1]") :]
    assert "[Player 1] [4]" in new
    assert "Your goal is to win" not in new
    assert last.count("I take [1]") == 1


@pytest.mark.parametrize("index", range(4))
def test_against_an_opponent_the_model_plays_one_side_which_changes_by_item(index: int) -> None:
    played = play_scripted(TextArena(0, "TicTacToe-v0", opponent="random"), index, first_listed, seed=index)
    assert played.failure is None
    assert {call.role for call in played.calls} == {f"player {index % 2}"}
    assert played.reward in (-1.0, 0.0, 1.0)
    assert played.role_rewards == {}


def test_the_seed_of_an_episode_decides_what_the_opponent_does() -> None:
    environment = TextArena(0, "TicTacToe-v0", opponent="random")
    seen = [
        tuple(text_of(play_scripted(environment, 1, first_listed, seed=seed), 0) for _ in range(2)) for seed in range(5)
    ]
    assert all(first == second for first, second in seen)
    assert len({first for first, _ in seen}) > 1


def test_an_opponent_and_what_is_shown_may_be_functions_of_the_users_own() -> None:
    here = "tests.environments.test_textarena"
    environment = TextArena(0, "TicTacToe-v0", opponent=f"{here}:fourth_or_next", render=f"{here}:board")
    lost = play_scripted(environment, 1, answers("[0]", "[1]"))
    assert "user\nplayer 1: ...O.....<" in text_of(lost, 0)
    assert "user\nplayer 1: X..OO....<" in text_of(lost, 1)
    assert lost.reward == -1.0


def test_the_start_state_is_the_items_and_the_rest_is_the_episodes() -> None:
    environment = TextArena(7, "KuhnPoker-v0")
    cards = []
    for index in range(8):
        pair = [play_scripted(environment, index, lambda prompt: "[fold]", seed=seed) for seed in range(2)]
        first, second = [re.findall(r"Your card is: '(.)'", text_of(played, 0))[0] for played in pair]
        assert first == second
        cards.append(first)
    assert set(cards) == {"J", "Q", "K"}


def test_games_that_are_played_at_once_do_not_share_their_randomness() -> None:
    def rolls(game: Game) -> list[str]:
        for _ in range(12):
            game.turn()
            game.move("[roll]")
        return [text for _, text in game.game.state.logs]

    alone = [rolls(Game("PigDice-v0", {}, 2, 0, seed)) for seed in range(3)]
    random.seed(5)
    outside = random.getstate()
    games = [Game("PigDice-v0", {}, 2, 0, seed) for seed in range(3)]
    for _ in range(12):
        for game in games:
            game.turn()
            game.move("[roll]")
    assert [[text for _, text in game.game.state.logs] for game in games] == alone
    assert alone[0] != alone[1]
    assert random.getstate() == outside


def test_a_game_whose_move_does_not_end_stops_the_others_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.environments.adapters.textarena._WAIT_S", 0.2)
    stuck, other = (Game("TicTacToe-v0", {}, 2, start_seed=seed) for seed in range(2))
    has_begun, is_released = threading.Event(), threading.Event()

    def step(action: str) -> tuple[bool, dict[str, Any]]:
        has_begun.set()
        return is_released.wait(30), {}

    monkeypatch.setattr(stuck._wrapped, "step", step)
    moving = threading.Thread(target=stuck.move, args=("[4]",))
    moving.start()
    assert has_begun.wait(30)
    try:
        with pytest.raises(
            TaskError, match=r"TicTacToe-v0 cannot move, because a move of TicTacToe-v0 has not ended for 0\.2 s"
        ):
            other.turn()
    finally:
        is_released.set()
        moving.join(10)
    assert other.turn()[0] == 0


def test_an_illegal_action_is_asked_again_once_and_then_loses() -> None:
    played = play_scripted(TextArena(0, "TicTacToe-v0"), 0, answers("[0]", "[0]", "[0]"))
    assert [call.role for call in played.calls] == ["player 0", "player 1", "player 1"]
    assert "attempted an invalid move" in text_of(played, 2)
    assert played.role_rewards == {"player 0": 1.0, "player 1": -1.0}


def test_a_game_of_one_player_has_one_conversation_without_a_role() -> None:
    environment = TextArena(0, "GuessTheNumber-v0", options={"min_number": 1, "max_number": 3})
    played = play_scripted(environment, 0, answers("[1]", "[2]", "[3]"))
    assert {call.role for call in played.calls} == {""}
    assert played.reward == 1.0
    assert "between 1 and 3" in text_of(played, 0)


def test_a_game_of_three_gives_each_player_its_reward() -> None:
    def lowest(prompt: str) -> str:
        return str(re.findall(r"'(\[\d+\])'", prompt)[-1])

    played = play_scripted(TextArena(0, "ThreePlayerGOPS-v0"), 0, lowest)
    assert played.failure is None
    assert {call.role for call in played.calls} == {"player 0", "player 1", "player 2"}
    assert len(played.role_rewards) == 3


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"game": "Wordle-v0"}, "downloads word lists"),
        ({"game": "Debate-v0"}, "calls a paid service"),
        ({"game": "TicTacTo-v0"}, "similar names: TicTacToe-v0"),
        ({"game": "ConnectFour-v0", "opponent": "random"}, "does not list its moves"),
        ({"game": "TicTacToe-v0", "players": 3}, "does not start with .* 3 players"),
        ({"game": "TicTacToe-v0", "options": {"size": 4}}, "does not start with options"),
        ({"game": "TicTacToe-v0", "opponent": "no.module:here"}, "cannot be imported"),
        ({"game": "TicTacToe-v0", "opponent": "best"}, "neither a URL nor module:function"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_task("inflight.environments.adapters.textarena:TextArena", params, 0)


def test_the_games_refused_are_those_whose_source_downloads_words_or_asks_a_service() -> None:
    folder = Path(textarena.__file__).parent / "envs"
    reaching = {
        path.parent.name
        for path in folder.glob("*/env.py")
        if {"nltk", "EnglishDictionary", "OpenRouterJury", "OpenRouterAgent"} & _names(path)
    }
    assert set(REFUSED) == reaching


def _names(path: Path) -> set[str]:
    """The names that a module imports, or nothing if it is not Python of this version."""
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError:
        return set()
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {alias.name.split(".")[0] for node in imported for alias in node.names} | attributes


@pytest.mark.parametrize("name", ["TicTacToe-v0", "KuhnPoker-v0", "GameOfPureStrategy-v0", "Othello-v0-tiny"])
def test_moves_that_a_random_opponent_picks_are_legal(name: str) -> None:
    for seed in range(5):
        rng, game = random.Random(seed), Game(name, {}, 2, seed, seed)
        is_over, listed = False, {}
        while not is_over:
            player, told = game.turn()
            listed[player] = listed_moves(told) or listed[player]
            is_over = game.move(rng.choice(listed[player]))
            assert game.game.state.error_count == 0
        assert set(game.rewards()) == {0, 1}


def test_a_game_is_played_with_the_embedded_engine(shared_server: ServerProcess, model_dir: Path) -> None:
    async def run() -> Any:
        endpoint = HttpEndpoint(shared_server.url)

        async def generate(request: GenerateRequest) -> Completion:
            return (await endpoint.generate(request)).completions[0]

        template = ChatTemplate(load_tokenizer(model_dir))
        here = "tests.environments.test_textarena"
        environment = TextArena(0, "TicTacToe-v0", render=f"{here}:board")
        episode = PlayingEpisode("game", 1, template, generate, SamplingParams(max_tokens=8), max_tokens=500)
        async with aclosing(PlayLoop()) as loop:
            played = await play(environment, environment.item(0), episode, loop, 30.0)
        await endpoint.aclose()
        return played

    played = asyncio.run(run())
    assert played.failure is None, played.failure
    assert len(played.calls) == 2  # a random model makes no legal move
    (rollout,) = played.rollouts(0, 1.0)
    assert (rollout.role, rollout.reward, len(rollout.turns)) == ("player 0", -1.0, 2)
