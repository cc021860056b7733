"""What stands before the engines of `scripts/bench peers`: nothing, a peer's router, or our proxy.

An arm opens fresh engines and itself, so that no run profits from the one before, and yields where turns go and how
programs say who they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks import dynamo
from benchmarks.engine_kinds import MODEL_NAME, Vllm
from benchmarks.environments import RealEngineError, cache_dir, ensure_environment, made_once, run_logged
from benchmarks.load import EndSignal
from benchmarks.processes import running, tail, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig
from thunderagent.provision.base import free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

DIRECT: Final = "direct"
PLUGIN: Final = "plugin"
AGENTINFER: Final = "agentinfer"


@dataclass(frozen=True)
class Setup:
    """The engines of a run and what is the same for all arms."""

    kind: str  # mocker, vllm, or embedded in our own proxy
    count: int
    kv_tokens: int
    told_ratio: float = 1.0
    """What our proxy is told of each engine's pool, over the pool; engines that tell it themselves need no telling."""
    engine_core: int | None = None
    is_text: bool = False
    """Whether prompts are text that others bring."""
    code: Path | None = None
    """The folder whose package our proxy runs; by default this one's."""

    @property
    def mockers(self) -> dynamo.MockerConfig:
        """The settings of Dynamo's engines."""
        return dynamo.MockerConfig(kv_tokens=self.kv_tokens, core=self.engine_core, is_text=self.is_text)


@dataclass(frozen=True)
class Target:
    """Where turns go; `is_ours` says that it has the proxy's own routes."""

    url: str
    program_header: str = "X-Program-ID"
    end_signal: EndSignal | None = None
    is_ours: bool = False
    engine_urls: str = ""
    """Where strangers send, past what stands before the engines; empty where nobody can."""


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


@contextlib.asynccontextmanager
async def engines(setup: Setup, **settings: Any) -> AsyncIterator[list[str]]:
    """Run fresh engines that each have a URL; a real one has stock flags and the settings besides."""
    async with contextlib.AsyncExitStack() as stack:
        if setup.kind == "mocker":
            yield await stack.enter_async_context(dynamo.frontends(setup.mockers, setup.count))
            return
        real = RealEngineConfig(core=setup.engine_core, tells_cached=False, **settings)
        blocks = setup.kv_tokens // real.block_size
        configs = [replace(real, port=free_port(), pool_blocks=blocks) for _ in range(setup.count)]
        async with asyncio.TaskGroup() as group:
            for config in configs:
                group.create_task(stack.enter_async_context(RealEngine(config)))
        yield [config.url for config in configs]


def plugin_settings() -> dict[str, Any]:
    """Return the settings of an engine that has our scheduler for vLLM, from this checkout."""
    names = (
        ("--scheduler-cls", "thunderagent_vllm.scheduler.Scheduler"),
        ("--middleware", "thunderagent_vllm.route.Route"),
    )
    folder = Path(__file__).parents[1] / "packages" / "thunderagent-vllm"
    return {"extra_args": tuple(chain.from_iterable(names)), "extra_variables": (("PYTHONPATH", str(folder)),)}


class DirectArm(Arm):
    """Nothing: turns go to the engines in turn, by Dynamo's frontend where the engines are its own."""

    kinds = frozenset({"mocker", "vllm"})

    def version(self) -> str:
        """Return what is there: only engines."""
        return "none"

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run engines."""
        if setup.kind == "mocker":
            async with dynamo.cluster(setup.mockers, setup.count, dynamo.Router.ROUND_ROBIN) as url:
                yield Target(url)
        else:
            async with engines(setup) as urls:
                yield Target(",".join(urls), engine_urls=",".join(urls))


class PluginArm(Arm):
    """Our scheduler inside vLLM, and nothing before it."""

    kinds = frozenset({"vllm"})

    def version(self) -> str:
        """Return the version of this checkout's package."""
        return "thunderagent-vllm of this checkout"

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run engines with it."""
        async with engines(setup, **plugin_settings()) as urls:
            yield Target(",".join(urls), "X-Session-ID", engine_urls=",".join(urls))


class RouterArm(Arm):
    """A router with a process of its own, from PyPI, before engines that each have a URL."""

    # Its bodies have fields that Dynamo's frontends refuse.
    _VLLM_ROUTER: Final = ("vllm_router", "vllm-router==0.1.17", ("-m", "vllm_router.launch_router"), {"vllm"})
    _SMG: Final = ("smg", "smg==1.13.0", ("-m", "smg", "launch"), {"mocker", "vllm"})
    _OPTIONS: Final[Mapping[str, tuple[Any, str, tuple[str, ...]]]] = {
        "vllm-router-program": (_VLLM_ROUTER, "X-Session-ID", ("--enable-program-scheduling",)),
        "vllm-router-sticky": (_VLLM_ROUTER, "X-Session-ID", ("--policy", "sticky_least_loaded")),
        "vllm-router-cache": (_VLLM_ROUTER, "X-Session-ID", ("--policy", "cache_aware")),
        "smg": (_SMG, "X-SMG-Routing-Key", ("--policy", "manual", "--assignment-mode", "min_load")),
    }
    NAMES: Final = tuple(_OPTIONS)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        (self._package, self._requirement, self._start, kinds), self._header, self._words = self._OPTIONS[name]
        self.kinds = frozenset(kinds)

    def version(self) -> str:
        """Return the package and its version."""
        return str(self._requirement).replace("==", " ")

    def words(self, urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
        """Return its arguments for its interpreter."""
        hosts = ("--host", "127.0.0.1", "--port", str(port))
        metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port))
        return [*self._start, "--worker-urls", *urls, *hosts, *metrics, "--log-level", "error", *self._words]

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run engines and the router."""
        python = ensure_environment(self._package, [self._requirement], "some 50 MB")
        port, log = free_port(), cache_dir() / "logs" / f"peers-{self.name}.log"
        async with engines(setup) as urls:
            command = [str(python), *self.words(urls, port, free_port())]
            async with running(*command, log_path=log) as process:
                url = f"http://127.0.0.1:{port}"
                await _until_it_answers(f"{url}/v1/chat/completions", process, log)
                yield Target(url, self._header, engine_urls=",".join(urls))


