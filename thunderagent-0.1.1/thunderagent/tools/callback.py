"""The driver for sandboxes that run elsewhere: it asks a service of the operator to make and remove them.

Theory of operation
===================
An operator who runs sandboxes in Modal, e2b, Daytona or a system of their own puts two HTTP endpoints in front of it,
and a template names them. Their requests and answers are the whole contract:

`POST prepare_url`, with the header `Idempotency-Key: SANDBOX_ID` and a JSON object: `sandbox_id`, `program_id` (empty
if it is kept warm), `template` (its name), `labels`, `expires_at` (whole seconds of Unix time), `ttl_s`, `image`,
`command`, `environment`, `ports`, and every other field of the template that describes the sandbox.

- 200 or 201: `{"handle": "sb-1", "address": "10.1.2.3", "ports": {"8000": ["10.1.2.3", 41234]}, "details": {...}}`, all
  but the handle optional. The sandbox is usable.
- 202, or the same with `"ready": false`: ask again, with GET, at `status_url` (or `Location`), every
  `ready_interval_s`; the answers there are the same. 303 with a `Location` means that too. Neither may lead to another
  origin, and other redirects are not followed.
- 4xx: no such sandbox will be made; 409: not now, there is a conflict; 507, or an error whose `code` has
  "insufficient" in it: no room; 429 and 5xx: not now. At the status URL 404 and 410 mean that it ended before it was
  usable. The text for people is read from `message`, `detail` or `error`, for the operator's log: an error tells
  clients only its kind, because an answer may come from anywhere.

`POST reclaim_url` with `{"handle", "sandbox_id"}`: any 2xx, or 404 and 410 if it is gone. The handle is empty if the
preparation failed or was given up before one was known, so `sandbox_id` alone must do. For a sandbox that a client
registered by itself, `sandbox_id` is empty instead.

The service must do the following, so that nothing is left there:

- A preparation with a known `Idempotency-Key` answers with that sandbox and makes no second one; after the sandbox was
  reclaimed, it makes it anew.
- A reclaim may come while the preparation still runs: then the sandbox that it makes must go too.
- It ends the sandbox at `expires_at`, by itself. Nothing here can find or end a sandbox that was forgotten here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote, unquote

import httpx2
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thunderagent.errors import (
    ConfigurationError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.faults import faults_of
from thunderagent.tools.base import OWNER_LABEL, RUN_LABEL, Change, Found, Order, Owner, Place, Usage
from thunderagent.tools.callback_urls import CallbackUrls, host_of, origin_of, url_of

_log = structlog.get_logger(__name__)

MAX_ANSWER_BYTES = 1024 * 1024
# How much of the other side's text goes into our messages.
_MAX_SAID_CHARACTERS = 300
# How long a failed or cancelled preparation waits for its leftovers to be removed.
_CLEAN_UP_S = 5.0
# Fields of a template that we enforce, irrelevant to the other side.
_OUR_FIELDS = {
    *("driver", "prepare_url", "reclaim_url", "prepare_timeout_s", "ready_interval_s"),
    *("program_classes", "warm_count", "kubernetes_kind", "namespace", "warm_pool"),
}

_SAID: dict[type[SandboxError], str] = {
    SandboxError: "the sandbox service gave an unusable answer",
    SandboxRefusedError: "the sandbox service refused",
    SandboxConflictError: "the sandbox service has a conflict",
    SandboxSpaceError: "the sandbox service has no room",
    SandboxEngineError: "the sandbox service cannot be reached, or fails",
    SandboxSetupError: "the sandbox ended before it was usable",
}
"""All that clients are told of an answer, by the kind of failure."""

_Port = Annotated[int, Field(gt=0, le=65535)]
_Host = Annotated[str, Field(max_length=255, pattern=r"^[0-9A-Za-z._:%\[\]-]*$")]


class _Answer(BaseModel):
    """The other side's report on a sandbox that it makes."""

    model_config = ConfigDict(frozen=True)

    handle: str = Field("", max_length=1024)
    address: _Host = ""
    ports: dict[_Port, tuple[_Host, _Port]] = {}
    details: dict[str, str] = {}
    ready: bool = True
    status_url: str = ""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        return {key: each for key, each in data.items() if each is not None} if isinstance(data, dict) else data


