"""What stands before the engines of `scripts/bench peers`: nothing, a peer's router, or our proxy.

An arm opens fresh engines and itself, so that no run profits from the one before, and yields where turns go and how
programs say who they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks import dynamo
from benchmarks.environments import cache_dir
from benchmarks.load import EndSignal
from benchmarks.processes import thunderagent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

DIRECT: Final = "direct"


@dataclass(frozen=True)
class Setup:
    """The engines of a run and what is the same for all arms."""

    kind: str  # mocker, or embedded in our own proxy
    count: int
    kv_tokens: int
    told_ratio: float = 1.0
    """What our proxy is told of each engine's pool, over the pool; engines that tell it themselves need no telling."""
    engine_core: int | None = None
    code: Path | None = None
    """The folder whose package our proxy runs; by default this one's."""

    @property
    def mockers(self) -> dynamo.MockerConfig:
        """The settings of Dynamo's engines."""
        return dynamo.MockerConfig(kv_tokens=self.kv_tokens, core=self.engine_core)


@dataclass(frozen=True)
class Target:
    """Where turns go; `is_ours` says that it has the proxy's own routes."""

    url: str
    program_header: str = "X-Program-ID"
    end_signal: EndSignal | None = None
    is_ours: bool = False


class Arm:
    """One way to serve; `kinds` are the engines that it can have."""

    kinds: frozenset[str] = frozenset({"mocker"})

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        """Return the version of what stands before the engines."""
        raise NotImplementedError

    def open(self, setup: Setup) -> contextlib.AbstractAsyncContextManager[Target]:
        """Run engines and this arm during the block."""
        raise NotImplementedError


class DynamoArm(Arm):
    """Dynamo's own routers; its round robin is what passes through nothing of ours or theirs."""

    _ROUTERS: Final = {
        DIRECT: dynamo.Router.ROUND_ROBIN,
        "dynamo-kv": dynamo.Router.KV,
        "dynamo-thunderagent": dynamo.Router.THUNDERAGENT,
    }
    NAMES: Final = tuple(_ROUTERS)

    def version(self) -> str:
        """Return the version of the package."""
        return f"ai-dynamo {dynamo.VERSION}"

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run all mockers behind one frontend."""
        router = self._ROUTERS[self.name]
        says_end = EndSignal.FINAL_TURN if router is dynamo.Router.THUNDERAGENT else None
        async with dynamo.cluster(setup.mockers, setup.count, router) as url:
            yield Target(url, "X-Dynamo-Session-ID", says_end)


class OurArm(Arm):
    """Our proxy under a policy, written `name` or `name:key=value:key=value`."""

    kinds = frozenset({"mocker", "embedded"})

    def version(self) -> str:
        """Return the version of the package."""
        return f"thunderagent {version('thunderagent')}"

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run a frontend for each mocker, and the proxy before them; or the proxy with engines of its own."""
        async with contextlib.AsyncExitStack() as stack:
            urls: Sequence[str] = ()
            if setup.kind == "mocker":
                urls = await stack.enter_async_context(dynamo.frontends(setup.mockers, setup.count))
            log = cache_dir() / "logs" / "peers-proxy.log"
            words = serve_words(self.name, setup, urls)
            server = await stack.enter_async_context(thunderagent(*words, log_path=log, code=setup.code))
            yield Target(server.url, end_signal=EndSignal.RELEASE, is_ours=True)


def serve_words(policy: str, setup: Setup, urls: Sequence[str]) -> list[str]:
    """Return the arguments of `thunderagent` for a policy before engines; without URLs it starts simulated ones."""
    name, *settings = policy.split(":")
    words = ["serve", "--port", "0", "--policy", name]
    words += chain.from_iterable(("--policy-arg", setting) for setting in settings)
    if not urls:
        return [*words, "--embedded-engines", str(setup.count), "--embedded-kv-tokens", str(setup.kv_tokens)]
    told = round(setup.kv_tokens * setup.told_ratio)
    # On a busy machine with few cores an engine now and then takes seconds to answer a poll.
    return [*words, "--backends", ",".join(urls), "--capacity-tokens", str(told), "--poll-deadline-s", "20"]


async def replicas(url: str) -> list[dict[str, Any]]:
    """Return what our proxy says of its replicas: what it learned of them."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/replicas") as answer:
        return list((await answer.json())["replicas"])


def find_arm(name: str) -> Arm:
    """Return the arm of that name; a name that no peer has is a policy of ours."""
    return DynamoArm(name) if name in DynamoArm.NAMES else OurArm(name)
