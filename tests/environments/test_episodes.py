"""Episodes in an actor, on the embedded engine: their tokens, and what a broken environment costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight.contracts import InferenceEndpoint
from inflight.environments.play_loop import PlayLoop
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import TaskError, UnreachableError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts import Ledger
from inflight.rollouts.driver_commands import DroppedItem, FinishedGroup
from inflight.run.sampling.actor import FailedEpisode, Outcome
from inflight.run.sampling.episodes import Episodes
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint
from inflight.run.sampling.work import Order
from inflight.types import OBSERVED, Group
from inflight.wire import GenerateRequest, GenerateResponse, SamplingParams
from tests.environments.places import ThreeTurns
from tests.gates import NEVER_S, until
from tests.run.acting import actor_of, partials_of
from tests.servers import ServerProcess

pytestmark = pytest.mark.timeout(120)


class Recorded(HttpEndpoint):
    """A real server, whose answers are kept; it may fail."""

    def __init__(self, url: str, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(url)
        self.answers: list[tuple[GenerateRequest, GenerateResponse]] = []
        self._fails = fails
        self._num_asked = 0

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self._num_asked += 1
        if self._fails(self._num_asked):
            raise UnreachableError("gone", self.name)
        response = await super().generate(request)
        self.answers.append((request, response))
        return response


class Played:
    """What an actor played until its ``until`` held."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.drops: list[DroppedItem] = []
        self.failures: list[tuple[str, str]] = []
        self.ledger = Ledger()
        self.error: BaseException | None = None
        self.partials: dict[str, Any] = {}
        self.num_rewritten = 0

    def note(self, outcome: Outcome) -> None:
        match outcome:
            case FinishedGroup(group, _, num_rewritten):
                self.groups.append(group)
                self.num_rewritten += num_rewritten
            case DroppedItem():
                self.drops.append(outcome)
            case FailedEpisode(_, kind, what_happened):
                self.failures.append((kind, what_happened))
            case _:
                pass


def play(
    endpoint: InferenceEndpoint,
    model: Path,
    until: Callable[[Played], bool],
    *,
    timeout_s: float = 30.0,
    num_extra: int = 0,
    max_tokens: int = 400,
    saved: dict[str, Any] | None = None,
    chat_template: str | None = None,
    others: Sequence[InferenceEndpoint] = (),
    serving: Callable[[], Sequence[str]] | None = None,
    play_loop: type[PlayLoop] = PlayLoop,
    **environment: Any,
) -> Played:
    """Play groups of three episodes, eight episodes at a time on each endpoint of those that are ``serving``."""
    outcome = Played()
    tokenizer: Any = load_tokenizer(model)
    tokenizer.chat_template = chat_template or tokenizer.chat_template

    async def run() -> None:
        episodes = Episodes(
            ThreeTurns(0, **environment),
            ChatTemplate(tokenizer),
            SamplingParams(n=3, max_tokens=6),
            num_needed=3,
            num_extra=num_extra,
            max_sequence_tokens=max_tokens,
            timeout_s=timeout_s,
            loop=play_loop(blocked_s=1.0, grace_s=0.5),
        )
        actor = actor_of(
            episodes,
            outcome.note,
            ledger=outcome.ledger,
        )
        actor.dispatcher.restore({"partials": saved or {}}, episodes.parse)
        for one in (endpoint, *others):
            actor.add(one, 8)
        running = asyncio.ensure_future(actor.run())
        while not (until(outcome) or running.done()):
            outcome.partials = partials_of(actor)
            actor.serve(serving() if serving else [endpoint.name], 0)  # also after it was lost
            await asyncio.wait({running}, timeout=0.02)
        running.cancel()
        (outcome.error,) = await asyncio.gather(running, return_exceptions=True)
        for one in (endpoint, *others):
            await one.aclose()

    asyncio.run(asyncio.wait_for(run(), 60))
    return outcome


