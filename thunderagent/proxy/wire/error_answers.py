"""How an error looks to whoever called: in the schema of the API that the path belongs to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from thunderagent.errors import BodyTooLargeError, KeyNeededError, RequestError, ThunderAgentError
from thunderagent.proxy.reading.dialects import CHAT, dialect_of
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import mark, target_of, told_path
from thunderagent.proxy.wire.front import Told
from thunderagent.proxy.wire.request_id import REQUEST_ID
from thunderagent.proxy.wire.stall import send_if_large

log = structlog.get_logger("thunderagent.proxy")

CLIENT_CLOSED_REQUEST = 499

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answering_errors(handler: Handler) -> Handler:
    """Wrap a handler so that errors become answers in the schema of the API that the path belongs to.

    Each has its status and code and, where it helps, Retry-After; every answer bears the request's id. A wrapper, not a
    middleware or a signal of aiohttp, which would cost every turn twice as much.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ThunderAgentError as error:
            response = error_response(request, error)
        except web.HTTPRequestEntityTooLarge as error:
            response = error_response(request, BodyTooLargeError(f"the body is larger than the limit: {error.text}"))
        except web.HTTPException as error:
            response = error_response(request, error)
        except ConnectionError:
            response = web.Response(status=CLIENT_CLOSED_REQUEST)  # never sent: the client left
        except Exception as error:
            log.exception("bug", method=request.method, path=told_path(request), request_id=REQUEST_ID.get())
            response = error_response(request, error)
        if "Expect" in request.headers and not request.content.is_eof() and not response.prepared:
            response.force_close()  # its body may still come, or not: nobody was told which
        mark(response)
        await send_if_large(request, response)
        return response

    return handle


def error_response(request: web.Request, error: Exception) -> web.Response:
    """Return the answer that tells a caller of an error."""
    try:
        target = target_of(request)
    except RequestError:
        target = None
    told = tell(target, error)
    return web.Response(status=told.status, headers=told.headers, body=told.body)


def tell(target: Target | None, error: Exception) -> Told:
    """Return what a caller is told of an error, in the schema of the API that it called."""
    status, code, message = 500, "internal_error", "the proxy has a bug; its log has the trace"
    headers = {"Content-Type": "application/json; charset=utf-8"}
    if isinstance(error, ThunderAgentError):
        status, code, message = error.status, error.code, error.message
        headers.update(error.answer_headers)
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        if status == KeyNeededError.status:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, web.HTTPException):
        status, code, message = error.status, "invalid_request", error.reason
    body = (dialect_of(target.spelt) if target is not None else CHAT).error(status, code, message)
    if body.get("type") == "error":  # Anthropic's schema, which has a place for it
        body["request_id"] = REQUEST_ID.get()
    return Told(status, headers, json.dumps(body).encode())
