"""What may go wrong on a connection."""

# interpreted: an exception class leaks when it is compiled

from __future__ import annotations


class NotHttpError(ValueError):
    """What came is not HTTP/1.1 that all servers read the same way; says why, in words of ours."""


class LeftError(ConnectionResetError):
    """The client left, or was cut off."""


class ClosedError(ConnectionError):
    """The server closed the connection, or sent what is not HTTP."""


class StaleError(ClosedError):
    """A connection that had carried other requests ended before a byte of this one's answer came."""


class SilentError(TimeoutError):
    """Nothing came for too long."""


class TotalError(TimeoutError):
    """The answer took too long in all."""


class UnreachedError(OSError):
    """No connection could be made; `is_refused` if nobody listens there."""

    is_refused = False


class ConnectLateError(TimeoutError):
    """The connection was not made in time."""


Failure = tuple[type[ClosedError] | type[SilentError] | type[TotalError], str]
"""Why an answer broke off."""
