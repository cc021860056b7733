"""Headers of every request to an engine: ids are added, our keys removed, the engine's key added."""

# compiled: each turn passes here

from __future__ import annotations

from typing import Final, Protocol

from multidict import CIMultiDict, istr

from thunderagent.proxy.gate.keys import KEY_HEADER, Keyring
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.wire.headers import REQUEST_ID

_KEY_HEADER: Final = istr(KEY_HEADER)


class TraceContext(Protocol):
    """Tells engines which trace a request belongs to."""

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Write the W3C trace context of the current request."""

    def answered(self, status: int) -> None:
        """Note that the head of an engine's answer arrived."""


class Outgoing:
    """Changes headers in place; idempotent, because retries repeat it."""

    def __init__(
        self,
        keyring: Keyring,
        backend_api_key: str = "",
        tracing: TraceContext | None = None,
        *,
        forwards_authorization: bool = True,
    ) -> None:
        """Remove the keys of `keyring`; send `backend_api_key`, if any, to the engines.

        Without `forwards_authorization` the clients' header is for us alone, because it names programs.
        """
        self._keyring = keyring or None
        """Fixed at construction, as is whether keys are required."""
        self._forwards_authorization = forwards_authorization
        self._authorization = f"Bearer {backend_api_key}" if backend_api_key else ""
        self._tracing = tracing
        self.answered = None if tracing is None else tracing.answered
        """Notes that the head of an engine's answer arrived; None if nobody wants to know."""

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a request."""
        request_id = REQUEST_ID.get()
        if request_id and headers.get(REQUEST_ID_HEADER) != request_id:
            headers[REQUEST_ID_HEADER] = request_id
        if self._keyring is not None:
            self._keyring.take_out(headers)
        elif _KEY_HEADER in headers:
            headers.popall(_KEY_HEADER)
        if not self._forwards_authorization and headers.get("Authorization") != self._authorization:
            headers.popall("Authorization", None)
        # If data needs a key of ours, what is left in Authorization is meant for the engine. If not, we cannot tell,
        # because most clients must send some text there: the engine gets the configured one.
        if self._authorization:
            asks = self._keyring is not None and self._keyring.has_data_keys
            if not (asks and "Authorization" in headers):
                headers["Authorization"] = self._authorization
        if self._tracing is not None:
            self._tracing.inject(headers)
