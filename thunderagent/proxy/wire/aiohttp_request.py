"""What a request of aiohttp's has of ours: its target, what counts its body; and the head of its answer."""

from __future__ import annotations

from urllib.parse import unquote

from aiohttp import web
from aiohttp.http import RawRequestMessage
from yarl import URL

from thunderagent.errors import RequestError
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.exchange import KeptBody
from thunderagent.proxy.wire.request_id import REQUEST_ID, REQUEST_ID_HEADER

KEPT_BODY = web.RequestKey("kept_body", KeptBody)
"""Where a request has what counts its body, if that did not come with its head."""

_TARGET = web.RequestKey("target", object)
"""Where a request keeps its target, or the error that it has none."""


def routed(message: RawRequestMessage) -> tuple[RawRequestMessage, Target | RequestError]:
    """Return the head of a request with the URL that its target is routed by, and the target.

    A target that is refused is routed to nowhere in particular: whatever handles it raises the error.
    """
    try:
        target = Target.parse(message.path, message.headers.get("Host", ""))
    except RequestError as error:
        return message._replace(url=URL.build(path="/", encoded=True)), error
    if target.path + target.query == message.path:
        return message, target
    url = URL.build(path=target.path, query_string=target.query[1:], encoded=True)
    return message._replace(url=url), target


def keep_target(request: web.BaseRequest, target: Target | RequestError) -> None:
    """Have a request know its target."""
    request[_TARGET] = target


def target_of(request: web.BaseRequest) -> Target:
    """Return what a request asks for. Raises `RequestError` if its target was refused."""
    target = request[_TARGET]
    if isinstance(target, RequestError):
        raise RequestError(target.message)
    assert isinstance(target, Target)
    return target


def told_path(request: web.BaseRequest) -> str:
    """Return the path of a request for people to read, in messages, logs and spans."""
    target = request[_TARGET]
    return unquote(target.path) if isinstance(target, Target) else ""


def mark(response: web.StreamResponse) -> None:
    """Return the request's id with an answer whose head was not sent yet."""
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = REQUEST_ID.get()


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of an answer that its handler writes piece by piece."""
    mark(response)
    await response.prepare(request)
