"""Real engines for the whole session, the proxy as a process in front of them, and a real Docker engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx2
import pytest
import pytest_asyncio

from benchmarks.engine_kinds import KINDS
from benchmarks.environments import RealEngineError
from benchmarks.processes import Server, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig, ensure_model
from tests.loopback import free_ports
from tests.real.client_runner import ClientRunner, ensure_clients
from tests.real.docker_engine import DockerEngine, DockerEngineError, ensure_docker, import_busybox_image
from tests.real.redis_server import ensure_redis
from tests.real.support import until_all_up
from thunderagent.backends.kv_events import KvEventsEndpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import NoReturn

    RunProxy = Callable[..., AbstractAsyncContextManager[Server]]

HIDDEN_SIZE = 256
LAYERS = 4
MAX_MODEL_LEN = 4096
POOL_BLOCKS = 256
MAX_SEQS = 8  # so that few requests fill the engine
IN_ONE = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),)
"""Makes the scheduler and the worker of a vLLM one process: each imports all anew, nine seconds of a processor."""

PUBLISHING_BLOCKS = 160  # which three programs exceed
SGLANG_TOKENS = 6000
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] or '' }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""As most have it: each message ends with the model's end token, and something follows."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here. The time limit is for the test alone: the set-up may install vLLM, and starts engines."""
    for item in items:
        if "tests/real/" in item.path.as_posix():
            item.add_marker(pytest.mark.real)
            if item.get_closest_marker("timeout") is None:  # otherwise a file's own limit would be overridden
                limit_s = 300 if item.get_closest_marker("nightly") is None else 900
                item.add_marker(pytest.mark.timeout(limit_s, func_only=True))


