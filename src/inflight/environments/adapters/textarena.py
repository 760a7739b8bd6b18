"""The games of TextArena as environments: one model plays every player, or one of them against an opponent.

A turn shows a player the messages from the game since the player's last turn, so that each player's game is one
conversation. Games use Python's global random state and are not thread-safe. Here, each game has its own random state,
and only one game in the process moves at a time, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import textarena
from textarena.envs.registration import ENV_REGISTRY

from inflight.base.extensions import resolve
from inflight.contracts import Conversation, Environment, Episode
from inflight.errors import ConfigError, TaskError
from inflight.types import TaskItem

Message = tuple[int, str, textarena.ObservationType]
"""A message from a game to a player: who speaks (-1 is the game), the text, and its kind."""
Render = Callable[[Any, int, Sequence[Message]], str]
"""Returns the text shown at a player's turn, given the game, the player and the messages since its last turn."""
Opponent = Callable[[str, random.Random], str]
"""Returns an action, given the text that the model would be shown and a source of randomness."""

_WORDS = "downloads word lists when it is imported"
_SERVICE = "calls a paid service over the network"
REFUSED = {
    **dict.fromkeys(
        (
            *("Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee"),
            *("WordChains", "WordLadder", "WordSearch", "Wordle"),
        ),
        _WORDS,
    ),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _SERVICE),
}
"""Why games are refused, by their folder in TextArena: they need resources outside this machine."""

_MIN_MOVES = 2
"""If a game lists fewer moves than this at its start, the listed moves are only an example."""
_MOVE = re.compile(r"'(\[[^\[\]']+\])'")
_NUM_PLAYERS = (2, 1, 3, 4, 5, 6, 7, 8)
_global_randomness = threading.Lock()
_WAIT_S = 60.0
"""How long a game may wait for another game to move; a move takes milliseconds."""


def listed_moves(messages: Sequence[Message]) -> list[str]:
    """Return the moves that a game listed most recently, as ``'[move]'``; examples in its rules do not count."""
    lists = (_MOVE.findall(text) for _, text, kind in reversed(messages) if kind != textarena.ObservationType.PROMPT)
    return next((moves for moves in lists if moves), [])


class Game:
    """One game of TextArena. Its methods block, and may be called from any thread.

    The methods raise `TaskError` if another game does not end its move within a minute, because games share Python's
    random state.
    """

    _moving: ClassVar[str] = ""
    """The game that is currently moving."""

    def __init__(
        self, name: str, options: Mapping[str, Any], num_players: int, start_seed: int, seed: int | None = None
    ) -> None:
        """Begin a game; ``start_seed`` determines its start state, and ``seed`` its later random draws."""
        self._name = name
        self._state = random.Random(start_seed).getstate()
        with self._own_randomness():
            self._wrapped = textarena.make(name, **options)
            self._wrapped.reset(num_players=num_players, seed=start_seed)
        if seed is not None:
            self._state = random.Random(seed).getstate()
        game = self._wrapped
        while isinstance(game, textarena.Wrapper):
            game = game.env
        self.game = game

    def turn(self) -> tuple[int, list[Message]]:
        """Return whose turn it is, and the messages that this player has received since its last turn."""
        with self._own_randomness():
            player, messages = self.game.get_observation()
        is_own = [sender == player and kind == textarena.ObservationType.PLAYER_ACTION for sender, _, kind in messages]
        return player, [one for one, own in zip(messages, is_own, strict=True) if not own]

    def move(self, action: str) -> bool:
        """Carry out the action of the player whose turn it is; return whether the game is over."""
        with self._own_randomness():
            is_over, _ = self._wrapped.step(action)
        return bool(is_over)

    def rewards(self) -> dict[int, float]:
        """Return the reward of each player of a game that is over."""
        rewards, _ = self._wrapped.close()
        if not rewards:
            raise TaskError("the game is over without a reward")
        return {int(player): float(reward) for player, reward in rewards.items()}

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        if not _global_randomness.acquire(timeout=_WAIT_S):
            raise TaskError(
                f"{self._name} cannot move, because a move of {Game._moving} has not ended for {_WAIT_S:g} s"
            )
        outside = random.getstate()
        random.setstate(self._state)
        Game._moving = self._name
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outside)
            _global_randomness.release()


