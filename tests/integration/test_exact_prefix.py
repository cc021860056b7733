"""A chat that goes on is sent with the tokens that its engine sampled, exact; or as its client sent it, and why."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    CHAT,
    DONE,
    Answer,
    Call,
    answers,
    event,
    exchange,
    fake_replica,
    metric,
    post,
    running_proxy,
    streams,
)
from tests.integration.test_rollouts import rollout, said
from thunderagent.proxy.gate.keys import mint_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SUPPLY: dict[str, Any] = {"rollouts": "ids", "backend_type": "vllm", "rollout_prefix": "supply"}
USER, ASSISTANT, END, LINE, JOINED = 2001, 2002, 2003, 2004, 5000
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


class JoiningEngine:
    """Behave like an engine whose model samples one token for two words, which its tokenizer then makes two of.

    `w7 w8` is sampled as 5007 and rendered as 7, 8. It ends each answer with END.
    """

    def __init__(self, kind: str = "vllm") -> None:
        self.kind = kind
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.next = 10
        self.finish = "stop"
        self.calls: list[dict[str, Any]] = []
        self.drops_thoughts = self.ignores = self.refuses = False
        self.renders = 0

    def render(self, body: dict[str, Any], *, opened: bool = True) -> list[int]:
        """Render the messages."""
        ids: list[int] = []
        for at, message in enumerate(body["messages"]):
            content = message.get("content") or ""
            words = content.split() if isinstance(content, str) else []
            if self.drops_thoughts and message["role"] == "assistant" and at < len(body["messages"]) - 1:
                words = words[1:]
            ids += [ASSISTANT if message["role"] == "assistant" else USER, *(int(word[1:]) for word in words)]
            ids += [4000 + len(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
            ids += [END, LINE]
        return [*ids, ASSISTANT] if opened and body.get("add_generation_prompt") is not False else ids

    async def __call__(self, call: Call) -> None:
        if call.method != "POST":
            await answers({})(call)
            return
        body = call.json()
        if call.target in ("/v1/chat/completions/render", "/tokenize"):
            if self.kind == "sglang" and body.get("stream"):
                await answers({"object": "error"}, status="501 Not Implemented")(call)
                return
            self.renders += 1
            await answers({"token_ids" if self.kind == "vllm" else "tokens": self.render(body)})(call)
            return
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("input_ids")
        self.bodies.append(body)
        if given and self.refuses:
            await answers({"error": {"message": "unknown field"}}, status="400 Bad Request")(call)
            return
        prompt = given if given and not self.ignores else self.render(body)
        self.prompts.append(prompt)
        first, self.next = self.next, self.next + 2
        output = [JOINED + first, END] if self.finish == "stop" else [JOINED + first]
        content = f"w{first} w{first + 1}"
        await (self.stream if body.get("stream") else self.whole)(call, prompt, output, content)

    async def whole(self, call: Call, prompt: list[int], output: list[int], content: str) -> None:
        """Answer whole."""
        body, usage = call.json(), {"prompt_tokens": len(prompt), "completion_tokens": len(output), "total_tokens": 0}
        message = {"role": "assistant", "content": content, **({"tool_calls": self.calls} if self.calls else {})}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish}
        if self.kind == "sglang":
            said = (
                {"sglext": {"input_ids": prompt, "output_ids": [output]}} if call.header("X-Sglext-Ids-Framed") else {}
            )
            await answers({"id": "x", "choices": [choice], "usage": usage, **said})(call)
            return
        asks = body.get("return_token_ids")
        choice["token_ids"] = output if asks else None
        found = {"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": prompt if asks else None}
        await answers(found)(call)

    async def stream(self, call: Call, prompt: list[int], output: list[int], content: str) -> None:
        """Answer streamed."""
        delta = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        is_vllm, ids = self.kind == "vllm", {"sglext": {"input_ids": prompt, "output_ids": [output]}}
        pieces = [event({"choices": [delta], **({"prompt_token_ids": prompt} if is_vllm else {})})]
        for at, (word, token) in enumerate(zip(content.split(), output, strict=True)):
            part = {"index": 0, "delta": {"content": f" {word}" if at else word}, "logprobs": None}
            finish = self.finish if at else None
            tokens = {"token_ids": [token]} if is_vllm else {}
            pieces.append(event({"choices": [{**part, "finish_reason": finish, **tokens}]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output), "total_tokens": 0}
        framed = [] if is_vllm else [b"event: sglext_ids\n" + event({"choices": [], **ids})]
        await streams(*pieces, event({"choices": [], "usage": usage}), *framed, DONE)(call)


@asynccontextmanager
async def proxied(engine: JoiningEngine, **config: Any) -> AsyncIterator[str]:
    """Run a proxy in front of it, which supplies; yield its URL."""
    kind = {**SUPPLY, "backend_type": engine.kind}
    async with fake_replica(engine) as replica, running_proxy(replica.url, **{**kind, **config}) as proxy:
        yield proxy.url


async def ask(url: str, messages: list[Any], program_id: str = "a", *headers: tuple[str, str], **fields: Any) -> Answer:
    """Send a turn."""
    return await post(url, CHAT, {"messages": messages, **fields}, ("X-Program-ID", program_id), *headers)


async def converse(url: str, turns_count: int, *headers: tuple[str, str], **fields: Any) -> list[Any]:
    """Run a program that sends back what it was answered; return its turns' `prefix` and `link`."""
    messages: list[Any] = []
    for number in range(turns_count):
        messages.append(said(f"w{number + 1}"))
        answer = await ask(url, messages, "a", *headers, **fields)
        assert answer.status == 200
        messages.append(said(answer_text(answer, streams=bool(fields.get("stream"))), "assistant"))
    return [(turn["prefix"], turn["link"]) for turn in (await rollout(url, "a"))["turns"]]


