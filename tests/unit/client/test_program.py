"""The life of a program: the requests to the proxy at its begin and its end, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.client.support import DEADLINE_S
from thunderagent.client import (
    Program,
    ProxyRefusedError,
    ProxyUnreachableError,
    SandboxFailedError,
    SandboxTimeoutError,
    as_program,
    current_program,
    program,
)
from thunderagent.client.exchange import exchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.unit.client.support import FakeProxy

NOBODY = "http://127.0.0.1:9"
"""The port of `discard`; nothing listens there."""

REFUSAL = {"error": {"message": "sandboxes are off", "type": "x", "param": None, "code": "invalid_request"}}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def finish_threads() -> None:
    """Wait for releases that have no other waiter."""
    for thread in threading.enumerate():
        if thread.name == "thunderagent-client":
            thread.join(DEADLINE_S)


class BodyError(Exception):
    """The error that the body of a block raises."""


# --- begin and end


def test_a_plain_program_is_one_request_at_its_end(proxy: FakeProxy) -> None:
    with program("a/b é", proxy=proxy.url) as p:
        assert not proxy.requests
        assert not p.ended
    assert proxy.requests == [("POST", "/programs/release", {"program_id": "a/b é"})]
    assert p.ended


def test_outcome_is_sent_with_the_end(proxy: FakeProxy) -> None:
    with program("a", proxy=proxy.url) as p:
        p.outcome = "failure"
    assert proxy.requests == [("POST", "/programs/release", {"program_id": "a", "outcome": "failure"})]


async def test_a_plain_async_program_is_one_request_at_its_end(proxy: FakeProxy) -> None:
    async with program("a/b é", proxy=proxy.url):
        assert not proxy.requests
    assert proxy.requests == [("POST", "/programs/release", {"program_id": "a/b é"})]


OPENED = {
    "program_id": "a",
    "group_id": "g",
    "program_class": "c",
    "sandboxes": [{"template": "coder"}, {"spec": {"image": "i"}}],
}


def test_settings_are_sent_first(proxy: FakeProxy) -> None:
    sandboxes = ["coder", {"spec": {"image": "i"}}]
    with program("a", proxy=proxy.url, group="g", program_class="c", sandboxes=sandboxes):
        assert proxy.requests == [("POST", "/programs", OPENED)]
    assert proxy.released() == ["a"]


async def test_settings_are_sent_first_async(proxy: FakeProxy) -> None:
    async with program("a", proxy=proxy.url, sandboxes=["coder"]):
        body = {"program_id": "a", "sandboxes": [{"template": "coder"}]}
        assert proxy.requests == [("POST", "/programs", body)]
    assert proxy.released() == ["a"]


@pytest.mark.parametrize("error", [BodyError, KeyboardInterrupt, SystemExit])
def test_the_body_s_error_comes_through_and_the_program_is_released(
    proxy: FakeProxy, error: type[BaseException]
) -> None:
    with pytest.raises(error), program("a", proxy=proxy.url):
        raise error
    assert proxy.released() == ["a"]


async def test_the_async_body_s_error_comes_through_and_the_program_is_released(proxy: FakeProxy) -> None:
    with pytest.raises(BodyError):
        async with program("a", proxy=proxy.url):
            raise BodyError
    assert proxy.released() == ["a"]


def test_a_program_is_entered_once(proxy: FakeProxy) -> None:
    """Its id may be reused; then it is another program."""
    p = program("a", proxy=proxy.url)
    with p, pytest.raises(RuntimeError, match="was entered before"):
        p.__enter__()
    with pytest.raises(RuntimeError, match=r"<Program 'a' at .*, ended> was entered before"):
        p.__enter__()
    assert proxy.released() == ["a"]


def test_program_released_by_hand_is_not_released_again(proxy: FakeProxy) -> None:
    with program("a", proxy=proxy.url) as p:
        assert p.release()
        assert current_program() is None
        assert p.release()
    assert proxy.released() == ["a"]


async def test_a_program_without_a_block_is_opened_and_released_by_hand(proxy: FakeProxy) -> None:
    p = program("a", proxy=proxy.url, group="g")
    await p.async_open()
    assert await p.async_release()
    assert await p.async_release()
    assert proxy.paths() == ["/programs", "/programs/release"]


# --- what fails


def test_a_refused_begin_is_raised(proxy: FakeProxy) -> None:
    """The body does not run; the program is released, because the proxy may still know it."""
    proxy.answer("/programs", (400, REFUSAL))
    with (
        pytest.raises(ProxyRefusedError, match="400 invalid_request: sandboxes are off") as caught,
        program("a", proxy=proxy.url, sandboxes=["coder"]),
    ):
        pytest.fail("unreachable")
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert proxy.released() == ["a"]
    assert current_program() is None


async def test_a_begin_that_reaches_nobody_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ProxyUnreachableError, match=r"no proxy answers at http://127.0.0.1:9"):
        async with program("a", proxy=NOBODY, group="g", release_limit_s=0.1):
            pytest.fail("unreachable")
    assert current_program() is None


def test_a_release_is_tried_again(proxy: FakeProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.answer("/programs/release", (503, REFUSAL), (200, {}))
    with program("a", proxy=proxy.url):
        pass
    assert proxy.released() == ["a", "a"]
    assert not caplog.records


@pytest.mark.parametrize("status", [404, 200])
def test_a_release_that_makes_no_sense_is_not_tried_again(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Another server answers there: a web server that knows no programs."""
    proxy.answer("/programs/release", (status, b"<html>"))
    with program("a", proxy=proxy.url):
        pass
    assert proxy.released() == ["a"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "program 'a' was not released" in record.getMessage()
    assert "not an answer of thunderagent: '<html>'" in record.getMessage()


def test_a_failed_release_is_a_warning_that_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BodyError), program("a", proxy=NOBODY, release_limit_s=1.1):
        raise BodyError
    (record,) = caplog.records
    assert "no proxy answers at http://127.0.0.1:9" in record.getMessage()


