"""Where prompts may be equal: the chain of cuts, what makes chains equal, and what separates prompts."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.dialects.structs import PromptFields
from thunderagent.proxy.reading.identity import identify
from thunderagent.proxy.reading.prefix import MAX_HASHED_BYTES, prefix_of

Chain = tuple[tuple[int, int], ...]

SYSTEM = {"role": "system", "content": "You mend code. " * 20}
TASK = {"role": "user", "content": "Mend this."}
TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def chain_of_body(body: bytes, path_id: str | None = "a") -> Chain:
    turn = identify(path_id, CIMultiDictProxy(CIMultiDict()), body)
    assert turn is not None
    return turn.prefix


def chain_of(**fields: object) -> Chain:
    return chain_of_body(json.dumps({"model": "m", **fields}).encode())


def shared(one: Chain, other: Chain) -> int:
    """Return how many cuts two chains share; after the first difference all must differ."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not {digest for digest, _ in one[count:]} & {digest for digest, _ in other[count:]}
    return count


def steps(number: int, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": f"step {index}"} for index in range(number)]


# --- Messages


def test_programs_that_share_messages_share_the_cuts_after_them() -> None:
    """Tools, system prompt and task are equal, the rest differs."""
    one = chain_of(tools=TOOLS, messages=[SYSTEM, TASK, *steps(6, "assistant")])
    other = chain_of(tools=TOOLS, messages=[SYSTEM, TASK, *steps(6, "user")], temperature=1)
    assert len(one) == len(other) == 6  # after messages 1, 2, 3, 4, 6, 8
    assert shared(one, other) == 2


def test_a_longer_turn_begins_with_the_chain_of_the_one_before() -> None:
    """The context of a program grows at its end."""
    messages = [SYSTEM, TASK, *steps(30)]
    whole = chain_of(messages=messages)
    for number in range(1, len(messages)):
        chain = chain_of(messages=messages[:number])
        assert whole[: len(chain)] == chain


def test_cuts_are_few_however_many_messages_there_are() -> None:
    """Ten thousand messages have this number, at growing sizes."""
    chain = chain_of(messages=steps(10_000))
    assert len(chain) == 26  # 1, 2 for each doubling up to 4096, 8192
    assert [size for _, size in chain] == sorted({size for _, size in chain})


def test_a_size_is_that_of_tools_and_messages_as_they_were_sent() -> None:
    """It counts bytes of the body, whatever is in between."""
    chain = chain_of(messages=[SYSTEM, TASK], tools=TOOLS)
    tools, system, task = (len(json.dumps(part)) for part in (TOOLS, SYSTEM, TASK))
    assert [size for _, size in chain] == [tools + system, tools + system + task]


@pytest.mark.parametrize(
    "differing", [{"model": "lora"}, {"cache_salt": "s"}, {"tools": TOOLS}, {"messages": [TASK, SYSTEM]}]
)
def test_fields_that_separate_prompts_separate_all_cuts(differing: dict[str, object]) -> None:
    """An engine shares nothing between models, salts, or prompts that begin otherwise."""
    plain = chain_of(messages=[SYSTEM, TASK])
    assert shared(plain, chain_of(**{"messages": [SYSTEM, TASK], **differing})) == 0


def test_the_block_that_engines_leave_out_separates_nothing() -> None:
    """Claude Code says first which version and task sent the prompt; engines drop that block."""
    rest = {"type": "text", "text": "You are an agent."}
    chains = [
        chain_of(system=[{"type": "text", "text": f"x-anthropic-billing-header: cch={each};"}, rest], messages=[TASK])
        for each in ("a1", "b2")
    ]
    assert chains[0] == chains[1] == chain_of(system=[rest], messages=[TASK])
    others = [chain_of(system=[{"type": "text", "text": f"x-{each}: 1"}, rest], messages=[TASK]) for each in "ab"]
    assert shared(*others) == 0


def test_model_and_salt_are_not_mixed_up() -> None:
    """The end of one field is not the beginning of the next."""
    assert shared(chain_of(model="ab", messages=[TASK]), chain_of(model="a", cache_salt="b", messages=[TASK])) == 0


@pytest.mark.parametrize(("beside", "listed"), [("system", "messages"), ("instructions", "input")])
def test_a_system_prompt_beside_the_messages_is_the_first(beside: str, listed: str) -> None:
    """The Messages API and the Responses API have one."""
    one = chain_of(**{beside: "Mend code.", listed: [TASK, *steps(1)]})
    other = chain_of(**{beside: "Mend code.", listed: [{"role": "user", "content": "Other."}]})
    assert len(one) == 3
    assert shared(one, other) == 1


def test_an_input_that_is_a_text_is_one_message() -> None:
    """The Responses API takes it as a user's message."""
    assert len(chain_of(instructions="Mend code.", input="Mend [this].")) == 2
    assert len(chain_of(input="[]")) == 1


def test_the_chain_is_the_same_in_every_process() -> None:
    """A restarted proxy knows its earlier prompts."""
    code = (
        "import json, sys; from thunderagent.proxy.reading.dialects.structs import PromptFields;"
        "from thunderagent.proxy.reading.prefix import prefix_of; import msgspec;"
        "print(json.dumps(prefix_of(msgspec.json.decode(sys.argv[1], type=PromptFields))))"
    )
    body = json.dumps({"model": "m", "messages": [SYSTEM, TASK]})
    outputs = {subprocess.check_output([sys.executable, "-c", code, body]) for _ in range(2)}
    assert [json.loads(output) for output in outputs] == [[list(cut) for cut in chain_of_body(body.encode())]]


# --- Text and token ids


def test_texts_are_cut_at_growing_sizes() -> None:
    """They share cuts up to the first difference, rounded down."""
    one = chain_of(prompt="a" * 5000 + "b" * 5000)
    other = chain_of(prompt="a" * 9000)
    assert [size for _, size in one] == [1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert shared(one, other) == 5


@pytest.mark.parametrize("field", ["prompt", "input_ids", "prompt_token_ids", "token_ids"])
def test_token_ids_are_cut_as_they_are_written(field: str) -> None:
    """Equal ids are equal bytes."""
    ids = list(range(100_000, 101_000))
    one, other = chain_of(**{field: ids}), chain_of(**{field: [*ids[:500], *ids[:500]]})
    assert [size for _, size in one] == [1024, 1536, 2048, 3072, 4096, 6144]
    assert shared(one, other) == 4  # 500 ids are 4000 bytes


def test_the_text_of_an_sglang_request_is_a_prompt() -> None:
    """`/generate` uses this name."""
    assert len(chain_of(text="a" * 1100)) == 1


def test_nothing_is_cut_beyond_a_limit() -> None:
    """Hashing is bounded."""
    sizes = [size for _, size in chain_of(prompt="a" * (2 * MAX_HASHED_BYTES))]
    assert sizes[-1] == MAX_HASHED_BYTES
    large = {"role": "user", "content": "a" * MAX_HASHED_BYTES}
    assert len(chain_of(messages=[SYSTEM, TASK, large, TASK])) == 2


# --- Nothing to share


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": []},
        {"messages": None},
        {"messages": "text"},
        {"messages": {"0": "x"}},
        {"input": 5},
        {"prompt": "short"},
        {"prompt": ["a" * 3000, "b" * 3000]},
        {"prompt": [[1] * 3000, [2] * 3000]},
        {"prompt": {"id": "x" * 3000}},
        {"prompt": None},
    ],
)
def test_odd_and_short_prompts_have_no_chain(fields: dict[str, object]) -> None:
    """The engine decides about them."""
    assert chain_of(**fields) == ()