class AgentInferArm(Arm):
    """AgentInfer: a scheduler inside vLLM, in vLLM's environment, from a folder of its own."""

    kinds = frozenset({"vllm"})
    REQUIREMENT: Final = "agentinfer==0.2.0"
    _CORE: Final = "agentinfer.agentcache.core"

    def version(self) -> str:
        """Return the package and its version."""
        return self.REQUIREMENT.replace("==", " ")

    def engine_words(self) -> list[str]:
        """Return vLLM's options for it; `vllm serve` fails in vLLM's package for CPUs, which schedules in step."""
        return [
            *("--no-async-scheduling", "--scheduler-cls", f"{self._CORE}.scheduler.AgentCacheSyncSchedulerBridge"),
            *("--middleware", f"{self._CORE}.api_adapter.AgentCacheIdentityMiddleware"),
            *("--middleware", f"{self._CORE}.api_adapter.AgentCacheLifecycleMiddleware"),
            *("--additional-config", '{"agentcache":{}}'),
        ]

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run one engine with it; it has no part that chooses between engines."""
        if setup.count > 1:
            raise RealEngineError("AgentInfer schedules inside one engine; it has no router")
        python = Vllm().ensure_environment()

        def install(folder: Path) -> None:
            pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--no-deps", "--target", str(folder)]
            run_logged([*pip, self.REQUIREMENT], folder.with_name(folder.name + ".log"))

        folder = made_once("agentinfer", [self.REQUIREMENT], install)
        with TemporaryDirectory(prefix="agentinfer-") as sockets:
            variables = {"PYTHONPATH": str(folder), "AGENTCACHE_VLLM_LIFECYCLE_SOCKET": f"{sockets}/lifecycle"}
            words = tuple(self.engine_words())
            async with engines(setup, extra_args=words, extra_variables=tuple(variables.items())) as urls:
                yield Target(urls[0], "X-Session-ID", engine_urls=urls[0])


async def _until_it_answers(url: str, process: Process, log: Path) -> None:
    """Wait until a turn is answered; raise RealEngineError if the router ends, or does not in a minute."""
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "w0"}], "max_tokens": 1}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        said = ""
        for _ in range(120):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(url, json=body) as answer:
                    if answer.status == 200:
                        return
                    said = (await answer.text())[:500]
            if process.returncode is not None:
                break
            await asyncio.sleep(0.5)
    raise RealEngineError(f"the router does not answer turns: {said}; its log ends:\n{tail(log)}")


class DynamoArm(Arm):
    """Dynamo's own routers, before its own engines."""

    _ROUTERS: Final = {
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
    """Our proxy under a policy, `name` or `name:key=value:…`; `+plugin` after it puts our scheduler in its engines."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._policy, _, added = name.partition("+")
        self._in_engine = plugin_settings() if added == PLUGIN else {}
        self.kinds = frozenset({"vllm"} if self._in_engine else {"mocker", "vllm", "embedded"})

    def version(self) -> str:
        """Return the version of the package."""
        return f"thunderagent {version('thunderagent')}"

    @contextlib.asynccontextmanager
    async def open(self, setup: Setup) -> AsyncIterator[Target]:
        """Run engines that each have a URL, and the proxy before them; or the proxy with engines of its own."""
        async with contextlib.AsyncExitStack() as stack:
            urls: Sequence[str] = ()
            if setup.kind != "embedded":
                urls = await stack.enter_async_context(engines(setup, **self._in_engine))
            log = cache_dir() / "logs" / "peers-proxy.log"
            words = serve_words(self._policy, setup, urls)
            server = await stack.enter_async_context(thunderagent(*words, log_path=log, code=setup.code))
            yield Target(server.url, end_signal=EndSignal.RELEASE, is_ours=True, engine_urls=",".join(urls))


def serve_words(policy: str, setup: Setup, urls: Sequence[str]) -> list[str]:
    """Return the arguments of `thunderagent` for a policy before engines; without URLs it starts simulated ones."""
    name, *settings = policy.split(":")
    words = ["serve", "--port", "0", "--policy", name]
    words += chain.from_iterable(("--policy-arg", setting) for setting in settings)
    if not urls:
        return [*words, "--embedded-engines", str(setup.count), "--embedded-kv-tokens", str(setup.kv_tokens)]
    # On a busy machine with few cores an engine now and then takes seconds to answer a poll.
    words += ["--backends", ",".join(urls), "--poll-deadline-s", "20"]
    if setup.kind == "vllm" and setup.told_ratio == 1.0:  # it tells its pool itself
        return words
    return [*words, "--capacity-tokens", str(round(setup.kv_tokens * setup.told_ratio))]


async def replicas(url: str) -> list[dict[str, Any]]:
    """Return what our proxy says of its replicas: what it learned of them."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/replicas") as answer:
        return list((await answer.json())["replicas"])


def find_arm(name: str) -> Arm:
    """Return the arm of that name; a name that no peer has is a policy of ours."""
    peers: dict[str, Callable[[str], Arm]] = {
        DIRECT: DirectArm,
        PLUGIN: PluginArm,
        AGENTINFER: AgentInferArm,
        **dict.fromkeys(DynamoArm.NAMES, DynamoArm),
        **dict.fromkeys(RouterArm.NAMES, RouterArm),
    }
    return peers.get(name, OurArm)(name)