def test_a_rollout_is_exactly_what_the_engine_sampled(shared_server: ServerProcess, model_dir: Path) -> None:
    endpoint = Recorded(shared_server.url)
    outcome = play(endpoint, model_dir, lambda it: len(it.groups) >= 4)
    sampled = {
        (*request.prompt_token_ids, *completion.token_ids): (request, completion)
        for request, response in endpoint.answers
        for completion in response.completions
    }
    num_turns = 0
    for group in outcome.groups:
        assert len({rollout.episode for rollout in group.rollouts}) == 3
        for rollout in group.rollouts:
            stream = (*rollout.prompt_token_ids, *rollout.completion_token_ids)
            versions, num_prompt = rollout.token_versions(), len(rollout.prompt_token_ids)
            for turn in rollout.turns:
                num_turns += 1
                request, completion = sampled[stream[: num_prompt + turn.end]]
                assert request.prompt_token_ids == stream[: num_prompt + turn.start]
                assert tuple(rollout.behaviour_logprobs[turn.start : turn.end]) == completion.logprobs
                assert {*versions[turn.start : turn.end]} == {0}
                assert turn.reward is not None
            observed = [i for i, version in enumerate(versions) if version == OBSERVED]
            assert all(rollout.behaviour_logprobs[i] == 0.0 for i in observed)
    assert num_turns == 3 * 3 * len(outcome.groups)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raises", "raised"),
        ("exits", "raised"),
        ("exits in a task", "raised"),
        ("cancels itself", "raised"),
        ("hangs", "timeout"),
        ("hangs and does not let itself be cancelled", "timeout"),
        ("blocks", "blocked"),
        ("nan", "bad reward"),
        ("no number", "bad reward"),
        ("talks too long", "context full"),
    ],
)
def test_what_an_environment_does_wrong_costs_its_episode(
    shared_server: ServerProcess, model_dir: Path, fault: str, kind: str
) -> None:
    outcome = play(
        Recorded(shared_server.url),
        model_dir,
        lambda it: len(it.groups) >= 3 and len(it.failures) >= 2,
        fault=fault,
        every=4,
        timeout_s=2.0 if kind == "timeout" else NEVER_S,  # others take as long as they take
    )
    assert {kind for kind, _ in outcome.failures} == {kind}
    assert all("three_turns" in what for _, what in outcome.failures)
    assert {len({rollout.episode for rollout in group.rollouts}) for group in outcome.groups} <= {2, 3}
    assert set(outcome.ledger.num_dropped) <= {"failed episodes"}