class TextArena(Environment):
    """A game, identified by its name in TextArena, such as ``TicTacToe-v0``.

    With ``opponent = "self"``, the model plays every player. Each player has a conversation with the role ``player N``
    and the reward that the game gives to this player; the episode's reward is the mean of these rewards. Otherwise the
    model plays one player, which changes from item to item, and that player's reward is the episode's. The opponent is
    ``"random"``, which picks one of the moves that the game lists, or ``module:function``, called with the text shown
    to a player and a `random.Random`. ``render`` specifies a function that decides what is shown (`Render`); by
    default, all messages of the game are shown. ``options`` are passed to the game. Without ``players``, 2, 1, 3, 4 and
    so on are tried until the game starts.

    The game itself handles illegal actions: most games ask once more, and the player loses if the next action is also
    illegal.
    """

    def __init__(
        self,
        seed: int,
        game: str,
        opponent: str = "self",
        render: str = "",
        players: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise `TaskError` for a game that is unknown, refused or does not start."""
        self._seed = seed
        self._game = game
        self._options = dict(options or {})
        self._opponent: Opponent | None = None
        try:
            self._render: Render = resolve(render) if render else shown
            self._opponent = resolve(opponent) if opponent not in ("self", "random") else None
        except ConfigError as error:
            raise TaskError(str(error)) from error
        self._has_opponent = opponent != "self"
        _check_game(game)
        self._num_players, first = _started(game, self._options, (players,) if players else _NUM_PLAYERS)
        if opponent == "random" and len(listed_moves(first.turn()[1])) < _MIN_MOVES:
            raise TaskError(
                f"{game} does not list its moves, so opponent = 'random' cannot choose one: set opponent to a function "
                "instead, such as opponent = 'module:function'"
            )

    @property
    def name(self) -> str:
        return f"textarena {self._game}"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"{self._game}, start {index}")

    async def play(self, item: TaskItem, episode: Episode) -> float:
        start_seed = int.from_bytes(hashlib.blake2b(f"{self._seed}:{item.index}".encode(), digest_size=4).digest())
        game = await asyncio.to_thread(Game, self._game, self._options, self._num_players, start_seed, episode.seed)
        own = item.index % self._num_players if self._has_opponent else None
        rng = random.Random(episode.seed)
        listed: dict[int, list[str]] = {}
        conversations: dict[int, Conversation] = {}
        is_over = False
        while not is_over:
            player, messages = await asyncio.to_thread(game.turn)
            if own is not None and player != own:
                listed[player] = listed_moves(messages) or listed.get(player, [])
                action = self._opponents_move(game, player, messages, listed[player], rng)
            else:
                if player not in conversations:
                    role = f"player {player}" if self._num_players > 1 else ""
                    conversations[player] = episode.conversation(role=role)
                reply = await conversations[player].say(self._render(game.game, player, messages))
                action = reply.text
            is_over = await asyncio.to_thread(game.move, action)
        rewards = game.rewards()
        if own is not None:
            return rewards[own]
        for player, conversation in conversations.items():
            conversation.reward(rewards[player])
        return sum(rewards.values()) / len(rewards)

    def _opponents_move(
        self, game: Game, player: int, messages: Sequence[Message], listed: Sequence[str], rng: random.Random
    ) -> str:
        if self._opponent is not None:
            return str(self._opponent(self._render(game.game, player, messages), rng))
        if not listed:
            raise TaskError(f"{self._game} lists no moves for player {player}: {shown(game.game, player, messages)!r}")
        return rng.choice(listed)


def shown(game: Any, player: int, messages: Sequence[Message]) -> str:
    """Return all messages of a game to a player, in TextArena's own format."""
    names = {-1: "GAME", **{one: f"Player {one}" for one in range(game.state.num_players)}, **game.state.role_mapping}
    return "\n".join(f"[{names[sender]}] {text}" for sender, text, _ in messages) or "[GAME] It is your turn."


def _check_game(game: str) -> None:
    spec = ENV_REGISTRY.get(game)
    if spec is None:
        family = game.split("-")[0].lower()
        near = [name for name in ENV_REGISTRY if name.lower().startswith(family[:4]) and name.count("-") == 1]
        raise TaskError(
            f"TextArena {textarena.__version__} has no game {game!r}; similar names: {', '.join(near) or 'none'}"
        )
    folder = str(spec.entry_point).split(".")[2]
    if folder in REFUSED:
        raise TaskError(f"the game {game!r} cannot be played here: it {REFUSED[folder]}")


def _started(game: str, options: Mapping[str, Any], candidates: Sequence[int]) -> tuple[int, Game]:
    """Return the first number of players with which the game starts, and the started game."""
    problem: Exception | None = None
    for num_players in candidates:
        try:
            return num_players, Game(game, options, num_players, 0)
        except AssertionError as error:  # how games refuse a number of players
            problem = problem or error
        except Exception as error:  # some games of a release do not work on every Python
            problem = error
    raise TaskError(
        f"the game {game!r} of TextArena {textarena.__version__} does not start with options {dict(options)} and "
        f"{' or '.join(map(str, candidates))} players: {problem!r}"
    )
