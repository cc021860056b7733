"""Real engines for the whole session, the proxy as a process in front of them, and a real Docker engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx2
import pytest
import pytest_asyncio

from benchmarks.engine_kinds import KINDS
from benchmarks.environments import RealEngineError
from benchmarks.processes import Server, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig, ensure_model
from tests.loopback import free_ports
from tests.real.docker_engine import DockerEngine, DockerEngineError, ensure_docker, import_busybox_image
from tests.real.redis_server import ensure_redis
from tests.real.support import until_all_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import NoReturn

    RunProxy = Callable[..., AbstractAsyncContextManager[Server]]

HIDDEN_SIZE = 256
LAYERS = 4
MAX_MODEL_LEN = 4096
POOL_BLOCKS = 256
MAX_SEQS = 8  # so that few requests fill the engine


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
    )
