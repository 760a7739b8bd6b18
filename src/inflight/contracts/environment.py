"""The Protocols of tasks and environments, which users write, and of their episodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from inflight.types import Message, Reply, TaskItem, Tool

if TYPE_CHECKING:
    pass


@runtime_checkable
class Task(Protocol):
    """Problems that are answered in one turn, and how to score an answer.

    Deterministic: item i is the same in every process.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports and errors."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return problem ``index``, for any index from 0; a run trains in the order of indices."""

    @abstractmethod
    def score(self, item: TaskItem, completion: str) -> float:
        """Return the reward of a completion's text. An exception stops the run with a `TaskError`."""


class Conversation(Protocol):
    """One token stream of an episode. Sampled tokens are kept unchanged; only new text is tokenized."""

    @abstractmethod
    async def say(self, *messages: Message | str) -> Reply:
        """Append messages and return the model's answer; a string is a user message.

        Raises `ContextFullError` if the context has no room for an answer, and `InvalidRequestError` if the chat
        template refuses a message; in both cases, nothing is appended. If an endpoint fails, the turn is sampled on
        another one.
        """

    @abstractmethod
    async def observe(self, token_ids: Sequence[int]) -> Reply:
        """Append token ids without changing them and return the model's answer. Raises the same errors as `say`."""

    @abstractmethod
    def reward_turn(self, reward: float) -> None:
        """Give the last turn its own reward, which is used if the run assigns credit by turn."""

    @abstractmethod
    def reward(self, reward: float) -> None:
        """Give the conversations of this role a reward of their own, in place of the episode's reward."""


class Episode(Protocol):
    """One playthrough of an environment: its access to the model, and the record of the sampled turns."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Return a seed that differs between the episodes of a run, and is the same when an episode is replayed."""

    @abstractmethod
    def conversation(self, *, system: str = "", tools: Sequence[Tool] = (), role: str = "") -> Conversation:
        """Begin a conversation; an episode may have several, including concurrent ones.

        ``tools`` are the functions that the model may call; the environment executes them. Rewards are compared only
        between conversations with the same role.
        """

    @abstractmethod
    async def openai_url(self, role: str = "") -> str:
        """Return a base URL for OpenAI API clients; their calls become part of this episode.

        The URL ends with ``/e/KEY/v1``, where KEY is a secret that identifies the episode and the role. Clients may
        also send KEY as the API key. Each role has its own URL; a reward that is posted there belongs to that role.
        Raises `UnsupportedError` if no proxy is running.
        """

    @property
    @abstractmethod
    def posted_reward(self) -> float | None:
        """Return the reward that a client has posted for the episode.

        If there is none, return the mean of the rewards posted for the episode's roles, or None if there are none.
        """


@runtime_checkable
class Environment(Protocol):
    """Start states, and how to play an episode from one. `Task` is the simpler form for one prompt and one answer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports and errors."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return start state ``index``, for any index from 0. Deterministic: the same in every process."""

    @abstractmethod
    async def play(self, item: TaskItem, episode: Episode) -> float:
        """Play one episode and return its reward.

        Many episodes run at once in one event loop: use threads or processes for blocking work. This call is cancelled
        if it takes too long. An exception, or a reward that is not finite, fails this episode only.
        """
