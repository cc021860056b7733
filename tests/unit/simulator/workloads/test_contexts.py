"""Contexts without tokens and with keys that are no hashes behave as tokens and their hashes would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thunderagent.simulator.engine.blocks import hash_blocks
from thunderagent.simulator.workloads.contexts import Context, TokenSpace

GROWTH = st.lists(st.integers(0, 30), max_size=8)


@given(st.integers(0, 40), GROWTH)
def test_a_context_grows_by_the_tokens_that_follow(shared_tokens: int, growth: list[int]) -> None:
    context = TokenSpace(4).open("system", shared_tokens)
    for count in growth:
        expected = [*context.tokens(), *context.following(count)]
        keys = context.keys_with(context.following(count))
        context.append(count)
        assert list(context.tokens()) == expected
        assert context.keys == keys
    tokens = context.tokens()
    assert len(tokens) == len(context) == shared_tokens + sum(growth)
    assert [tokens[index] for index in range(len(tokens))] == list(tokens)
    assert tokens[3:9] == list(tokens)[3:9]


@given(st.lists(st.tuples(st.sampled_from(("system", "other", "")), st.integers(0, 40), GROWTH), max_size=5))
def test_keys_are_the_same_exactly_where_hashes_would_be(opened: list[tuple[str, int, list[int]]]) -> None:
    """This holds for any two contexts, also for one that is read with another's answer."""
    space = TokenSpace(4)
    contexts: list[Context] = []
    for prefix_id, shared_tokens, growth in opened:
        contexts.append(space.open(prefix_id, shared_tokens))
        for count in growth:
            contexts[-1].append(count)
    pairs = [(context.keys, [*context.tokens()]) for context in contexts]
    pairs += [
        (context.keys_with(answer), [*context.tokens(), *answer])
        for context in contexts
        for answer in (context.following(9), space.open().following(9))
    ]
    by_key = {}
    for keys, tokens in pairs:
        hashes = hash_blocks(tokens, 4)
        assert len(keys) == len(hashes)
        for key, of_tokens in zip(keys, hashes, strict=True):
            assert by_key.setdefault(key, of_tokens) == of_tokens
    assert len(set(by_key.values())) == len(by_key)


def test_contexts_agree_exactly_where_they_share_a_prefix() -> None:
    space = TokenSpace(4)
    first, second, other = space.open("system", 10), space.open("system", 10), space.open("another", 10)
    for context in (first, second, other):
        context.append(6)
    assert first.keys[:2] == second.keys[:2]
    assert first.keys[2:] != second.keys[2:], "the third block holds tokens of its own"
    assert not set(first.keys) & set(other.keys)


def test_a_longer_prefix_of_one_name_begins_with_the_shorter_one() -> None:
    space = TokenSpace(4)
    assert space.open("system", 16).keys[:2] == space.open("system", 8).keys