@pytest.fixture(scope="session")
def vllm(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Make vLLM's environment and the model; the first time takes some minutes and is announced."""
    _install("vllm", require_real, pytestconfig)


@pytest.fixture(scope="session")
def sglang(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Make SGLang's environment and the model; the first time takes some minutes and is announced."""
    _install("sglang", require_real, pytestconfig)


@pytest.fixture(scope="session")
def redis_installed(require_real: Callable[[str], NoReturn]) -> None:
    """Install Redis before a test whose time is limited."""
    ensure_redis(require_real)


@pytest.fixture(scope="session")
def clients(
    require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientRunner]:
    """Run scripts of the clients for Python; the first time their environment takes a minute and is announced."""
    try:
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            python = ensure_clients()
    except RealEngineError as error:
        require_real(f"no clients: {error}")
    with ClientRunner(python, tmp_path_factory.mktemp("clients")) as runner:
        yield runner


def _install(name: str, require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    kind = KINDS[name]
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            kind.ensure_environment()
        ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=MAX_MODEL_LEN, kind=kind)
    except RealEngineError as error:
        require_real(f"no {name}: {error}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(vllm: None, request: pytest.FixtureRequest) -> AsyncIterator[tuple[RealEngine, RealEngine]]:
    """Run two engines, started at the same time. Their logs stay if a test failed."""
    first, second = (RealEngine(_engine_config(port)) for port in free_ports(2))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(first.__aenter__())
            group.create_task(second.__aenter__())
        yield first, second
    finally:
        await asyncio.gather(first.stop(), second.stop())
    if not request.session.testsfailed:
        for engine in (first, second):
            engine.log_path.unlink(missing_ok=True)


@pytest.fixture
def engine(engines: tuple[RealEngine, RealEngine]) -> RealEngine:
    """One of the engines."""
    return engines[0]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def publishing(vllm: None) -> AsyncIterator[tuple[RealEngine, KvEventsEndpoint]]:
    """Run an engine that serves one request at a time, and publishes its KV events."""
    port, events_port, replay_port = free_ports(3)
    # vLLM connects to an address without a * instead of listening on it.
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    flags = ("--max-num-seqs", "1", "--kv-events-config", json.dumps(kv_events))
    config = replace(_engine_config(port), pool_blocks=PUBLISHING_BLOCKS, extra_args=flags)
    addresses = (f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")
    async with RealEngine(config) as engine:
        yield engine, KvEventsEndpoint("r", *addresses)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cacheless(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealEngine]:
    """Run an engine without prefix caching, which does not report cached tokens; its tokens are pieces of text."""
    template = tmp_path_factory.mktemp("cacheless") / "template.jinja"
    config = text_config("vllm", template, "--no-enable-prefix-caching", tells_cached=False)
    async with RealEngine(config) as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_engine(sglang: None) -> AsyncIterator[RealEngine]:
    """Run an SGLang that serves one request at a time, and keeps tagged memory."""
    async with RealEngine(sglang_config()) as engine:
        yield engine


@pytest.fixture(scope="session")
def run_proxy(tmp_path_factory: pytest.TempPathFactory) -> RunProxy:
    """Run `thunderagent serve OPTIONS` in front of engines: `async with run_proxy(engines, *options) as proxy`."""

    @asynccontextmanager
    async def run(engines: tuple[RealEngine, ...], *options: str) -> AsyncIterator[Server]:
        backends = ",".join(engine.url for engine in engines)
        # On a busy machine with few cores the engine's /metrics now and then takes seconds while its streams flow.
        polling = ("--poll-interval-s", "0.25", "--poll-deadline-s", "20")
        command = ("serve", "--port", "0", "--backends", backends, *polling, *options)
        log_path = tmp_path_factory.mktemp("proxy") / "proxy.log"
        async with thunderagent(*command, log_path=log_path) as proxy, httpx2.AsyncClient(timeout=60) as client:
            await until_all_up(client, proxy.url)
            yield proxy

    return run


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def proxy(engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy) -> AsyncIterator[Server]:
    """Run a proxy in front of both engines."""
    exact = ("--policy-arg", "reserve_tokens=0")  # a claim is a context
    async with run_proxy(engines, *exact) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def proxy_of_one(engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy) -> AsyncIterator[Server]:
    """Run a proxy in front of the first engine alone, so that two requests reach the same engine."""
    async with run_proxy(engines[:1], "--policy", "thunderagent") as server:
        yield server


@pytest.fixture(scope="module")
def docker_engine(require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """One engine for all tests of a file, with an image."""
    try:
        ensure_docker()
        with DockerEngine() as engine:
            import_busybox_image(engine)
            yield engine
    except DockerEngineError as error:
        require_real(f"no Docker engine: {error}")


def _engine_config(port: int) -> RealEngineConfig:
    return RealEngineConfig(
        hidden_size=HIDDEN_SIZE,
        layers=LAYERS,
        pool_blocks=POOL_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        port=port,
        core=None,
        extra_args=("--max-num-seqs", str(MAX_SEQS), "--enable-scale-out"),  # which has /inference/v1/generate
        extra_variables=IN_ONE,
    )


def sglang_config(*extra_args: str) -> RealEngineConfig:
    """Return an SGLang that serves one request at a time, and keeps tagged memory."""
    return replace(
        _engine_config(free_ports(1)[0]),
        engine="sglang",
        pool_blocks=SGLANG_TOKENS,
        block_size=1,
        extra_args=("--max-running-requests", "1", "--enable-session-radix-cache", *extra_args),
        extra_variables=(),
    )


def text_config(kind: str, template: Path, *flags: str, tells_cached: bool = True) -> RealEngineConfig:
    """Return an engine of a kind whose tokens are pieces of text; its chat template is written to a file."""
    template.write_text(TEMPLATE)
    is_vllm = kind == "vllm"
    return replace(
        _engine_config(free_ports(1)[0]),
        engine=kind,
        pool_blocks=POOL_BLOCKS if is_vllm else 32 * POOL_BLOCKS,
        block_size=32 if is_vllm else 1,
        is_text=True,
        ready_timeout_s=600,
        tells_cached=tells_cached,
        extra_args=("--chat-template", str(template), *flags, *(("--enable-scale-out",) if is_vllm else ())),
        extra_variables=IN_ONE if is_vllm else (),
    )
