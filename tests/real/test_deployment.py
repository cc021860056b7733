"""The Dockerfile and the compose file as users have them: really built, started, used, stopped and removed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import httpx2
import pytest
import yaml

from tests.loopback import free_ports
from tests.real import base_image
from tests.real.base_image import BASE_IMAGE, BUILD_IMAGE, REDIS_IMAGE, make_base_images, make_redis_image
from tests.real.docker_engine import DockerEngine, DockerEngineError, ensure_docker
from tests.real.support import Json, answers_503, events, replicas, until, until_all_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

ROOT = Path(__file__).parents[2]
IMAGE = "thunderagent-test-proxy:latest"
PROJECT = "thunderagent-test"
MB = 1024 * 1024
DISK_BYTES = 2048 * MB
STREAMED_TOKENS = 600
"""A few seconds on the simulated engine."""


@pytest.fixture(scope="module")
def engine(require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """Run a Docker engine with base images."""
    try:
        ensure_docker({"docker-compose": "docker-compose", **base_image.PACKAGES})
        with DockerEngine(disk_bytes=DISK_BYTES) as engine:
            make_base_images(engine, ROOT / "pyproject.toml", ["scale"])
            make_redis_image(engine)
            yield engine
    except DockerEngineError as error:
        require_real(f"no Docker: {error}")


@pytest.fixture(scope="module")
def client(engine: DockerEngine) -> Iterator[Any]:
    """A client of the Docker library."""
    with contextlib.closing(engine.client()) as client:
        yield client


class Compose:
    """`docker-compose` on this project's file, at the tests' engine."""

    def __init__(self, engine: DockerEngine, file: str = "docker-compose.yml") -> None:
        self.port, self.second_port = free_ports(2)
        self._file = file
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "DOCKER_"))},
            "DOCKER_HOST": engine.url,
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_PROJECT_NAME": PROJECT,
            "BASE_IMAGE": BASE_IMAGE,
            "BUILD_IMAGE": BUILD_IMAGE,
            "COMPILE": "0",
            "THUNDERAGENT_IMAGE": IMAGE,
            "THUNDERAGENT_PORT": str(self.port),
            "THUNDERAGENT_PORT_2": str(self.second_port),
            "REDIS_IMAGE": REDIS_IMAGE,
        }

    def __call__(self, *arguments: str) -> str:
        """Run a command; return its output."""
        done = subprocess.run(
            ("docker-compose", "--file", self._file, *arguments),
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert done.returncode == 0, f"docker-compose {' '.join(arguments)}:\n{said}"
        return done.stdout


@pytest.fixture(scope="module")
def compose(engine: DockerEngine, client: Any) -> Compose:
    """Build the images that the compose file names."""
    compose = Compose(engine)
    compose("build")
    return compose


@pytest.fixture
async def stack(compose: Compose, client: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Run the stack; yield a client of the proxy."""
    async with (
        up(compose, client),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{compose.port}", timeout=30) as http,
    ):
        yield http


@contextlib.asynccontextmanager
async def up(compose: Compose, client: Any) -> AsyncIterator[None]:
    """Run a stack during the block. Its removal must leave nothing behind."""
    try:
        await asyncio.to_thread(compose, "up", "--detach")
        yield
    except BaseException:
        print(*(told_by(client, each) for each in client.containers(all=True)), sep="\n")
        raise
    finally:
        await asyncio.to_thread(compose, "down", "--volumes")
    assert client.containers(all=True) == []
    assert {each["Name"] for each in client.networks()} == {"bridge", "host", "none"}
    assert not client.volumes()["Volumes"]


def told_by(client: Any, found: Json) -> str:
    """Return a container's details for a failure report."""
    state = client.inspect_container(found["Id"])["State"]
    return f"{found['Names'][0]} {json.dumps(state)}\n{client.logs(found['Id'], tail=40).decode()}"


def run_in_image(client: Any, *command: str, **settings: Any) -> str:
    """Run a command in a fresh container of the image; return its output."""
    host = client.create_host_config(network_mode="none", read_only=True, cap_drop=["ALL"])
    made = client.create_container(IMAGE, list(command), entrypoint=[], host_config=host, **settings)
    try:
        client.start(made)
        status = client.wait(made, timeout=60)["StatusCode"]
        output: str = client.logs(made).decode()
    finally:
        client.remove_container(made, force=True, v=True)
    assert status == 0, output
    return output


