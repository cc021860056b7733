"""Containers of a real Docker engine as replicas: started, reached, noticed when they end, and removed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import exposition, get, post, running_proxy, until
from tests.real.docker_engine import IMAGE, DockerEngine
from thunderagent.errors import ConfigurationError, ProvisionError
from thunderagent.provision.docker import OWNER_LABEL, DockerProvisioner, ReplicaImage

if TYPE_CHECKING:
    from collections.abc import Iterator

# The proxy's requests to an engine before it sends turns: health and metrics.
ENGINE = (
    'sh -c \'mkdir -p /www && echo ok > /www/health && printf %s "$1" > /www/metrics && '
    "exec httpd -f -p 8000 -h /www' engine"
)
COMMAND = f"{ENGINE} '{exposition(16_000)}'"


@pytest.fixture
def client(docker_engine: DockerEngine) -> Iterator[Any]:
    """A client of the Docker library. At the end nothing may be left at the engine."""
    with contextlib.closing(docker_engine.client()) as client:
        yield client
        assert [each["Names"] for each in client.containers(all=True)] == []


async def test_replicas_are_containers(docker_engine: DockerEngine, client: Any) -> None:
    """One at first, another on request; a stopped one drains and is removed; a dead one is replaced."""
    config = {
        "provision": "docker",
        "provision_image": IMAGE,
        "provision_command": COMMAND,
        "provision_min": 1,
        "provision_max": 2,
        "provision_cooldown_s": 0.1,
        "provision_end_limit_s": 1.0,
        "docker_url": docker_engine.url,
        "backend_type": "vllm",
    }

    def running() -> list[str]:
        with contextlib.closing(docker_engine.client()) as short:  # otherwise its connection would be counted
            return [each["Id"] for each in short.containers()]

    async with running_proxy(up=0, **config) as proxy:
        replicas = proxy.runtime.scheduler.replicas
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 1, within_s=60)
        assert (await post(proxy.url, "/operations/provision")).status == 202
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2, within_s=60)
        with contextlib.closing(docker_engine.client()) as short:
            assert OWNER_LABEL in short.inspect_container(running()[0])["Config"]["Labels"]
        gone = proxy.runtime.scheduler.open_replicas[0].replica_id
        assert (await post(proxy.url, "/operations/kill", {"replica_id": gone})).json()["engine_ends"] is True
        await until(lambda: len(replicas) == 1 and len(running()) == 1, within_s=60)
        left = next(iter(replicas))
        with contextlib.closing(docker_engine.client()) as short:
            short.kill(running()[0])
        await until(lambda: left not in replicas and len(proxy.runtime.scheduler.open_replicas) == 1, within_s=60)
        assert (await get(proxy.url, "/operations")).json()["provision"]["started_count"] == 1
    assert running() == []


async def test_leftovers_of_an_earlier_run_are_removed(docker_engine: DockerEngine, client: Any) -> None:
    """Nothing of another proxy is removed; a replica that cannot run is reported."""
    image = ReplicaImage(IMAGE, "sleep 600")
    killed, other = (DockerProvisioner(image, owner=owner, docker_url=docker_engine.url) for owner in ("a", "b"))
    first, second = await killed.start(), await other.start()
    again = DockerProvisioner(image, owner="a", docker_url=docker_engine.url, end_limit_s=1.0)
    assert await again.open() == 0
    assert [each["Id"] for each in client.containers()] == [second.handle]
    assert first.url != second.url
    await other.end(second.handle, second.url)
    await other.close()
    nowhere = DockerProvisioner(ReplicaImage("no-such-image:x"), owner="a", docker_url=docker_engine.url)
    with pytest.raises(ProvisionError, match="no-such-image"):
        await nowhere.start()
    for driver in (killed, again, nowhere):
        await asyncio.wait_for(driver.close(), 30)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (ReplicaImage(""), "needs an image"),
        (ReplicaImage("x", gpus="two"), "all or a number"),
        (ReplicaImage("x", command="'"), "No closing quotation"),
    ],
)
def test_command_that_cannot_run_is_refused(image: ReplicaImage, why: str) -> None:
    """The refusal comes before anything is started."""
    with pytest.raises(ConfigurationError, match=why):
        DockerProvisioner(image, owner="a")
