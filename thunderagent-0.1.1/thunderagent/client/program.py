"""A program as a block of code: `with program(...)` and `async with program(...)`.

Theory of operation
===================
*Entering* makes no request, unless the proxy must know something before the first turn (a group, a class, sandboxes);
then `POST /programs` says it, and an error of that is raised, because nothing has begun yet.

*Leaving* always releases, also when the body raised, was cancelled or got a Ctrl-C, and never raises: what it could
hide is worth more than what it could tell. So a release that fails is logged. It runs in a thread, which takes no
notice of cancellation: of a task that is cancelled a second time only the wait ends. It is tried a few times, and is
over after `release_limit_s`. What is not released all the same is dropped by the proxy when it is idle for long enough.

*The current program* is a ContextVar, so a task and `asyncio.to_thread` see the program in which they were started, and
a plain thread sees none. What outlives its program sees the next one outward that lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Literal, Self, TypedDict
from urllib.parse import quote

from thunderagent.client.branch import Branch
from thunderagent.client.errors import ClientError, ProxyRefusedError, SandboxFailedError, SandboxTimeoutError
from thunderagent.client.exchange import exchange, in_thread, proxy_key

log = logging.getLogger("thunderagent.client")

DEFAULT_PROXY = "http://127.0.0.1:8300"
PROXY_VARIABLE = "THUNDERAGENT_PROXY"
PROGRAM_VARIABLE = "THUNDERAGENT_PROGRAM_ID"

REQUEST_TIMEOUT_S = 30.0
"""For each wait of a request that somebody waits for."""

RELEASE_LIMIT_S = 10.0
"""The longest that leaving a program takes, unless it was made with another limit."""
RELEASE_TIMEOUT_S = 3.0
"""For each wait of one try."""
RELEASE_PAUSES_S = (0.2, 1.0)
"""Between the tries, of which there is one more."""

SANDBOX_TIMEOUT_S = 300.0
# From the first to the last pause between two looks.
_SANDBOX_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.0)


class Sandbox(TypedDict):
    """A sandbox as the proxy reports it; its page in the documentation says what each field means."""

    sandbox_id: str
    template: str | None
    driver: str
    stage: str
    program_ids: list[str]
    given: bool
    suspended: bool
    handle: str | None
    address: str | None
    ports: dict[str, list[Any]]
    details: dict[str, Any]
    why: str | None


def program(
    program_id: str | None = None,
    *,
    proxy: str | None = None,
    group: str = "",
    program_class: str = "",
    sandboxes: Sequence[str | Mapping[str, Any]] = (),
    parent: Program | None = None,
    release_limit_s: float = RELEASE_LIMIT_S,
) -> Program:
    """Return a program to enter with `with` or `async with`, once.

    `program_id` must be unique to the run; None makes one up. `proxy` is the proxy's URL; None is the parent's URL,
    then `THUNDERAGENT_PROXY` of the environment, then `http://127.0.0.1:8300`. `group` names programs that finish
    together, `program_class` selects sandboxes. `sandboxes` are requested at once, each by the name of a template or as
    in `POST /programs`. `parent` is the outer program; None is the current one. `release_limit_s` is the longest that
    the end of the block waits for a proxy that does not answer. Raises `ValueError` for values that the proxy would
    refuse. No request is made yet.
    """
    parent = parent if parent is not None else current_program()
    if proxy is None:
        proxy = parent.proxy if parent is not None else os.environ.get(PROXY_VARIABLE) or DEFAULT_PROXY
    if program_id is None:
        program_id = f"program-{uuid.uuid4().hex}"
    return Program(
        proxy,
        program_id,
        group=group,
        program_class=program_class,
        sandboxes=tuple(sandboxes),
        parent=parent,
        release_limit_s=release_limit_s,
    )


def current_program() -> Program | None:
    """Return the innermost program that this code runs in and that has not ended; None outside of a program."""
    candidate = _current.get()
    while candidate is not None and candidate.ended:
        candidate = candidate.parent
    return candidate


class Program(Branch):
    """One run of an agent, addressed as its main branch. `program` makes one.

    Without a `with` block call `open` before the first turn, if it has a group, a class or sandboxes, and `release` at
    the end, or the `async_` versions.
    """

    def __init__(
        self,
        proxy: str,
        program_id: str,
        *,
        group: str = "",
        program_class: str = "",
        sandboxes: tuple[str | Mapping[str, Any], ...] = (),
        parent: Program | None = None,
        release_limit_s: float = RELEASE_LIMIT_S,
    ) -> None:
        """Make no request yet. Raises `ValueError`."""
        super().__init__(proxy, program_id, group=group, program_class=program_class)
        self.parent = parent
        self.release_limit_s = release_limit_s
        self.ended = False
        """Whether its release has begun."""
        self.outcome: Literal["", "success", "failure"] = ""
        """Its outcome, which the proxy learns from; set it before the end."""
        self._wanted_sandboxes = [{"template": each} if isinstance(each, str) else dict(each) for each in sandboxes]
        self._opening: Future[None] | None = None
        self._released = False
        self._token: Token[Program | None] | None = None

    def __repr__(self) -> str:
        return f"<Program {self.program_id!r} at {self.proxy}{', ended' if self.ended else ''}>"

    def branch(self, branch_id: str) -> Branch:
        """Return the branch of a sub-agent: the same program with a separate context. Raises `ValueError`."""
        if not branch_id:
            raise ValueError("a branch needs a name; the main branch is the program itself")
        return Branch(
            self.proxy, self.program_id, branch_id=branch_id, group=self.group, program_class=self.program_class
        )

    @property
    def extra_body(self) -> dict[str, Any]:
        """The field that names the program in a request's body: `create(..., extra_body=p.extra_body)`."""
        return {"program_id": self.program_id}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make an agent in a child process run as this program: `env=os.environ | p.environment`.

        Its base URLs name the program. `THUNDERAGENT_KEY` is the value of API keys that are not in the environment.
        """
        key, names = proxy_key(), ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
        keys = {name: key for name in names if key and not os.environ.get(name)}
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            PROXY_VARIABLE: self.proxy,
            PROGRAM_VARIABLE: self.program_id,
            **keys,
        }

    @property
    def docker_labels(self) -> dict[str, str]:
        """Labels that make a container this program's, so that it is removed with the program."""
        return {"thunderagent.program-id": self.program_id}

    # --- its life

    def __enter__(self) -> Self:
        self._begin()
        try:
            self.open()
        except BaseException:
            self.__exit__(None, None, None)  # the proxy may have heard of it all the same
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_context()
        self.release()

    async def __aenter__(self) -> Self:
        self._begin()
        try:
            await self.async_open()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_context()
        await self.async_release()

    def open(self) -> None:
        """Tell the proxy what it must know before the first turn, if there is anything. Raises `ClientError`."""
        if (opening := self._start_opening()) is not None:
            opening.result()

    async def async_open(self) -> None:
        """Do as `open`."""
        if (opening := self._start_opening()) is not None:
            await asyncio.wrap_future(opening)

    def release(self) -> bool:
        """Tell the proxy that the program has ended; return whether it got the message. Idempotent.

        Takes up to `release_limit_s`. Raises nothing: a failure is logged.
        """
        self.ended = True
        if self._released:
            return True
        try:
            return in_thread(self._post_release).result(self.release_limit_s)
        except TimeoutError:
            return False  # the thread is at its last try, and logs how that ended

    async def async_release(self) -> bool:
        """Do as `release`. If this is cancelled, the wait ends, and the release goes on."""
        self.ended = True
        if self._released:
            return True
        try:
            async with asyncio.timeout(self.release_limit_s):
                return await asyncio.wrap_future(in_thread(self._post_release))
        except TimeoutError:
            return False  # the thread is at its last try, and logs how that ended

    def _begin(self) -> None:
        if self._token is not None or self.ended:
            raise RuntimeError(f"{self!r} was entered before: make a new program for each run")
        self._token = _current.set(self)

    def _leave_context(self) -> None:
        self.ended = True  # from here on `current_program` passes it over, whatever becomes of the reset
        assert self._token is not None
        with contextlib.suppress(ValueError):  # a generator or a test's fixture may be left in another context
            _current.reset(self._token)

    def _start_opening(self) -> Future[None] | None:
        if self.group or self.program_class or self._wanted_sandboxes:
            self._opening = in_thread(self._post_open)
        return self._opening

    def _post_open(self) -> None:
        body: dict[str, Any] = {"program_id": self.program_id}
        if self.group:
            body["group_id"] = self.group
        if self.program_class:
            body["program_class"] = self.program_class
        if self._wanted_sandboxes:
            body["sandboxes"] = self._wanted_sandboxes
        exchange(self.proxy, "POST", "/programs", body, timeout_s=REQUEST_TIMEOUT_S)

    def _post_release(self) -> bool:
        if self._opening is not None:
            wait([self._opening])  # of a wait that was cancelled: what is released first would be opened afterwards
        end_s = time.monotonic() + self.release_limit_s
        for pause_s in (*RELEASE_PAUSES_S, None):
            left_s = max(0.001, end_s - time.monotonic())
            try:
                body = {"program_id": self.program_id}
                if self.outcome:
                    body["outcome"] = self.outcome
                exchange(self.proxy, "POST", "/programs/release", body, timeout_s=min(RELEASE_TIMEOUT_S, left_s))
            except ClientError as error:
                is_final = isinstance(error, ProxyRefusedError) and error.status < 500
                if is_final or pause_s is None or time.monotonic() + pause_s >= end_s:
                    self._log_failure(str(error))
                    return False
                time.sleep(pause_s)
            else:
                self._released = True
                return True
        raise AssertionError("the last try returns")

    def _log_failure(self, why: str) -> None:
        log.warning(
            "program %r was not released, so it keeps its memory until the idle limit: %s", self.program_id, why
        )

    # --- its sandboxes

    def sandboxes(self) -> list[Sandbox]:
        """Return the program's sandboxes as they are now. Raises `ClientError`."""
        path = f"/programs/{quote(self.program_id, safe='')}/sandboxes"
        answer = exchange(self.proxy, "GET", path, timeout_s=REQUEST_TIMEOUT_S)
        found: list[Sandbox] = answer["sandboxes"]
        return found

    async def async_sandboxes(self) -> list[Sandbox]:
        """Do as `sandboxes`."""
        return await asyncio.wrap_future(in_thread(self.sandboxes))

    def request_sandbox(self, wanted: str | Mapping[str, Any]) -> str:
        """Ask for a sandbox, by the name of a template or as in `POST /programs`; return its id at once.

        Raises `ClientError`.
        """
        path = f"/programs/{quote(self.program_id, safe='')}/sandboxes"
        body = {"template": wanted} if isinstance(wanted, str) else dict(wanted)
        (asked,) = exchange(self.proxy, "POST", path, body, timeout_s=REQUEST_TIMEOUT_S)["sandboxes"]
        sandbox_id: str = asked["sandbox_id"]
        return sandbox_id

    async def async_request_sandbox(self, wanted: str | Mapping[str, Any]) -> str:
        """Do as `request_sandbox`."""
        return await asyncio.wrap_future(in_thread(lambda: self.request_sandbox(wanted)))

    def wait_for_sandbox(
        self, template: str | None = None, *, sandbox_id: str | None = None, timeout_s: float = SANDBOX_TIMEOUT_S
    ) -> Sandbox:
        """Wait for a sandbox of a template, for that of an id, or for any, and return the first that is usable.

        Raises `SandboxFailedError` if all of them have failed, `SandboxTimeoutError`, and other
        `ClientError`s.
        """
        end_s = time.monotonic() + timeout_s
        for pause_s in _pauses_s():
            found = self.sandboxes()
            if (usable := _usable(self, found, template, sandbox_id)) is not None:
                return usable
            _check_time(self, found, end_s - time.monotonic(), timeout_s)
            time.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
        raise AssertionError("the pauses do not end")

    async def async_wait_for_sandbox(
        self, template: str | None = None, *, sandbox_id: str | None = None, timeout_s: float = SANDBOX_TIMEOUT_S
    ) -> Sandbox:
        """Do as `wait_for_sandbox`."""
        end_s = time.monotonic() + timeout_s
        for pause_s in _pauses_s():
            found = await self.async_sandboxes()
            if (usable := _usable(self, found, template, sandbox_id)) is not None:
                return usable
            _check_time(self, found, end_s - time.monotonic(), timeout_s)
            await asyncio.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
        raise AssertionError("the pauses do not end")


