"""What the resolver makes of a name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.unit.backends.discovery.fakes import following
from thunderagent.backends.discovery.base import Wanted
from thunderagent.backends.discovery.dns import DnsSource, Resolver, SystemResolver
from thunderagent.errors import DiscoveryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class Scripted:
    """A resolver with scripted answers; the last one is repeated."""

    answers: list[Sequence[str] | Exception]
    names: list[str] = field(default_factory=list)

    async def addresses(self, name: str) -> Sequence[str]:
        self.names.append(name)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def source(resolver: Resolver, url: str = "dns+http://engines:8000") -> DnsSource:
    return DnsSource(url, interval_s=0.001, resolver=resolver)


async def test_each_address_is_a_replica_once() -> None:
    """IPv6 is in brackets, link-local addresses are left out, the order is fixed."""
    resolver = Scripted([["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2", "fe80::1%3"]])
    async with following(source(resolver, "dns+http://engines:8000#dp=2")) as heard:
        await heard.until(lambda: heard.sets)
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert heard.sets[0] == [Wanted(url, 2) for url in urls]
    assert set(resolver.names) == {"engines"}


@pytest.mark.parametrize(
    "answer",
    [OSError("gone"), UnicodeError("label too long"), [], ["fe80::1%1"]],
    ids=["error", "name", "none", "link"],
)
async def test_a_lookup_that_fails_or_finds_nothing_tells_no_set(answer: Sequence[str] | Exception) -> None:
    async with following(source(Scripted([["10.0.0.1"], answer]))) as heard:
        await heard.until(lambda: len(heard.failures) > 2)
        assert heard.sets == [[Wanted("http://10.0.0.1:8000")]]
        assert "engines" in heard.failures[0]


async def test_a_lookup_that_hangs_is_given_up() -> None:
    """Otherwise it would hang for ever."""

    class Silent:
        async def addresses(self, name: str) -> Sequence[str]:
            await asyncio.Event().wait()
            return [name]

    async with following(DnsSource("dns+http://a:1", interval_s=0.001, resolver=Silent(), limit_s=0.01)) as heard:
        await heard.until(lambda: len(heard.failures) > 1)
    assert heard.failures[0] == "no answer within 0.01 s"


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1",
        "dns+https://a:1",
        "dns+http://",
        "dns+http://a:x",
        "dns+http://me@a:1",
        "dns+http://a:1/path",
        "dns:a",
    ],
)
def test_invalid_name_is_refused(url: str) -> None:
    with pytest.raises(DiscoveryError):
        DnsSource(url, interval_s=1.0)


async def test_the_system_knows_its_own_name() -> None:
    found = await SystemResolver().addresses("localhost")
    assert set(found) & {"127.0.0.1", "::1"}
    is_local: Callable[[str], bool] = {"127.0.0.1", "::1"}.__contains__
    assert all(map(is_local, found))
