"""What may go wrong on a connection."""

# interpreted: an exception class leaks when it is compiled

from __future__ import annotations


class NotHttpError(ValueError):
    """The input is not HTTP/1.1 that all servers read the same way; the message says why, in our own words."""


class LeftError(ConnectionResetError):
    """The client left, or was cut off."""


class ClosedError(ConnectionError):
    """The server closed the connection."""


class StaleError(ClosedError):
    """A reused connection ended before the first byte of this request's answer."""


class GarbledError(ClosedError):
    """The server began to answer, and what it sent cannot be read as an answer."""


class LostError(ConnectionError):
    """The server was declared lost while the request was on its way."""


class SilentError(TimeoutError):
    """Nothing arrived for too long."""


class TotalError(TimeoutError):
    """The answer took too long in total."""


class UnreachedError(OSError):
    """No connection could be made; `is_refused` if nobody listens there."""

    is_refused = False


class ConnectLateError(TimeoutError):
    """The connection was not made in time."""


Failure = tuple[type[ClosedError] | type[GarbledError] | type[LostError] | type[SilentError] | type[TotalError], str]
"""Why an answer broke off."""