_NOTHING_KNOWN = _Answer()


@dataclass(frozen=True, slots=True)
class _Reply:
    """An answer as received: `location` is empty if it has none."""

    url: httpx2.URL
    status: int
    location: str
    body: bytes


class CallbackDriver:
    """Asks a service for sandboxes over HTTP.

    At most `concurrency_count` requests at a time prepare, as many reclaim at the operator's URLs, and as many at
    clients': none waits for another kind. A request without a whole answer after `request_timeout_s` has failed, and so
    has a preparation whose status URL fails for that long. `urls` says which URLs are the operator's, and where others
    may lead; without it all are the operator's. `token` is sent as `Authorization: Bearer` to the operator's URLs, and
    where these lead; never to a URL that a client gave.
    """

    kind = "callback"

    def __init__(
        self,
        owner: Owner,
        *,
        request_timeout_s: float = 30.0,
        concurrency_count: int,
        token: str = "",
        urls: CallbackUrls | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect to nothing yet; without `tls`, the usual authorities are trusted."""
        if not (token.isascii() and token.isprintable()):
            raise ConfigurationError("the callback token must be printable ASCII")
        self._owner = owner
        self._request_timeout_s = request_timeout_s
        self._token = token
        self._urls = urls
        self._preparing = asyncio.Semaphore(concurrency_count)
        self._reclaiming = {is_operators: asyncio.Semaphore(concurrency_count) for is_operators in (False, True)}
        self._in_flight_count = 0
        self._closed = asyncio.Event()
        # The semaphores limit requests; and httpx2's timeouts are for each read, but ours is for the whole answer.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=concurrency_count)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "thunderagent"}
        make = partial(httpx2.AsyncClient, verify=tls or True, trust_env=False, timeout=None, headers=headers)
        self._client = make(limits=limits, follow_redirects=False)
        # Connected to an address, and so for one request: a kept connection might be used for another name there.
        once = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._checked_client = make(limits=once, follow_redirects=False)

    def __repr__(self) -> str:
        return f"<CallbackDriver {self._in_flight_count} requests in flight>"

    async def open(self) -> None:
        """Do nothing: it connects on demand."""

    async def prepare(self, order: Order) -> Place:
        """Request a sandbox and return once the other side says that it is usable.

        Repeating the same order is safe. Raises `SandboxRefusedError` for a 4xx, `SandboxSpaceError`,
        `SandboxConflictError` and `SandboxSetupError` as explained above, `SandboxEngineError` without an answer or for
        429 and 5xx, and `SandboxError` for an invalid one. Unless nothing can have been made, the other side is then
        told to reclaim it; that is tried once, for a few seconds.
        """
        prepare_url, reclaim_url = url_of(order.template.prepare_url), url_of(order.template.reclaim_url)
        is_operators = self._is_operators(prepare_url)
        if self._urls is not None:
            self._urls.check_both(prepare_url, reclaim_url)
        headers = {"Idempotency-Key": order.sandbox_id, **self._authorization(is_operators=is_operators)}
        is_sent, answer = False, None
        try:
            async with self._preparing:
                is_sent = True
                reply = await self._send("POST", prepare_url, headers, self._wish(order), is_operators=is_operators)
            answer = _read_answer(reply, prepare_url, _NOTHING_KNOWN)
            answer = await self._until_ready(order, answer, prepare_url)
        except (SandboxError, asyncio.CancelledError) as error:
            if is_sent and (answer is not None or not _made_nothing(error)):
                await self._clean_up(order, reclaim_url, answer.handle if answer is not None else "")
            raise
        return Place(
            handle=_handle(order.sandbox_id, reclaim_url, answer.handle),
            address=answer.address,
            ports=answer.ports,
            details={"remote_handle": answer.handle, **(answer.details if is_operators else {})},
        )

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return the place of a client's own sandbox; nobody checks whether it exists.

        Raises `SandboxRefusedError` for a URL that is not http or https, or may not be called, or an empty name.
        """
        if not name:
            raise SandboxRefusedError("a sandbox that runs elsewhere needs a handle")
        url = url_of(reclaim_url)
        if self._urls is not None:
            self._urls.check(url)
        return Place(_handle("", url, name), details={"remote_handle": name})

    async def reclaim(self, handle: str) -> None:
        """Request the removal of a sandbox; 404 and 410 mean that it is already gone. Raises `SandboxError`."""
        sandbox_id, url, remote_handle = _read_handle(handle)
        await self._reclaim(sandbox_id, url, remote_handle)

    async def find(self) -> Sequence[Found]:
        """Return nothing: the other side cannot list what it has."""
        return ()

    async def sweep(self) -> None:
        """Do nothing: what is left elsewhere ends when it expires."""

    async def watch(self) -> AsyncGenerator[Change, None]:
        """Yield nothing until the driver is closed: the other side reports nothing by itself."""
        await self._closed.wait()
        changes: tuple[Change, ...] = ()
        for change in changes:
            yield change

    async def measure(self, handles: Sequence[str]) -> Usage:  # noqa: ARG002
        """Return nothing: the other side accounts for its sandboxes itself."""
        return Usage()

    async def close(self) -> None:
        """Close the connections; sandboxes stay."""
        self._closed.set()
        await self._client.aclose()
        await self._checked_client.aclose()

    def _wish(self, order: Order) -> dict[str, Any]:
        return {
            **order.template.model_dump(mode="json", exclude=_OUR_FIELDS),
            "sandbox_id": order.sandbox_id,
            "program_id": order.program_id,
            "template": order.template_name,
            "expires_at": int(order.expires_at_s),
            "labels": {**order.labels, OWNER_LABEL: self._owner.owner_id, RUN_LABEL: self._owner.run_id},
        }

    async def _until_ready(self, order: Order, answer: _Answer, prepare_url: httpx2.URL) -> _Answer:
        """Poll the status until the sandbox is usable, for as long as the caller waits.

        A single failed request says nothing about the sandbox: only failing for a request's timeout does.
        """
        loop = asyncio.get_running_loop()
        is_operators = self._is_operators(prepare_url)
        headers = self._authorization(is_operators=is_operators)
        heard_s = loop.time()
        while not answer.ready:
            await asyncio.sleep(order.template.ready_interval_s)
            status_url = _joined(prepare_url, answer.status_url)
            try:
                async with self._preparing:
                    reply = await self._send("GET", status_url, headers, is_operators=is_operators)
                answer = _read_answer(reply, prepare_url, answer)
            except SandboxEngineError:
                if loop.time() - heard_s >= self._request_timeout_s:
                    raise
            else:
                heard_s = loop.time()
        return answer

    async def _clean_up(self, order: Order, reclaim_url: httpx2.URL, remote_handle: str) -> None:
        """Tell the other side that nobody wants that sandbox. Errors are logged: its life is limited."""
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._reclaim(order.sandbox_id, reclaim_url, remote_handle)
        except (SandboxError, TimeoutError) as error:
            _log.warning(
                "sandbox may be left elsewhere until it expires",
                sandbox_id=order.sandbox_id,
                program_id=order.program_id,
                why=error.for_log if isinstance(error, SandboxError) else "no answer in time",
            )

    async def _reclaim(self, sandbox_id: str, url: httpx2.URL, remote_handle: str) -> None:
        # Only our own sandboxes have our ids: the token is for nobody else.
        is_operators = self._is_operators(url)
        is_ours = bool(sandbox_id) and is_operators
        body = {"handle": remote_handle, "sandbox_id": sandbox_id}
        async with self._reclaiming[is_ours]:
            headers = self._authorization(is_operators=is_ours)
            reply = await self._send("POST", url, headers, body, is_operators=is_operators)
        if not (200 <= reply.status < 300 or reply.status in {404, 410}):
            raise _error_of(reply)

    def _is_operators(self, url: httpx2.URL) -> bool:
        return self._urls is None or self._urls.is_operators(url)

    def _authorization(self, *, is_operators: bool) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token and is_operators else {}

    async def _send(
        self,
        method: str,
        url: httpx2.URL,
        headers: Mapping[str, str],
        body: dict[str, Any] | None = None,
        *,
        is_operators: bool,
    ) -> _Reply:
        """Send one request and read the whole answer, whatever its status.

        `is_operators` says that the URL is a template's, or that one led there: it is called wherever its name leads.
        """
        self._in_flight_count += 1
        try:
            async with asyncio.timeout(self._request_timeout_s):
                if is_operators or self._urls is None:
                    return await self._receive(self._client, method, url, url, headers, body)
                return await self._send_checked(self._urls, method, url, headers, body)
        except TimeoutError as error:
            told = f"{url.host} did not answer within {self._request_timeout_s:g} s"
            raise _failure(SandboxEngineError, told) from error
        except httpx2.HTTPError as error:
            told = f"{url.host} cannot be reached: {str(error) or type(error).__name__}"
            raise _failure(SandboxEngineError, told) from error
        finally:
            self._in_flight_count -= 1

    async def _send_checked(
        self,
        urls: CallbackUrls,
        method: str,
        url: httpx2.URL,
        headers: Mapping[str, str],
        body: dict[str, Any] | None,
    ) -> _Reply:
        """Send to the addresses that were checked, one after the other until one accepts the connection."""
        *others, last = await urls.addresses_of(url)
        for address in others:
            try:
                return await self._receive(self._checked_client, method, url, _at(url, address), headers, body)
            except httpx2.ConnectError:
                continue
        return await self._receive(self._checked_client, method, url, _at(url, last), headers, body)

    async def _receive(
        self,
        client: httpx2.AsyncClient,
        method: str,
        url: httpx2.URL,
        there: httpx2.URL,
        headers: Mapping[str, str],
        body: dict[str, Any] | None,
    ) -> _Reply:
        """Send to `url` by a connection to the host of `there`, which must show the certificate of `url`'s."""
        received = bytearray()
        named = {"Host": url.netloc.decode("ascii"), **headers}
        request = client.build_request(method, there, headers=named, json=body)
        request.extensions = {**request.extensions, "sni_hostname": host_of(url)}
        response = await client.send(request, stream=True)
        try:
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > MAX_ANSWER_BYTES:
                    raise _failure(SandboxError, f"{url.host} answered more than {MAX_ANSWER_BYTES} bytes")
        finally:
            await response.aclose()
        return _Reply(url, response.status_code, response.headers.get("Location", ""), bytes(received))


def _at(url: httpx2.URL, address: str) -> httpx2.URL:
    """Return a URL with a numeric address as its host."""
    return url.copy_with(host=address)


def _failure(kind: type[SandboxError], told: str) -> SandboxError:
    """Return an error that tells clients its kind, and `told` to the operator's log."""
    error = kind(_SAID[kind])
    error.for_operators = told
    return error


def _made_nothing(error: BaseException) -> bool:
    """Return whether a request to prepare certainly made nothing: it was refused, or did not reach the other side."""
    return isinstance(error, SandboxRefusedError) or isinstance(error.__cause__, httpx2.ConnectError)


def _read_answer(reply: _Reply, prepare_url: httpx2.URL, known: _Answer) -> _Answer:
    """Return the other side's report, completed by its earlier one (`known`)."""
    is_asked_again = known != _NOTHING_KNOWN
    if is_asked_again and reply.status in {404, 410}:
        raise _failure(SandboxSetupError, _told(reply))
    if reply.status not in {200, 201, 202, 303}:
        raise _error_of(reply)
    said: dict[str, Any] = {}
    if reply.status != 303 and (reply.body or reply.status != 202):
        try:
            said = _Answer.model_validate_json(reply.body).model_dump(exclude_unset=True)
        except ValidationError as error:
            said_wrong = "; ".join(faults_of(error))[:_MAX_SAID_CHARACTERS]
            raise _failure(SandboxError, f"{reply.url.host} gave an unexpected answer: {said_wrong}") from error
    is_ready = reply.status in {200, 201} and said.get("ready", True)
    if reply.location and not is_ready:
        said = {"status_url": str(_joined(reply.url, reply.location)), **said}
    answer = known.model_copy(update={**said, "ready": is_ready})
    if is_ready and not answer.handle:
        raise _failure(SandboxError, f"{reply.url.host} made a sandbox but gave no handle")
    if not is_ready:
        if not answer.status_url:
            raise _failure(SandboxError, f"{reply.url.host} has no sandbox ready, and gave no status_url")
        _joined(prepare_url, answer.status_url)
    return answer


class _Complaint(BaseModel):
    """The human text, and the machine code, of an error answer in one of the usual shapes."""

    message: str = ""
    code: str = ""

    @model_validator(mode="before")
    @classmethod
    def _usual_shapes(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("error"), dict):
            data = data["error"]
        if not isinstance(data, dict):
            return {"message": data} if isinstance(data, str) else {}
        text = next((data[key] for key in ("message", "detail", "error") if isinstance(data.get(key), str)), "")
        return {"message": text, "code": data["code"] if isinstance(data.get("code"), str) else ""}


def _complaint_of(reply: _Reply) -> _Complaint:
    try:
        return _Complaint.model_validate_json(reply.body)
    except ValidationError:
        return _Complaint(message=reply.body.decode(errors="replace"))


def _told(reply: _Reply) -> str:
    """Return an error answer's message as one short line."""
    line = " ".join(_complaint_of(reply).message.split())
    text = "".join(each for each in line if each.isprintable())[:_MAX_SAID_CHARACTERS]
    return f"{reply.url.host} answered {reply.status}" + (f": {text}" if text else "")


def _error_of(reply: _Reply) -> SandboxError:
    status, told = reply.status, _told(reply)
    if status == 507 or (status >= 400 and "insufficient" in _complaint_of(reply).code.lower()):
        return _failure(SandboxSpaceError, told)
    if status >= 500 or status in {408, 425, 429}:
        return _failure(SandboxEngineError, told)
    if status == 409:
        return _failure(SandboxConflictError, told)
    if status >= 400:
        return _failure(SandboxRefusedError, told)
    if status >= 300:
        return _failure(SandboxRefusedError, f"{told}; redirects are not followed")
    return _failure(SandboxError, told)


def _joined(base: httpx2.URL, reference: str) -> httpx2.URL:
    """Return the URL of a reference relative to `base`; refuse another origin: the token is for this one."""
    try:
        url = base.join(reference)
        is_same_origin = origin_of(url) == origin_of(base)
    except (httpx2.InvalidURL, ValueError) as error:
        raise _failure(SandboxError, f"{base.host} gave a URL that cannot be read: {error}") from error
    if not is_same_origin:
        raise _failure(SandboxError, f"{base.host} leads to another origin, {url.scheme}://{url.netloc.decode()}")
    return url


def _handle(sandbox_id: str, reclaim_url: httpx2.URL, remote_handle: str) -> str:
    """Return a handle with everything that reclaiming needs, so that it works after a restart too.

    Format `SANDBOX_ID@RECLAIM_URL#REMOTE_HANDLE`; the first and the last are percent-escaped.
    """
    return f"{quote(sandbox_id, safe='')}@{reclaim_url}#{quote(remote_handle, safe='')}"


def _read_handle(handle: str) -> tuple[str, httpx2.URL, str]:
    sandbox_id, at, rest = handle.partition("@")
    url, mark, remote_handle = rest.rpartition("#")
    if not at or not mark:
        raise SandboxRefusedError("not a handle of a callback sandbox")
    return unquote(sandbox_id), url_of(url), unquote(remote_handle)