def answer_text(answer: Answer, *, streams: bool) -> str:
    """Return what an answer says."""
    if not streams:
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text
    events = [each.removeprefix("data: ") for each in answer.body.decode().split("\n\n") if "data: {" in each]
    choices = [choice for each in events for choice in json.loads(each)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_next_prompt_begins_with_the_tokens_that_were_sampled(kind: str, streamed: bool) -> None:
    """Without it each turn drifts; with it each extends the one before, and nothing is tokenised again."""
    async with proxied(JoiningEngine(kind), rollout_prefix=None) as url:
        assert await converse(url, 3, stream=streamed) == [("", "root"), ("", "drift"), ("", "drift")]
    engine = JoiningEngine(kind)
    async with proxied(engine) as url:
        assert await converse(url, 3, stream=streamed) == [("first", "root"), *[("supplied", "extends")] * 2]
        assert await metric(url, "rollout_prefixes_total", "supplied") == 2
        (sample,) = (await rollout(url, "a", "?view=samples"))["samples"]
    first = [USER, 1, END, LINE, ASSISTANT, 5010, END, LINE, USER, 2, END, LINE, ASSISTANT]
    assert engine.prompts[1] == first
    assert engine.prompts[2] == [*first, 5012, END, LINE, USER, 3, END, LINE, ASSISTANT]
    assert sample["ids"] == [*engine.prompts[2], 5014, END]
    assert engine.renders == 4


async def test_client_gets_what_it_gets_without() -> None:
    """All bytes of a first turn's answer, and of a second one's but the count of its prompt's tokens."""
    got = []
    for config in ({"rollouts": None, "rollout_prefix": None}, {}):
        async with proxied(JoiningEngine(), **config) as url:
            history = [said("w1"), said("w10 w11", "assistant"), said("w2")]
            answers = [await ask(url, history[:1]), await ask(url, history)]
            usage = [b'"prompt_tokens": %d' % each.json()["usage"]["prompt_tokens"] for each in answers]
            assert all(text in each.body for text, each in zip(usage, answers, strict=True))
            got.append([each.body.replace(text, b"") for text, each in zip(usage, answers, strict=True)])
    assert got[0] == got[1]


async def test_nothing_is_rendered_for_programs_that_do_not_ask() -> None:
    """With `asked` a header decides, and with `supply` it may say no."""
    engine = JoiningEngine()
    async with proxied(engine, rollout_prefix="asked") as url:
        assert await converse(url, 2) == [("", "root"), ("", "drift")]
        assert engine.renders == 0
    async with proxied(engine, rollout_prefix="asked") as url:
        found = await converse(url, 2, ("X-Program-Prefix", "supply"))
        assert found == [("first", "root"), ("supplied", "extends")]
    async with proxied(JoiningEngine()) as url:
        assert await converse(url, 2, ("X-Program-Prefix", "off")) == [("", "root"), ("", "drift")]


async def second(engine: JoiningEngine, history: list[Any] | None = None, **fields: Any) -> tuple[str, str]:
    """Return `prefix` and `link` of a second turn, which must have been sent as its client wrote it."""
    async with proxied(engine) as url:
        await ask(url, [said("w1")], **fields)
        history = history or [said("w1"), said("w10 w11", "assistant"), said("w2")]
        assert (await ask(url, history, **fields)).status == 200
        last = (await rollout(url, "a"))["turns"][-1]
    assert engine.bodies[-1]["messages"] == history
    assert not {"kv_transfer_params", "input_ids"} & set(engine.bodies[-1]) or engine.ignores
    assert engine.prompts[-1] == engine.render({"messages": history})
    return last["prefix"], last["link"]


async def test_edited_answer_goes_unchanged() -> None:
    """A word is left out, another is added, and a name is given: the client wants that."""
    for content in ("w11", "w10 w11 w12"):
        history = [said("w1"), said(content, "assistant"), said("w2")]
        assert await second(JoiningEngine(), history) == ("edited", "drift")
    named = [said("w1"), {**said("w10 w11", "assistant"), "name": "me"}, said("w2")]
    assert (await second(JoiningEngine(), named))[0] == "edited"


async def test_edited_question_goes_unchanged() -> None:
    """Then no earlier turn is its history."""
    history = [said("w3"), said("w10 w11", "assistant"), said("w2")]
    assert await second(JoiningEngine(), history) == ("first", "rewritten")


async def test_answer_that_was_cut_goes_unchanged() -> None:
    """It has no end token; and one that a text may have ended may have another."""
    engine = JoiningEngine()
    engine.finish = "length"
    assert (await second(engine))[0] == "cut"
    assert (await second(JoiningEngine(), stop=["w9"]))[0] == "cut"


async def test_template_that_drops_thoughts_goes_unchanged() -> None:
    """What the engine renders does not begin with what it rendered before."""
    engine = JoiningEngine()
    engine.drops_thoughts = True
    assert (await second(engine))[0] == "template"


async def test_chat_with_more_than_text_goes_unchanged() -> None:
    """So do several choices, and a prompt that is decided by something else."""
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    async with proxied(JoiningEngine()) as url:
        await ask(url, [picture])
        for fields in ({"n": 2}, {"continue_final_message": True}, {"kv_transfer_params": {"x": 1}}):
            await ask(url, [said("w1")], **fields)
        assert [turn["prefix"] for turn in (await rollout(url, "a"))["turns"]] == ["unsupported"] * 4


async def test_engine_that_refuses_gets_the_turn_as_it_was() -> None:
    """The client sees no error; one that ignores the tokens is said not to have taken them."""
    engine = JoiningEngine()
    engine.refuses = True
    assert await second(engine) == ("engine", "drift")
    engine = JoiningEngine()
    engine.ignores = True
    assert await second(engine) == ("engine", "drift")


async def test_tool_calls_that_are_spelt_anew_are_the_same_answer() -> None:
    """The model's own spelling is kept."""
    engine = JoiningEngine()
    engine.calls = [CALL]
    again = {**CALL, "function": {"name": "look", "arguments": '{"at":1}'}}
    async with proxied(engine) as url:
        await ask(url, [said("w1")])
        answer = {**said("w10 w11", "assistant"), "tool_calls": [again]}
        await ask(url, [said("w1"), answer, {"role": "tool", "tool_call_id": "c1", "content": "w2"}])
        assert [turn["prefix"] for turn in (await rollout(url, "a"))["turns"]] == ["first", "supplied"]
    assert engine.prompts[1] == [USER, 1, END, LINE, ASSISTANT, 5010, END, LINE, USER, 2, END, LINE, ASSISTANT]


async def test_two_answers_to_one_prompt_each_go_on() -> None:
    """The answer that comes back says which."""
    engine = JoiningEngine()
    async with proxied(engine) as url:
        for _ in range(2):
            await ask(url, [said("w1")])
        for content in ("w10 w11", "w12 w13"):
            await ask(url, [said("w1"), said(content, "assistant"), said("w2")])
    assert [prompt[5] for prompt in engine.prompts[2:]] == [5010, 5012]


async def test_tenant_with_most_loses_what_is_remembered_first() -> None:
    """A program of another one goes on exactly."""
    async with proxied(JoiningEngine(), rollout_memory_bytes=2**20) as url:
        await ask(url, [said("w1")], "a", ("X-Program-Tenant", "small"))
        for number in range(20):
            words = said(" ".join(["w1"] * 4000))
            await ask(url, [words], f"b{number}", ("X-Program-Tenant", "large"))
        history = [said("w1"), said("w10 w11", "assistant"), said("w2")]
        await ask(url, history, "a", ("X-Program-Tenant", "small"))
        assert [turn["prefix"] for turn in (await rollout(url, "a"))["turns"]] == ["first", "supplied"]
        again = [words, said("w12 w13", "assistant"), said("w2")]
        await ask(url, again, "b0", ("X-Program-Tenant", "large"))
        assert [turn["prefix"] for turn in (await rollout(url, "b0"))["turns"]][-1] == "first"


# --- a hostile client on the same engine

QUESTION = [said("w1")]
HISTORY = [*QUESTION, said("w10 w11", "assistant"), said("w2")]
"""What a program of `mine` was asked and answered, and how it goes on."""
OWN = [USER, 1, END, LINE, ASSISTANT, 5010, END, LINE, USER, 2, END, LINE, ASSISTANT]
ASKS = ("X-Program-Prefix", "supply")


@asynccontextmanager
async def two_tenants(engine: JoiningEngine) -> AsyncIterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Run a proxy on which `a` of a first tenant has made a turn; yield its URL, and both tenants' keys."""
    (mine, my_line), (other, other_line) = mint_key("me"), mint_key("you")
    keys = {"api_keys": (my_line, other_line), "rollout_prefix": "asked"}
    async with proxied(engine, **keys) as url:
        yours, own = ("X-ThunderAgent-Key", other), ("X-ThunderAgent-Key", mine)
        assert (await ask(url, QUESTION, "a", own, ASKS)).status == 200
        yield url, own, yours


async def prefixes(url: str, program_id: str, key: tuple[str, str]) -> list[str]:
    """Return what became of the prompts of a program."""
    answer = await exchange(url, "GET", f"/programs/{program_id}/trajectory", [key])
    return [turn["prefix"] for turn in answer.json()["turns"]]


async def test_another_tenants_program_supplies_nothing() -> None:
    """Its name is refused before the engine is asked anything; under another name its history is any text."""
    engine = JoiningEngine()
    async with two_tenants(engine) as (url, own, yours):
        turn = {"messages": HISTORY}
        for target, *named in ((CHAT, ("X-Program-ID", "a")), (CHAT, ("X-Session-ID", "a")), (f"/p/a{CHAT}",)):
            refused = await post(url, target, turn, yours, ASKS, *named)
            assert (refused.status, refused.error["code"]) == (403, "other_tenant"), target
        assert (len(engine.prompts), engine.renders) == (1, 0)
        parent = ("X-Program-Parent", "a")
        for program_id, headers in (
            ("b", ()),
            ("a ", ()),
            ("A", ()),
            ("c", (parent,)),
            ("d", (("X-Program-Tenant", "me"),)),
        ):
            await post(url, CHAT, turn, yours, ASKS, ("X-Program-ID", program_id), *headers)
        assert len(engine.prompts) > 3
        assert all(prompt == engine.render(turn) for prompt in engine.prompts[1:])
        assert engine.renders == 0
        assert await prefixes(url, "b", yours) == ["first"]
        assert (await exchange(url, "GET", "/programs/a/trajectory", [yours])).status == 404
        engine.next = 10
        assert (await ask(url, HISTORY, "a", own, ASKS)).status == 200
        assert engine.prompts[-1] == OWN


async def test_name_of_an_ended_program_supplies_nothing_of_it() -> None:
    """Whoever takes it next begins with nothing, and its first owner, too."""
    engine = JoiningEngine()
    async with two_tenants(engine) as (url, own, yours):
        assert (await exchange(url, "DELETE", "/programs/a", [yours])).json()["released"] is False
        assert (await exchange(url, "DELETE", "/programs/a", [own])).json()["released"] is True
        for key in (yours, own):
            assert (await ask(url, HISTORY, "a", key, ASKS)).status == 200
            assert engine.prompts[-1] == engine.render({"messages": HISTORY})
            assert await prefixes(url, "a", key) == ["first"]
            await exchange(url, "DELETE", "/programs/a", [key])
        assert engine.renders == 0


NONSENSE = (
    "",
    "0",
    "a",
    "supply,supply",
    "supply;q=1",
    "supply\tx",
    "*",
    "null",
    "{}",
    "supply" * 500,
    "\xff\xfe",
    "s\xfcpply",
)


@pytest.mark.parametrize("word", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_asks_for_nothing(word: str) -> None:
    """The turn goes as it came; with `supply` for all it says no."""
    engine = JoiningEngine()
    async with two_tenants(engine) as (url, own, yours):
        for program_id, key in (("a", own), ("b", yours)):
            answer = await ask(url, HISTORY, program_id, key, ("X-Program-Prefix", word))
            assert answer.status == 200
            assert engine.prompts[-1] == engine.render({"messages": HISTORY})
        assert engine.renders == 0


async def test_huge_value_costs_nobody_else_anything() -> None:
    """It is more than a head may have, and refused; the turns of others go on exactly meanwhile."""
    engine = JoiningEngine()
    async with two_tenants(engine) as (url, own, yours):
        refused = await ask(url, HISTORY, "b", yours, ("X-Program-Prefix", "supply" * 100_000))
        assert refused.status in (400, 431)
        assert len(engine.prompts) == 1
        assert (await ask(url, HISTORY, "a", own, ASKS)).status == 200
        assert engine.prompts[-1] == OWN