_current: ContextVar[Program | None] = ContextVar("thunderagent_program", default=None)


def _pauses_s() -> Iterator[float]:
    yield from _SANDBOX_PAUSES_S
    while True:
        yield _SANDBOX_PAUSES_S[-1]


def _usable(
    program: Program, found: list[Sandbox], template: str | None, sandbox_id: str | None = None
) -> Sandbox | None:
    """Return the first usable one; None while one may come. Raises `SandboxFailedError` when none can any more."""
    wanted = [
        sandbox
        for sandbox in found
        if template in (None, sandbox["template"]) and sandbox_id in (None, sandbox["sandbox_id"])
    ]
    if sandbox_id is not None and not wanted:
        raise SandboxFailedError(f"program {program.program_id!r} has no sandbox {sandbox_id!r} (any more)")
    for sandbox in wanted:
        if sandbox["stage"] in {"ready", "in_use"} and not sandbox.get("suspended"):  # an older proxy does not say
            return sandbox
    if wanted and all(sandbox["stage"] == "failed" for sandbox in wanted):
        raise SandboxFailedError(f"program {program.program_id!r}: {'; '.join(str(each['why']) for each in wanted)}")
    return None


def _check_time(program: Program, found: list[Sandbox], left_s: float, timeout_s: float) -> None:
    if left_s <= 0:
        stages = ", ".join(f"{each['template']}: {each['stage']}" for each in found) or "it has none"
        raise SandboxTimeoutError(f"program {program.program_id!r} has no usable sandbox after {timeout_s} s: {stages}")