class InterruptedLoop(PlayLoop):
    """Cancels the first episodes, as where another one blocks their thread."""

    num_left = 5

    async def run(self, call: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        if self.num_left:
            self.num_left -= 1
            raise asyncio.CancelledError
        return await super().run(call, timeout_s)


def test_episodes_that_are_cancelled_since_another_one_blocks_their_thread_are_played_again(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    # The five episodes are those of the first two items.
    outcome = play(
        Recorded(shared_server.url),
        model_dir,
        lambda it: {group.item_index for group in it.groups} >= {0, 1},
        play_loop=InterruptedLoop,
    )
    assert not outcome.failures and not outcome.drops


class HangingLoop(PlayLoop):
    """Never plays an episode."""

    num_begun = 0

    async def run(self, call: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        self.num_begun += 1
        await asyncio.Event().wait()


def test_an_episode_of_an_item_that_is_forgotten_is_not_played_again(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def main() -> None:
        tokenizer: Any = load_tokenizer(model_dir)
        loop = HangingLoop()
        sampling = SamplingParams(n=1, max_tokens=6)
        episodes = Episodes(ThreeTurns(0), ChatTemplate(tokenizer), sampling, 1, 0, 400, 30.0, loop=loop)
        endpoint = Recorded(shared_server.url)
        order = Order("episode", await episodes.item(0), (), (0,), 1)
        sampling_it = asyncio.ensure_future(episodes.sample(SamplingEndpoint(endpoint), order))
        await until(lambda: loop.num_begun)
        episodes.forget(0)
        with pytest.raises(asyncio.CancelledError):
            await sampling_it
        assert loop.num_begun == 1
        await episodes.aclose()
        await endpoint.aclose()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_episode_whose_past_is_rewritten_is_several_rollouts_with_one_reward(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    forgets = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{{ '\\n' }}{% endif %}{% endfor %}"
    outcome = play(Recorded(shared_server.url), model_dir, lambda it: len(it.groups) >= 2, chat_template=forgets)
    for group in outcome.groups:
        assert [rollout.episode for rollout in group.rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert all(len(rollout.turns) == 1 for rollout in group.rollouts)
        assert len({(rollout.episode, rollout.reward) for rollout in group.rollouts}) == 3
    assert outcome.num_rewritten >= 2 * 2 * 3


def test_extra_episodes_make_up_for_those_that_fail(shared_server: ServerProcess, model_dir: Path) -> None:
    outcome = play(
        Recorded(shared_server.url),
        model_dir,
        lambda it: len(it.groups) >= 3,
        fault="hangs",
        every=4,
        num_extra=2,
        timeout_s=3600.0,
    )
    assert all(len({rollout.episode for rollout in group.rollouts}) == 3 for group in outcome.groups)


def test_an_environment_that_always_fails_ends_the_run_with_its_reason(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    outcome = play(Recorded(shared_server.url), model_dir, lambda it: False, fault="raises", every=1)
    assert isinstance(outcome.error, TaskError)
    assert "fails on purpose" in str(outcome.error)
    assert set(outcome.ledger.num_dropped) == {"failed episodes"}


def test_episodes_of_an_endpoint_that_fails_go_on_with_the_turns_that_they_have(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    endpoint = Recorded(shared_server.url, fails=lambda number: number == 20)
    outcome = play(endpoint, model_dir, lambda it: len(it.groups) >= 6)
    assert not outcome.failures
    assert not outcome.ledger.num_dropped
    assert {0, 1, 2, 3} <= {group.item_index for group in outcome.groups}
    seeds = [request.sampling.seed for request, _ in endpoint.answers]
    assert len(seeds) == len({*seeds})  # no turn was sampled twice


def test_an_episode_that_is_over_just_when_its_endpoint_is_lost_is_not_played_again(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def main() -> tuple[int, list[Any]]:
        tokenizer: Any = load_tokenizer(model_dir)
        sampling = SamplingParams(n=1, max_tokens=6)
        episodes = Episodes(ThreeTurns(0), ChatTemplate(tokenizer), sampling, 1, 0, 400, 30.0)
        endpoint = Recorded(shared_server.url)
        sampling_endpoint = SamplingEndpoint(endpoint)
        order = Order("episode", await episodes.item(0), (), (0,), 1)
        first = asyncio.ensure_future(episodes.sample(sampling_endpoint, order))
        await until(lambda: episodes._played)
        (playing,) = episodes._played.values()
        playing.task.add_done_callback(lambda _: first.cancel())
        with pytest.raises(asyncio.CancelledError):
            await first
        sampled = await episodes.sample(sampling_endpoint, order)
        await episodes.aclose()
        await endpoint.aclose()
        return len(endpoint.answers), sampled

    num_turns, (played,) = asyncio.run(asyncio.wait_for(main(), 60))
    assert num_turns == 3
    assert played.failure is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [2, 10, 20])
def test_episodes_of_a_server_that_is_killed_go_on_at_another(
    start_server: Callable[..., ServerProcess], model_dir: Path, after: int
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]
    first, second = (Recorded(server.url) for server in servers)
    is_killed = False

    def serving() -> list[str]:
        nonlocal is_killed
        # An episode has three turns, so one of them is under way.
        if not is_killed and len(first.answers) >= after and len(first.answers) % 3:
            servers[0].kill()
            is_killed = True
        return [second.name] if is_killed else [first.name, second.name]

    outcome = play(
        first, model_dir, lambda it: len(it.groups) >= 8 and len(second.answers) >= 60, others=[second], serving=serving
    )
    assert not outcome.failures
    assert not outcome.ledger.num_dropped
    seeds = [request.sampling.seed for one in (first, second) for request, _ in one.answers]
    assert len(seeds) == len({*seeds})
    # Some episode began on the server that is gone, and continued at the other one.
    own, other = (
        {request.prompt_token_ids + response.completions[0].token_ids for request, response in one.answers}
        for one in (first, second)
    )
    assert any(later[: len(earlier)] == earlier for earlier in own for later in other)


def test_finished_episodes_of_an_unfinished_group_survive_a_restart(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    first = play(
        Recorded(shared_server.url), model_dir, lambda it: bool(it.partials), fault="hangs", every=3, timeout_s=3600.0
    )
    (index, saved), *_ = first.partials.items()
    num_played = sum(one is not None for one in saved)
    assert 1 <= num_played < 3
    endpoint = Recorded(shared_server.url)
    second = play(
        endpoint, model_dir, lambda it: int(index) in [one.item_index for one in it.groups], saved={index: saved}
    )
    (group,) = [group for group in second.groups if str(group.item_index) == index]
    known = {tuple(tuple(call["completion"]["token_ids"]) for call in one["calls"]) for one in saved if one is not None}
    made = {
        tuple(tuple(rollout.completion_token_ids[turn.start : turn.end]) for turn in rollout.turns)
        for rollout in group.rollouts
    }
    assert known <= made