@pytest.mark.parametrize(
    "messages",
    [b"[NaN]", b'["\\ud800"]', b"[" * 900 + b"]" * 900, b"[" * 5000 + b"]" * 5000],
    ids=["NaN", "half a surrogate pair", "deep", "very deep"],
)
def test_slowly_readable_body_has_no_chain_or_one_of_its_bytes(messages: bytes) -> None:
    """An error is never raised."""
    body = b'{"messages":' + messages + b"}"
    turn = identify("a", CIMultiDictProxy(CIMultiDict()), body)
    assert turn is None or len(turn.prefix) <= 1


def test_an_anonymous_turn_has_no_chain() -> None:
    """Nothing needs it."""
    assert chain_of_body(b'{"messages":[{}]}', path_id=None) == ()
    assert len(chain_of_body(b'{"messages":[{}]}')) == 1


# --- Any


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5)), max_size=20), st.integers(0, 20))
def test_prompts_share_the_cuts_before_the_first_difference(messages: list[dict[str, str]], at: int) -> None:
    """It is exact: not one more, not one less."""
    changed = [*messages[:at], {"changed here": "x"}, *messages[at + 1 :]]
    one, other = chain_of(messages=messages), chain_of(messages=changed)
    numbers = [number for number in (1, 2, 3, 4, 6, 8, 12, 16) if number <= min(at, len(messages))]
    assert shared(one, other) == len(numbers)


@given(st.binary(max_size=60))
def test_any_bytes_have_a_chain_that_grows(junk: bytes) -> None:
    """Digests are numbers of 63 bits; sizes grow and lie within the body."""
    fields = PromptFields(input=msgspec.Raw(b"[" + junk + b"]"))
    chain = prefix_of(fields)
    assert all(0 <= digest < 2**63 and 0 < size <= len(junk) for digest, size in chain)


def test_a_large_message_that_was_hashed_before_gives_the_same_digest() -> None:
    """The digest is that of the bytes, known or not, and whatever came before them."""
    large = json.dumps({"role": "user", "content": "w" * 100_000}).encode()
    other = json.dumps({"role": "user", "content": "w" * 99_999 + "v"}).encode()
    for messages in ([large], [large, large], [other, large], [large, other], [large, large]):
        body = b'{"model":"m","messages":[' + b",".join(messages) + b"]}"
        digest = hashlib.sha1(b"\0".join((b"messages", b'"m"', b"", b"")))
        for number, _ in prefix_of(msgspec.json.decode(body, type=PromptFields)):
            digest.update(messages.pop(0))
            assert number == int.from_bytes(digest.digest()[:8], "big") >> 1
        assert not messages
