"""Supplies chats with exact prompts: what is known of earlier turns, and the engine's part of it.

`reading/exact_prefix.py` says what is exact. Here it is remembered by program what a turn's tokens were, within a bound
that tenants share, and the turn's own engine is asked to render, twice, while the turn holds its lease. What
fails, or takes too long, leaves the turn as its client sent it.
"""

# interpreted: as `reading/exact_prefix.py`

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec
from multidict import CIMultiDict, istr
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from thunderagent.errors import ReplicaError
from thunderagent.leases import Lease
from thunderagent.programs.messages import Decision, Event, Release
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.reading.capture import CHAT, Captured
from thunderagent.proxy.reading.exact_prefix import Chat, Known, Prefix, Refused, answer_in, answer_of, exact
from thunderagent.proxy.reading.json_splice import put_value
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.rollouts.records import share_name
from thunderagent.rollouts.tokens import UNREADABLE, text_of_ids, text_of_list

PREFIX_HEADER: Final = istr("X-Program-Prefix")
"""`supply`, or anything else for not, of this program's turns."""

RENDER_S: Final = 5.0
"""How long an engine may take to render."""

MOST_KNOWN_COUNT: Final = 16
"""Turns of a program that are remembered: the ends of so many conversations."""

MEMORY_RATIO: Final = 0.125
"""The part of the memory for rollouts that these take, beside it."""


class _Way:
    """How an engine kind renders a chat, and takes its tokens instead."""

    def __init__(self, path: str, listed: str, member: str, spelt: bytes) -> None:
        self.path = path
        self.listed = listed
        """The member of its answer that lists the tokens."""
        self.member = member
        self.spelt = spelt
        """Its value, with a place for the tokens."""


_WAYS: Final[Mapping[str, _Way]] = {
    "vllm": _Way(f"{CHAT}/render", "token_ids", "kv_transfer_params", b'{"prompt_token_ids":[%b]}'),
    "sglang": _Way("/tokenize", "tokens", "input_ids", b"[%b]"),
}


class Programs(Protocol):
    """Reports the ends of programs."""

    def observe(self, observer: Callable[[Event, Sequence[Decision]], None], *about: type) -> Callable[[], None]:
        """Call `observer` with each event that it is `about`; return a function that ends that."""


class ExactPrefixes:
    """What is known of programs' turns, to make the prompts of their next ones."""

    def __init__(self, client: ReplicaClient, programs: Programs, way: Literal["supply", "asked"], bytes_: int) -> None:
        """Ask engines with `client`; for all programs, or for those that ask. Remember no more than so many bytes."""
        self._client = client
        self._for_all = way == "supply"
        self._max_bytes = bytes_
        self._known: OrderedDict[str, _OfProgram] = OrderedDict()
        """By program, the last used one last."""
        self._sums: dict[str, int] = {}
        """What each tenant has."""
        self.size_bytes = 0
        self.counts: dict[Prefix, int] = {}
        programs.observe(self._heard, Release)

    def supplies(self, headers: Mapping[str, str]) -> bool:
        """Return whether a turn's prompt is to be supplied."""
        said = headers.get(PREFIX_HEADER)
        return self._for_all if said is None else said.strip().lower() == "supply"

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        for decision in decisions:
            if type(decision) is Release:
                self._forget(decision.program_id)

    # --- before a turn

    def check(self, kind: str, path: str) -> None:
        """Raise `Refused` for an API of an engine that takes no tokens beside its messages."""
        if path != CHAT or kind not in _WAYS:
            raise Refused("unsupported")

    async def supply(self, chat: Chat, kind: str, granted: Lease, headers: CIMultiDict[str], body: bytes) -> Supplied:
        """Return the body with the exact prompt. Raises `Refused` if it goes as it is."""
        way, program_id = _WAYS[kind], granted.program_id or ""
        of_program = self._known.get(program_id)
        if of_program is None or of_program.generation != granted.generation:
            raise Refused("first")
        known, count = of_program.find(chat)
        self._known.move_to_end(program_id)
        if not known.ends_itself:
            raise Refused("cut")
        asked = chat.until(count + 1)
        try:
            async with asyncio.timeout(RENDER_S):
                history = await self._rendered(way, granted, headers, asked)
                whole = await self._rendered(way, granted, headers, chat.all(body))
        except (ReplicaError, TimeoutError, *UNREADABLE):
            raise Refused("engine") from None
        prompt = exact(known, history, whole)
        if prompt == whole:
            raise Refused("same")
        edited = await read_aside(partial(put_value, body, way.member, way.spelt % prompt[:-1]), len(body))
        return Supplied(edited, prompt, whole)

    async def _rendered(self, way: _Way, granted: Lease, headers: CIMultiDict[str], body: bytes) -> bytes:
        """Return the tokens of a chat. Raises `Refused` if the engine does not say them, and `ReplicaError`."""
        headers = CIMultiDict(headers)
        headers["Accept-Encoding"] = "identity"
        replica_id, client = granted.replica_id, self._client
        answer = await client.send(replica_id, granted.url, "POST", way.path, headers, body, may_repeat=True)
        try:
            read = await client.read(replica_id, answer)
        finally:
            answer.close()
        ids = msgspec.json.decode(read, type=dict[str, Any]).get(way.listed) if answer.status == 200 else None
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            raise Refused("engine")
        return text_of_ids(ids)

    # --- after it

    def ended(self, chat: Chat, tenant: str, granted: Lease, captured: Captured, answer: Answered) -> Prefix | None:
        """Remember a turn that its client got whole; return whether the prompt that was supplied was taken."""
        supplied, prompt, output, finish = answer.supplied, b"", b"", ""
        try:
            prompt = text_of_list(captured.prompt_listed) if captured.prompt_listed else captured.prompt or b""
            if list(captured.outputs) == [0]:
                read = captured.outputs[0]
                output, finish = read.text + (text_of_list(read.listed) if read.listed else b""), read.finish
        except UNREADABLE:
            output = b""
        was_taken = supplied is not None and prompt == supplied.prompt
        if output and answer.counts == (prompt.count(b","), output.count(b",")):
            rendered = supplied.whole if supplied is not None and was_taken else prompt
            said = answer_of(answer.body, streams=answer.streams)
            if said:
                self._remember(granted, tenant, (chat.digest, said), Known(chat, prompt, output, rendered, finish))
        if supplied is None:
            return None
        return "supplied" if was_taken else "engine"

    def _remember(self, granted: Lease, tenant: str, key: tuple[bytes, bytes], known: Known) -> None:
        program_id = granted.program_id or ""
        of_program = self._known.get(program_id)
        if of_program is None or of_program.generation != granted.generation:
            self._forget(program_id)
            share = share_name(tenant, self._sums)
            of_program = self._known[program_id] = _OfProgram(share, granted.generation)
        self._known.move_to_end(program_id)
        self._count(of_program.tenant, of_program.add(key, known))
        while self.size_bytes > self._max_bytes:
            most = max(self._sums, key=self._sums.__getitem__)
            self._forget(next(each for each, one in self._known.items() if one.tenant == most))

    def _forget(self, program_id: str) -> None:
        of_program = self._known.pop(program_id, None)
        if of_program is not None:
            self._count(of_program.tenant, -of_program.size_bytes)

    def _count(self, tenant: str, change_bytes: int) -> None:
        self.size_bytes += change_bytes
        self._sums[tenant] = self._sums.get(tenant, 0) + change_bytes
        if not self._sums[tenant]:
            del self._sums[tenant]

    def count(self, prefix: Prefix) -> None:
        """Count what became of a turn's prompt."""
        self.counts[prefix] = self.counts.get(prefix, 0) + 1


