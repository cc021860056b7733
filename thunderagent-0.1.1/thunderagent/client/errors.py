"""What can go wrong between an agent and the proxy. Turns have the errors of the library that makes them."""

from __future__ import annotations


class ClientError(Exception):
    """The proxy did not do what was asked of it."""


class ProxyUnreachableError(ClientError):
    """No proxy answers at the address, or not in time."""


class ProxyRefusedError(ClientError):
    """The proxy answered with an error: its HTTP `status`, and the `code` that the guide lists, if there is one."""

    def __init__(self, message: str, *, status: int, code: str = "") -> None:
        """Keep what a caller may act on beside the sentence."""
        super().__init__(message)
        self.status = status
        self.code = code


class SandboxFailedError(ClientError):
    """A sandbox that was waited for could not be made, or ended by itself; the message says why."""


class SandboxTimeoutError(ClientError, TimeoutError):
    """No sandbox became usable in the time given; the message says what there is instead."""
