"""Drafts against a suffix trie that is really built, and what a source remembers and forgets."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from inflight.rollouts.drafts import (
    LARGEST_WINDOW,
    LEAST_PROBABILITY,
    LONGEST_SUFFIX,
    PROMPT_TAIL,
    SHORTEST_SUFFIX,
    SMALLEST_WINDOW,
    Drafter,
    DraftProvider,
    DraftSource,
    DraftWindow,
)
from inflight.wire import DraftHistory, PromptHistory

PROMPT = (90, 91, 92, 93, 94, 95)
END = -1


def history(*completions: Sequence[int], prompt: Sequence[int] = PROMPT, rewards: Sequence[float] = ()) -> DraftHistory:
    entry = PromptHistory(
        prompt_token_ids=tuple(prompt),
        completions=tuple(map(tuple, completions)),
        rewards=tuple(rewards) or (0.0,) * len(completions),
    )
    return DraftHistory(entries=(entry,))


def recorded(*completions: Sequence[int]) -> DraftSource:
    source = DraftSource("history")
    source.record(history(*completions))
    return source


def having_sampled(source: DraftSource, token_ids: Sequence[int], prompt: tuple[int, ...] = PROMPT) -> Drafter:
    drafter = source.drafter(prompt)
    for token in token_ids:
        drafter.sampled(token)
    return drafter


def widened(drafter: Drafter) -> Drafter:
    """Let it draft as many tokens as it ever does."""
    while drafter.window.size < LARGEST_WINDOW:
        drafter.verified(1, 1)
    return drafter


# ---------------------------------------------------------------------------------------------------------------
# The walk


def trie_of(texts: Sequence[Sequence[int]], weights: Sequence[float]) -> dict[tuple[int, ...], float]:
    """Weight of every node: of the places at which its tokens occur. `END` follows every text."""
    nodes: dict[tuple[int, ...], float] = {}
    for text, weight in zip(texts, weights, strict=True):
        ended = [*text, END]
        for start in range(len(ended)):
            for stop in range(start + 1, min(len(ended), start + LONGEST_SUFFIX + LARGEST_WINDOW) + 1):
                node = tuple(ended[start:stop])
                nodes[node] = nodes.get(node, 0.0) + weight
    return nodes


def walks(nodes: dict[tuple[int, ...], float], tail: Sequence[int], limit: int) -> set[tuple[int, ...]]:
    """The drafts of the longest suffix that continues; several where two children have the same weight."""
    for length in range(min(LONGEST_SUFFIX, len(tail)), SHORTEST_SUFFIX - 1, -1):
        suffix = tuple(tail[-length:])
        children = {node[-1]: w for node, w in nodes.items() if node[:-1] == suffix}
        if children.keys() - {END}:
            return _walks(nodes, suffix, without_end(children), 1.0, limit)
    return {()}


def without_end(children: dict[int, float]) -> dict[int, float]:
    return {token: weight for token, weight in children.items() if token != END}


def _walks(
    nodes: dict[tuple[int, ...], float], node: tuple[int, ...], children: dict[int, float], p: float, limit: int
) -> set[tuple[int, ...]]:
    if not limit or not children:
        return {()}
    largest, found = max(children.values()), set()
    for token in [token for token, weight in children.items() if weight > largest - 1e-9]:
        p_child = p * children[token] / sum(children.values())
        if token == END or p_child < LEAST_PROBABILITY:
            found.add(())
            continue
        child = (*node, token)
        below = {other[-1]: w for other, w in nodes.items() if other[:-1] == child}
        found |= {(token, *rest) for rest in _walks(nodes, child, below, p_child, limit - 1)}
    return found


texts = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=5)


@given(texts, st.lists(st.integers(0, 2), max_size=12), st.data())
def test_a_draft_is_the_walk_of_a_suffix_trie(
    completions: list[list[int]], sampled: list[int], data: st.DataObject
) -> None:
    rewards = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=len(completions), max_size=len(completions))
    )
    reward_weight = data.draw(st.sampled_from([0.0, 0.5]))
    limit = data.draw(st.integers(0, 20))
    source = DraftSource("history", reward_weight=reward_weight)
    source.record(history(*completions, rewards=rewards))
    drafter = widened(having_sampled(source, sampled))
    tail = PROMPT[-PROMPT_TAIL:]
    nodes = trie_of([[*tail, *ids] for ids in completions], [1 + reward_weight * reward for reward in rewards])
    drafted = tuple(drafter.draft(limit))
    assert drafted in walks(nodes, [*tail, *sampled], min(limit, LARGEST_WINDOW))


def test_the_branch_that_occurs_most_often_is_drafted_until_it_is_too_unlikely() -> None:
    source = recorded([1, 2], [1, 2], [1, 3])
    assert widened(having_sampled(source, [])).draft(16) == [1, 2]
    # Twelve branches of the same weight: each has probability 1 / 12.
    source = recorded(*([1, i] for i in range(12)))
    assert widened(having_sampled(source, [])).draft(16) == [1]


def test_with_a_weight_the_branch_of_the_better_rewards_is_drafted() -> None:
    completions, rewards = ([1, 2], [1, 2], [1, 3]), (0.0, 0.0, 1.0)
    for reward_weight, second in ((0.0, 2), (3.0, 3), (-3.0, 2)):
        source = DraftSource("history", reward_weight=reward_weight)
        source.record(history(*completions, rewards=rewards))
        assert widened(having_sampled(source, [])).draft(16) == [1, second]


def test_fewer_than_four_tokens_in_common_are_no_ground_for_a_draft() -> None:
    source = recorded([1, 2, 3, 4, 5, 6, 7, 8])
    assert having_sampled(source, [9, 9, 3, 4, 5]).draft(2) == []
    assert having_sampled(source, [9, 9, 3, 4, 5, 6]).draft(2) == [7, 8]


def test_a_continued_completion_is_drafted_as_if_it_had_not_been_cut() -> None:
    text = list(range(20))
    for provider in ("history", "both"):
        source = DraftSource(provider)
        source.record(history(text))
        whole = having_sampled(source, text[:9])
        rest = source.drafter(PROMPT, text[:6])
        for token in text[6:9]:
            rest.sampled(token)
        assert rest.draft(2) == whole.draft(2) == [9, 10]
        rest.finish()


def test_the_window_doubles_when_all_was_accepted_and_halves_otherwise() -> None:
    window = DraftWindow()
    sizes = [window.size]
    for _ in range(4):
        window.verified(window.size, window.size)
        sizes.append(window.size)
    for _ in range(4):
        window.verified(window.size, window.size - 1)
        sizes.append(window.size)
    assert sizes == [2, 4, 8, 16, 16, 8, 4, 2, 2]
    drafter = having_sampled(recorded(list(range(30))), [])
    assert drafter.draft(30) == list(range(SMALLEST_WINDOW))
    assert drafter.draft(1) == [0]
    drafter.verified(2, 2)
    assert drafter.draft(30) == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------
# What is remembered


def test_recording_a_prompt_again_replaces_its_completions() -> None:
    source = recorded([1, 2, 3])
    source.record(history([4, 5, 6]))
    assert having_sampled(source, []).draft(2) == [4, 5]
    assert having_sampled(source, [1]).draft(2) == []
    assert source.num_prompts == 1


def test_each_provider_drafts_from_its_own_texts() -> None:
    cases: tuple[tuple[DraftProvider, list[int], list[int]], ...] = (
        ("history", [1, 2], []),
        ("siblings", [], [7, 8]),
        ("both", [1, 2], [7, 8]),
    )
    for provider, from_history, from_siblings in cases:
        source = DraftSource(provider)
        if source.takes_history:
            source.record(history([1, 2, 3]))
        running = having_sampled(source, [7, 8, 9])
        assert having_sampled(source, [1]).draft(1) == from_history[1:]
        assert having_sampled(source, [7]).draft(1) == from_siblings[1:], provider
        running.finish()
        running.finish()
        assert having_sampled(source, [7]).draft(1) == from_siblings[1:], "a finished sibling"


def test_a_completion_is_not_drafted_from_itself() -> None:
    source = DraftSource("siblings")
    drafter = having_sampled(source, [1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert drafter.draft(1) == []
    assert having_sampled(source, [1, 2, 3, 4]).draft(1) == [5]


def test_prompts_used_longest_ago_are_forgotten_first() -> None:
    source = DraftSource("history", max_prompts=2)
    prompts = [(i, i, i, i, i) for i in range(3)]
    source.record(history([7, 8], prompt=prompts[0]))
    source.record(history([7, 8], prompt=prompts[1]))
    source.drafter(prompts[0])
    source.record(history([7, 8], prompt=prompts[2]))
    assert [bool(source.drafter(prompt).draft(2)) for prompt in prompts] == [True, False, True]


def test_memory_stays_within_its_bound_and_is_given_back() -> None:
    size_bytes = recorded(list(range(100))).size_bytes
    source = DraftSource("both", max_bytes=3 * size_bytes)
    for i in range(10):
        source.record(history(list(range(100)), prompt=(i,) * 5))
        drafter = having_sampled(source, list(range(50)), (i,) * 5)
        drafter.finish()
        assert source.size_bytes <= 3 * size_bytes
    assert 0 < source.num_prompts < 4
    source.record(history(list(range(1000)), prompt=(50,) * 5))
    assert (source.size_bytes, source.num_prompts) == (0, 0)


def test_a_prompt_keeps_a_bounded_number_of_finished_siblings() -> None:
    source = DraftSource("siblings")
    for i in range(500):
        having_sampled(source, [i, i + 1]).finish()
    assert source.size_bytes <= 64 * 400 * 7
    assert having_sampled(source, [499]).draft(1) == [500]
    assert having_sampled(source, [0]).draft(1) == []
