"""Errors of aiohttp's handlers as answers, and what every answer has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from thunderagent.errors import BodyTooLargeError, RequestError, ThunderAgentError
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.wire.aiohttp_request import NEVER_WAITS_BYTES, target_of, told_path, write_eof
from thunderagent.proxy.wire.errors import ErrorAnswer, answer_of, plain_answer
from thunderagent.proxy.wire.headers import REQUEST_ID

log = structlog.get_logger("thunderagent.proxy")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_CLOSED_REQUEST = 499


def answering_errors(handler: Handler) -> Handler:
    """Wrap a handler so that errors become answers in the schema of the path's API.

    Each has its status and code and, where it helps, Retry-After; every answer has the request's id. It is a wrapper,
    because a middleware or a signal of aiohttp would cost every turn twice as much.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ThunderAgentError as error:
            response = _response(request, error)
        except web.HTTPRequestEntityTooLarge as error:
            response = _response(request, BodyTooLargeError(f"the body is larger than the limit: {error.text}"))
        except web.HTTPException as error:
            response = _plain(request, error.status, "invalid_request", error.reason)
        except ConnectionError:
            response = web.Response(status=CLIENT_CLOSED_REQUEST)  # never sent: the client left
        except Exception:
            log.exception("bug", method=request.method, path=told_path(request), request_id=REQUEST_ID.get())
            response = _plain(request, 500, "internal_error", "the proxy has a bug; its log has the trace")
        if "Expect" in request.headers and not request.content.is_eof() and not response.prepared:
            response.force_close()  # its body may still come or not: nobody told the client which
        if response.prepared:
            return response
        response.headers[REQUEST_ID_HEADER] = REQUEST_ID.get()
        body = response.body if isinstance(response, web.Response) else None
        if isinstance(body, bytes) and len(body) > NEVER_WAITS_BYTES:  # its client may have to be waited for
            await response.prepare(request)
            await write_eof(request, response)
        return response

    return handle


def _response(request: web.Request, error: ThunderAgentError) -> web.Response:
    return _sent(answer_of(error, _spelt(request)))


def _plain(request: web.Request, status: int, code: str, message: str) -> web.Response:
    return _sent(plain_answer(status, code, message, _spelt(request)))


def _sent(answer: ErrorAnswer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def _spelt(request: web.Request) -> str | None:
    try:
        return target_of(request).spelt
    except RequestError:
        return None
