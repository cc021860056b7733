"""What can go wrong with a call; each says which call it was, and where."""

from __future__ import annotations


class WorkflowError(Exception):
    """The base of all errors of workflows; errors of calls are `CallError`s."""


class DeclarationError(WorkflowError):
    """A declaration does not match its class, or directives contradict each other."""


class CallError(WorkflowError):
    """A call failed. `path` has the agents that led to it; `instance` is where it ran; `remote_traceback` is a text.

    The agent's own exception is the `__cause__`.
    """

    def __init__(self, message: str, *, path: tuple[str, ...] = (), instance: str = "", remote_traceback: str = ""):
        super().__init__(message)
        self.message = message
        self.path = path
        self.instance = instance
        self.remote_traceback = remote_traceback

    @property
    def agent(self) -> str:
        """The agent that was called."""
        return self.instance.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.message}\n{self.remote_traceback}" if self.remote_traceback else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _call_error, (type(self), self.message, self.path, self.instance, self.remote_traceback, self.__cause__)


class LostError(CallError):
    """The instance, controller or node that a call ran on or waited at is gone."""


class SessionEndedError(CallError):
    """The session ended before the call did, or before its code wanted a call, a turn or managed state."""


class EndedError(CallError):
    """The deployment ended before the call did."""


class DeadlockError(CallError):
    """A call would wait for itself, or block the event loop that it needs; `path` has the calls that wait."""


class StateError(WorkflowError):
    """Managed state was used outside a session, in a batch, or by an agent that is not declared `managed`."""


class StoreError(WorkflowError):
    """The node store refused a command."""


class Preempted(Exception):  # noqa: N818 - no error: how a method says that it stopped as asked
    """Raised by a method that was asked to stop; its next run continues from `checkpoint`."""

    def __init__(self, checkpoint: object = None) -> None:
        super().__init__("preempted")
        self.checkpoint = checkpoint


def _call_error(
    kind: type[CallError],
    message: str,
    path: tuple[str, ...],
    instance: str,
    remote_traceback: str,
    cause: BaseException | None,
) -> CallError:
    error = kind(message, path=path, instance=instance, remote_traceback=remote_traceback)
    error.__cause__ = cause
    return error