class Supplied:
    """A body with an exact prompt, that prompt, and what the engine would have rendered."""

    __slots__ = ("body", "prompt", "whole")

    def __init__(self, body: bytes, prompt: bytes, whole: bytes) -> None:
        """Keep them."""
        self.body = body
        self.prompt = prompt
        self.whole = whole


class Answered:
    """The answer to a turn as its client got it, and what was supplied with the turn."""

    __slots__ = ("body", "counts", "streams", "supplied")

    def __init__(
        self, body: bytes, counts: tuple[int | None, int | None], supplied: Supplied | None, *, streams: bool
    ) -> None:
        """Keep it, and how many tokens the engine counted in prompt and output."""
        self.body = body
        self.counts = counts
        self.supplied = supplied
        self.streams = streams


class _OfProgram:
    """The turns of a program that are known, by the digests of their messages and answer, the last one last."""

    __slots__ = ("_known", "generation", "size_bytes", "tenant")

    def __init__(self, tenant: str, generation: int) -> None:
        self.tenant = tenant
        """Whose share of the memory it takes."""
        self.generation = generation
        self.size_bytes = 0
        self._known: OrderedDict[tuple[bytes, bytes], Known] = OrderedDict()

    def find(self, chat: Chat) -> tuple[Known, int]:
        """Return the turn that a chat goes on from, and how many messages it had; of several that with most.

        Raises `Refused` if there is none, or if its answer came back otherwise.
        """
        asked = {messages for messages, _ in self._known}
        for count in range(len(chat.messages) - 1, 0, -1):
            if chat.digests[count] in asked and chat.messages[count].get("role") == "assistant":
                known = self._known.get((chat.digests[count], answer_in(chat.messages[count])))
                if known is None:
                    raise Refused("edited")
                return known, count
        raise Refused("first")

    def add(self, key: tuple[bytes, bytes], known: Known) -> int:
        """Add one; return by how much this takes more."""
        before = self.size_bytes
        earlier = self._known.pop(key, None)
        self._known[key] = known
        self.size_bytes += known.size_bytes - (earlier.size_bytes if earlier is not None else 0)
        if len(self._known) > MOST_KNOWN_COUNT:
            self.size_bytes -= self._known.popitem(last=False)[1].size_bytes
        return self.size_bytes - before


class PrefixCollector(Collector):
    """Reports what became of prompts."""

    def __init__(self, counts: Mapping[Prefix, int]) -> None:
        """Read `counts`, as they are then."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        found = CounterMetricFamily(
            "thunderagent_rollout_prefixes",
            "Turns whose exact prompt was to be supplied, by what became of that.",
            labels=("prefix",),
        )
        for prefix, count in sorted({"supplied": 0, **self._counts}.items()):
            found.add_metric((prefix,), count)
        yield found
