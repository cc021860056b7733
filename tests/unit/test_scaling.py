"""What begins several processes: refusals, and what a scheduler knows of its last life."""

from __future__ import annotations

import asyncio
import errno
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.one_machine import _Gateways, serve_with_gateways
from thunderagent.scaling import check_gateways, serve_scheduler
from thunderagent.serving.serving import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def test_command_with_gateways_shares_no_store() -> None:
    """Another scheduler would take over, and these gateways would not know it."""
    config = ServeConfig.load(gateways=2, port=0, store="redis://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="thunderagent scheduler"):
        await serve_with_gateways(config, (), announcer=None)
    check_gateways(config)  # then `scheduler` may be given the same file


@pytest.mark.parametrize(
    ("given", "gateways", "why"),
    [
        ({"store": "redis://127.0.0.1:1"}, 0, "store: `serve` cannot use a store; start `thunderagent scheduler`"),
        ({"schedulers": "http://127.0.0.1:1"}, 0, "schedulers: `serve` schedules by itself; start `thunderagent gat"),
        ({"schedulers": "http://127.0.0.1:1"}, 2, "schedulers: `serve --gateways` has its own; start `thunderagent g"),
    ],
)
async def test_option_for_several_processes_is_not_ignored(given: dict[str, str], gateways: int, why: str) -> None:
    """A user would believe that another process takes over."""
    config = ServeConfig.load(gateways=gateways, port=0, **given)
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        await (serve_with_gateways(config, (), announcer=None) if gateways else serve(config))


async def test_a_scheduler_that_stands_by_again_knows_in_which_epoch_it_led(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it lets others take what it gave up."""
    stop, over = asyncio.Event(), asyncio.Event()
    over.set()
    lives: list[int] = []

    async def give_up() -> None:
        if len(lives) == 2:
            stop.set()

    @asynccontextmanager
    async def scheduler(config: ServeConfig, led_in: int) -> AsyncIterator[tuple[str, Any, Any]]:
        lives.append(led_in)
        yield (
            f"http://127.0.0.1:{config.port or 1}",
            SimpleNamespace(scheduler=SimpleNamespace(policy=SimpleNamespace(name="passthrough"))),
            SimpleNamespace(epoch=7, over=over, give_up=give_up),
        )

    monkeypatch.setattr("thunderagent.scaling.scheduler", scheduler)
    monkeypatch.setattr("thunderagent.scaling.begin_process", lambda: stop)
    await serve_scheduler(ServeConfig.load(port=0))
    assert lives == [0, 7]


async def test_gateway_that_cannot_be_started_again_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory or descriptors for a moment, the scheduler and the other gateways go on."""
    start, starts = asyncio.create_subprocess_exec, list[str]()

    async def create(*command: str, **more: Any) -> asyncio.subprocess.Process:
        starts.append("asked")
        if len(starts) == 2:
            raise BlockingIOError(errno.EAGAIN, "no memory")
        return await start(*command, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    monkeypatch.setattr("thunderagent.one_machine.START_AGAIN_S", 0.0)
    gateways = _Gateways(("sh", "-c", "echo ready"), {}, 1, 5.0)
    with pytest.raises(ExceptionGroup) as raised:
        await gateways.run()
    assert "ended 6 times" in str(raised.value.exceptions[0])
    assert len(starts) == 7