@pytest.mark.parametrize("url", ["http://no..name", f"http://{'x' * 70}.test", "https://127.0.0.1:9"])
def test_a_host_that_is_none_is_a_proxy_that_does_not_answer(url: str) -> None:
    with pytest.raises(ProxyUnreachableError):
        exchange(url, "GET", "/health", timeout_s=1)


def test_the_end_waits_no_longer_than_its_limit(proxy: FakeProxy, caplog: pytest.LogCaptureFixture) -> None:
    """The proxy accepts, and does not answer."""
    proxy.gate.clear()
    begun_s = time.monotonic()
    with program("a", proxy=proxy.url, release_limit_s=0.2):
        pass
    assert time.monotonic() - begun_s < 20
    finish_threads()
    (record,) = caplog.records
    assert "timed out" in record.getMessage()


async def test_the_async_end_waits_no_longer_than_its_limit(proxy: FakeProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.gate.clear()
    begun_s = time.monotonic()
    async with program("a", proxy=proxy.url, release_limit_s=0.2):
        pass
    assert time.monotonic() - begun_s < 20
    await asyncio.to_thread(finish_threads)
    assert len(caplog.records) == 1


# --- cancellation


async def test_a_cancelled_program_is_released(proxy: FakeProxy) -> None:
    entered = asyncio.Event()

    async def agent() -> None:
        async with program("a", proxy=proxy.url):
            entered.set()
            await asyncio.sleep(DEADLINE_S)

    task = asyncio.create_task(agent())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert proxy.released() == ["a"], "before the task was over"


async def test_a_second_cancellation_ends_the_wait_and_not_the_release(proxy: FakeProxy) -> None:
    proxy.gate.clear()

    async def agent() -> None:
        async with program("a", proxy=proxy.url):
            pass

    task = asyncio.create_task(agent())
    await until(proxy.asked.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proxy.gate.set()
    await asyncio.to_thread(finish_threads)
    assert proxy.released() == ["a"]


async def test_a_begin_that_is_cancelled_is_released_after_it(proxy: FakeProxy) -> None:
    """It is never released before the begin, which would then open the program for good."""
    proxy.gate.clear()

    async def agent() -> None:
        async with program("a", proxy=proxy.url, group="g"):
            pytest.fail("unreachable")

    task = asyncio.create_task(agent())
    await until(proxy.asked.is_set)
    task.cancel()
    await asyncio.sleep(0.05)
    assert proxy.paths() == ["/programs"]
    proxy.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert proxy.paths() == ["/programs", "/programs/release"]


def test_a_program_is_released_while_its_event_loop_and_interpreter_end(proxy: FakeProxy) -> None:
    """Cases are Ctrl-C in `asyncio.run`, and an unfinished generator."""
    code = f"""
import asyncio, signal
from thunderagent.client import program

async def agent():
    async with program("interrupted", proxy={proxy.url!r}):
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(10)

def turns():
    with program("left", proxy={proxy.url!r}):
        yield

generator = turns()
next(generator)
asyncio.run(agent())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert run.stderr.rstrip().endswith("KeyboardInterrupt")
    assert proxy.released() == ["interrupted", "left"]


# --- the current program


def test_the_innermost_program_is_current(proxy: FakeProxy) -> None:
    """Programs made inside go to the same proxy."""
    assert current_program() is None
    with program("outer", proxy=proxy.url) as outer:
        assert current_program() is outer
        with program("inner") as inner:
            assert current_program() is inner
            assert (inner.parent, inner.proxy) == (outer, proxy.url)
        assert current_program() is outer
        assert program("other", proxy=NOBODY, parent=inner).parent is inner
    assert current_program() is None
    assert proxy.released() == ["inner", "outer"]


async def test_tasks_and_threads_have_programs_of_their_own(proxy: FakeProxy) -> None:
    """A task begins in the program that started it; a program that the task enters is only its own."""

    def name() -> str | None:
        p = current_program()
        return p.program_id if p is not None else None

    async def agent(program_id: str) -> tuple[str | None, str | None, str | None]:
        before = name()
        async with program(program_id) as p:
            assert p.parent is outer
            await asyncio.sleep(0.01)
            return before, name(), await asyncio.to_thread(name)

    async with program("outer", proxy=proxy.url) as outer:
        seen = await asyncio.gather(agent("a"), agent("b"))
        assert seen == [("outer", "a", "a"), ("outer", "b", "b")]
        assert name() == "outer"
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(name()))
        thread.start()
        thread.join()
        assert found == [None], "a plain thread has a context of its own"


async def test_call_that_outlives_its_program_sees_the_next_one_outward(proxy: FakeProxy) -> None:
    ended = asyncio.Event()

    async def straggler() -> Program | None:
        await ended.wait()
        return current_program()

    async with program("outer", proxy=proxy.url) as outer:
        async with program("inner"):
            task = asyncio.create_task(straggler())
            await asyncio.sleep(0)
        ended.set()
        assert await task is outer


def test_a_program_may_be_left_in_another_context(proxy: FakeProxy) -> None:
    """Fixtures of tests do that."""
    stack = contextlib.ExitStack()
    contextvars.copy_context().run(lambda: stack.enter_context(program("a", proxy=proxy.url)))
    stack.close()
    assert proxy.released() == ["a"]


# --- the decorator


def test_each_call_of_a_function_is_a_program(proxy: FakeProxy) -> None:
    @as_program(proxy=proxy.url, program_id=lambda task, **_: f"task-{task}")
    def agent(task: int, *, by: int) -> str:
        """Solve it."""
        p = current_program()
        assert p is not None
        return f"{p.program_id} {task * by}"

    assert [agent(task, by=3) for task in (1, 2)] == ["task-1 3", "task-2 6"]
    assert proxy.released() == ["task-1", "task-2"]
    assert (agent.__name__, agent.__doc__) == ("agent", "Solve it.")


async def test_each_call_of_an_async_function_is_a_program(proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds without parentheses, too; calls may run side by side."""
    monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url)

    @as_program
    async def agent() -> str:
        await asyncio.sleep(0.01)
        p = current_program()
        assert p is not None
        return p.program_id

    program_ids = await asyncio.gather(*(agent() for _ in range(3)))
    assert len(set(program_ids)) == 3
    assert sorted(proxy.released()) == sorted(program_ids)


async def test_an_error_comes_through_the_decorator(proxy: FakeProxy) -> None:
    @as_program(proxy=proxy.url)
    async def agent() -> None:
        raise BodyError

    with pytest.raises(BodyError):
        await agent()
    assert len(proxy.released()) == 1


def test_a_generator_is_no_program() -> None:
    """A call of a generator runs none of its body: the program would be released before the body begins."""

    def turns() -> Iterator[int]:
        yield 1

    async def async_turns() -> AsyncIterator[int]:
        yield 1

    for function in (turns, async_turns):
        with pytest.raises(TypeError, match="turns is a generator: use `with program"):
            as_program(function)


# --- sandboxes


def sandbox(stage: str, template: str = "coder", why: str | None = None) -> dict[str, Any]:
    return {"sandbox_id": f"{template}-{stage}", "template": template, "stage": stage, "why": why}


PATH = "/programs/a%2Fb/sandboxes"


def test_the_first_usable_sandbox_is_waited_for(proxy: FakeProxy) -> None:
    proxy.answer(
        PATH,
        (200, {"sandboxes": []}),
        (200, {"sandboxes": [sandbox("failed"), sandbox("preparing")]}),
        (200, {"sandboxes": [sandbox("failed"), sandbox("in_use")]}),
    )
    p = program("a/b", proxy=proxy.url)
    assert p.sandboxes() == []
    assert p.wait_for_sandbox()["sandbox_id"] == "coder-in_use"
    assert {request[:2] for request in proxy.requests} == {("GET", PATH)}


def test_a_sandbox_that_stands_still_is_waited_for(proxy: FakeProxy) -> None:
    still = {**sandbox("in_use"), "suspended": True}
    proxy.answer(PATH, (200, {"sandboxes": [still]}), (200, {"sandboxes": [{**still, "suspended": False}]}))
    assert not program("a/b", proxy=proxy.url).wait_for_sandbox()["suspended"]


async def test_a_sandbox_of_a_template_is_waited_for(proxy: FakeProxy) -> None:
    others = [sandbox("ready", "plain"), sandbox("failed", "old")]
    proxy.answer(PATH, (200, {"sandboxes": others}), (200, {"sandboxes": [*others, sandbox("ready")]}))
    p = program("a/b", proxy=proxy.url)
    assert len(await p.async_sandboxes()) == 2
    assert (await p.async_wait_for_sandbox("coder"))["sandbox_id"] == "coder-ready"


async def test_a_failed_sandbox_is_not_waited_for(proxy: FakeProxy) -> None:
    proxy.answer(PATH, (200, {"sandboxes": [sandbox("failed", why="no such image"), sandbox("ready", "other")]}))
    p = program("a/b", proxy=proxy.url)
    with pytest.raises(SandboxFailedError, match="program 'a/b': no such image"):
        p.wait_for_sandbox("coder")
    with pytest.raises(SandboxFailedError, match="no such image"):
        await p.async_wait_for_sandbox("coder")


async def test_a_sandbox_is_asked_for_and_waited_for_by_its_id(proxy: FakeProxy) -> None:
    """Others that are usable are passed over; one that is gone is not waited for."""
    asked = {"sandboxes": [sandbox("requested")]}
    now = {"sandboxes": [sandbox("ready", "other"), {**sandbox("ready"), "sandbox_id": "coder-requested"}]}
    proxy.answer(PATH, (202, asked), (202, asked), (200, now))
    p = program("a/b", proxy=proxy.url)
    sandbox_id = p.request_sandbox("coder")
    assert await p.async_request_sandbox({"spec": {"image": "x"}}) == sandbox_id == "coder-requested"
    assert [body for _, _, body in proxy.requests] == [{"template": "coder"}, {"spec": {"image": "x"}}]
    assert p.wait_for_sandbox(sandbox_id=sandbox_id)["template"] == "coder"
    with pytest.raises(SandboxFailedError, match="no sandbox 'gone'"):
        await p.async_wait_for_sandbox(sandbox_id="gone")


async def test_no_sandbox_is_waited_for_longer_than_its_time(proxy: FakeProxy) -> None:
    proxy.answer(PATH, (200, {"sandboxes": []}), (200, {"sandboxes": [sandbox("preparing")]}))
    p = program("a/b", proxy=proxy.url)
    with pytest.raises(TimeoutError, match="no usable sandbox after 0 s: it has none"):
        p.wait_for_sandbox(timeout_s=0)
    with pytest.raises(SandboxTimeoutError, match=r"after 0.05 s: coder: preparing"):
        await p.async_wait_for_sandbox(timeout_s=0.05)


def test_sandboxes_that_are_off_are_said_to_be(proxy: FakeProxy) -> None:
    proxy.answer(PATH, (404, REFUSAL))
    with pytest.raises(ProxyRefusedError, match="sandboxes are off"):
        program("a/b", proxy=proxy.url).sandboxes()


# --- between turns


async def test_knowledge_of_the_next_turn_is_sent(proxy: FakeProxy) -> None:
    """It is sent for a program, or for a branch by its name; the answer says whether the program is known."""
    proxy.answer("/programs/a%2Fb/hints", (200, {"program_id": "a/b", "known": True}), (200, {"known": False}))
    a = Program(proxy.url, "a/b")
    assert a.hint(12.5, confidence=0.8)
    assert not await a.branch("sub").async_hint(keep="drop")
    assert [body for _, _, body in proxy.requests] == [
        {"next_turn_in_s": 12.5, "confidence": 0.8, "keep": None, "branch": ""},
        {"next_turn_in_s": None, "confidence": 1.0, "keep": "drop", "branch": "sub"},
    ]