def test_the_image_is_small_and_holds_no_tools_to_build_with(compose: Compose, client: Any) -> None:
    """It has no build tools, and runs as an unprivileged user on a read-only file system."""
    image = client.inspect_image(IMAGE)
    assert image["Config"]["User"] == "65532:65532"
    assert image["Config"]["Entrypoint"] == ["thunderagent"]
    assert image["Config"]["Cmd"] == ["serve"]
    assert image["Config"]["Healthcheck"]["Test"][0] == "CMD"
    assert list(image["Config"]["ExposedPorts"]) == ["8300/tcp"]
    assert image["Size"] - client.inspect_image(BASE_IMAGE)["Size"] < 100 * MB
    assert run_in_image(client, "thunderagent", "--version").endswith(" (interpreted)\n")
    find = "import importlib.util as u, os; print(os.getuid(), u.find_spec('pip'), u.find_spec('setuptools'))"
    assert run_in_image(client, "python3", "-c", find).split() == ["65532", "None", "None"]
    assert run_in_image(client, "sh", "-c", "ls -d /src /wheels /opt/* 2>/dev/null || true").split() == [
        "/opt/thunderagent"
    ]


@pytest.mark.nightly  # a minute of compiling
def test_the_image_that_anybody_builds_is_compiled(engine: DockerEngine, client: Any) -> None:
    """Its core is compiled, and it has no compiler."""
    arguments = {"BASE_IMAGE": BASE_IMAGE, "BUILD_IMAGE": BUILD_IMAGE}
    log = list(client.build(path=str(ROOT), tag=IMAGE, buildargs=arguments, rm=True, forcerm=True, decode=True))
    assert "error" not in log[-1], log[-1]
    assert run_in_image(client, "thunderagent", "--version").endswith(" (compiled)\n")
    assert client.inspect_image(IMAGE)["Size"] - client.inspect_image(BASE_IMAGE)["Size"] < 100 * MB


def test_an_extra_that_is_none_fails_the_build(compose: Compose, client: Any) -> None:
    """A typing error in EXTRAS shows when the image is built, not when it runs."""
    arguments = {"BASE_IMAGE": BASE_IMAGE, "BUILD_IMAGE": BUILD_IMAGE, "EXTRAS": "kubernets"}
    log = list(client.build(path=str(ROOT), buildargs=arguments, rm=True, forcerm=True, decode=True))
    assert "error" in log[-1]
    assert "KeyError: 'kubernets'" in "".join(line.get("stream", "") for line in log)


def test_the_profile_for_gpus_is_a_stack_of_its_own(compose: Compose) -> None:
    """Compose reads it as intended: vLLM with helpful flags, one GPU each, and a proxy in front of both."""
    services = yaml.safe_load(compose("--profile", "gpu", "config"))["services"]
    of_gpus = {name for name, service in services.items() if service.get("profiles") == ["gpu"]}
    assert of_gpus == {"thunderagent-gpu", "vllm-1", "vllm-2"}
    assert set(services) - of_gpus == {"thunderagent", "engine-1", "engine-2"}
    backends = services["thunderagent-gpu"]["environment"]["THUNDERAGENT_BACKENDS"]
    assert backends == "http://vllm-1:8000,http://vllm-2:8000"
    for number in (1, 2):
        service = services[f"vllm-{number}"]
        assert {"--port=8000", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(service["command"])
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(number - 1)]


async def test_the_stack_gets_ready_serves_drains_and_goes(
    compose: Compose, client: Any, stack: httpx2.AsyncClient
) -> None:
    """After `up`: healthy, two replicas, a turn of a program; SIGTERM lets a stream end and refuses new turns."""
    proxy = container(client, "thunderagent")
    await until(lambda: are_healthy(client), within_s=120)

    await until_all_up(stack, "")  # it is healthy before it has polled both
    assert {each["replica_id"] for each in await replicas(stack, "")} == {"engine-1:8100", "engine-2:8100"}

    answer = await stack.post("/p/task-1/v1/chat/completions", json=chat(8))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert (await stack.get("/programs/task-1")).json()["turn_count"] == 1

    async with stack.stream("POST", "/p/task-1/v1/chat/completions", json=chat(STREAMED_TOKENS, stream=True)) as stream:
        chunks = stream.aiter_bytes()
        body = await anext(chunks)
        served = container(client, stream.headers["X-Replica-ID"].partition(":")[0])
        client.pause(served)  # so that the stream lasts until all have noticed
        stopped = asyncio.create_task(asyncio.to_thread(client.stop, proxy))  # passes the values of the compose file
        await until(lambda: answers_503(stack, "/ready"))
        refused = await stack.post("/p/task-2/v1/chat/completions", json=chat(8))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        client.unpause(served)
        async for chunk in chunks:
            body += chunk
    assert len([event for event in events(body) if event["choices"][0]["delta"].get("content")]) == STREAMED_TOKENS
    await stopped
    assert b"grace_period_over" not in client.logs(proxy)  # it ended with the stream
    inspected = client.inspect_container(proxy)
    assert (inspected["State"]["ExitCode"], inspected["Config"]["StopTimeout"]) == (0, 40)
    replayed = compose("run", "--rm", "--no-deps", "-T", "thunderagent", "replay", "events.jsonl")
    assert "every decision is the same" in replayed


@pytest.mark.nightly  # more than two minutes; test_takeover.py has the same without containers
async def test_two_gateways_and_two_schedulers_lose_no_turn_with_their_leader(
    engine: DockerEngine, client: Any
) -> None:
    """The leader's container is killed during streams and turns through both gateways: no error; the other leads."""
    scaled = Compose(engine, "deploy/compose/scaled.yml")
    await asyncio.to_thread(scaled, "build")
    urls = [f"http://127.0.0.1:{port}" for port in (scaled.port, scaled.second_port)]
    async with up(scaled, client), httpx2.AsyncClient(timeout=60) as http, asyncio.TaskGroup() as group:

        async def cells_say(**wanted: object) -> bool:
            cells = [(await http.get(f"{url}/summary")).json().get("cell") or {} for url in urls]
            return all(wanted.items() <= cell.items() for cell in cells)

        await until(lambda: are_healthy(client, 7), within_s=120)
        await until(lambda: cells_say(has_standby=True))
        answers: list[httpx2.Response] = []
        stop = asyncio.Event()

        async def talk(number: int) -> None:
            while not stop.is_set():
                program = f"{urls[number % 2]}/p/task-{number}/v1/chat/completions"
                answers.append(await http.post(program, json=chat(8)))

        for number in range(4):
            group.create_task(talk(number))
        streamed = group.create_task(http.post(f"{urls[0]}/p/s/v1/chat/completions", json=chat(600, stream=True)))
        await until(lambda: say_so(len(answers) >= 20))
        leader = leader_of(client)
        client.kill(container(client, leader))
        before_count = len(answers)
        await until(lambda: say_so(len(answers) >= before_count + 40))
        stop.set()
        body = (await streamed).content
        await until(lambda: cells_say(role="leader", epoch=2, links_count=2))
    assert {answer.status_code for answer in answers} == {200}
    assert len([each for each in events(body) if each["choices"] and each["choices"][0]["delta"].get("content")]) == 600


async def say_so(value: bool) -> bool:
    """Return a condition in the form that `until` takes."""
    return value


def leader_of(client: Any) -> str:
    """Return the service of the leading scheduler, as reported in its own container."""
    asked = "import json, urllib.request as u; print(json.load(u.urlopen('http://127.0.0.1:8300/health'))['role'])"
    for service in ("scheduler-1", "scheduler-2"):
        made = client.exec_create(container(client, service), ["python3", "-c", asked])
        if client.exec_start(made).decode().strip() == "leader":
            return service
    raise AssertionError("no scheduler leads")


def chat(output_tokens: int, **fields: object) -> dict[str, Any]:
    """Return the body of a chat."""
    exactly = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
    return {"model": "simulated", "messages": [{"role": "user", "content": "w1 w2 w3"}], **exactly, **fields}


def container(client: Any, service: str) -> str:
    """Return the id of a service's container."""
    (found,) = client.containers(all=True, filters={"label": f"com.docker.compose.service={service}"})
    container_id: str = found["Id"]
    return container_id


async def are_healthy(client: Any, services_count: int = 3) -> bool:
    """Return whether the health check of each of a number of services has succeeded."""
    found = [client.inspect_container(each["Id"])["State"]["Health"] for each in client.containers()]
    assert "unhealthy" not in [each["Status"] for each in found], json.dumps(found)
    return [each["Status"] for each in found] == ["healthy"] * services_count
