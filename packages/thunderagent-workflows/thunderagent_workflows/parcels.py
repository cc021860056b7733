"""Messages on their way between processes: bytes, each with what must be known if they cannot be read.

What an agent takes and returns is a stranger's: it may not pickle, or not be there to be unpickled. Then the call fails
and says so; nothing else does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Outcome
from thunderagent_workflows.errors import CallError
from thunderagent_workflows.state import SessionState

Dumps = Callable[[Any], bytes]


class Parcel(NamedTuple):
    """One message. `call_id` and `for_id` are a call's or a result's, whose content is a stranger's; else 0.

    `session` is set where the message must not reach the next session of that name, nor begin it anew, if this one ends
    on the way. `ends_count` says how many ends of sessions its sender had heard of.
    """

    sender: str
    to: str
    content: bytes
    call_id: int = 0
    for_id: int = 0
    is_result: bool = False
    session: str = ""
    ends_count: int = 0


def pack(sender: str, to: str, message: Any, dumps: Dumps) -> tuple[Parcel | None, list[tuple[str, m.Result]]]:
    """Return a message's parcel, and what to tell origins of calls that cannot be sent."""
    kind = type(message)
    if kind is m.Result:
        content = _result(sender, message, dumps)
        return Parcel(sender, to, content, message.call_id, message.for_id, is_result=True), []
    try:
        content = dumps(message)
        if kind is m.Transfer:
            pickle.loads(content)  # noqa: S301 - what pickles may not come back
    except Exception as error:  # whatever a stranger's class raises
        if kind is m.Submit:
            return None, [_refused(message.call, to, error)]
        if kind is not m.Transfer:
            raise
        message, refused = _sound(message, dumps)
        return Parcel(sender, to, dumps(message)), refused
    return Parcel(sender, to, content, message.call.call_id if kind is m.Submit else 0), []


def unpack(parcel: Parcel) -> tuple[Any, m.Result | None]:
    """Return a message; or what to tell the sender of a call that cannot be read here. Raises for anything else."""
    try:
        return pickle.loads(parcel.content), None  # noqa: S301 - from our own processes
    except Exception as error:
        if not parcel.call_id:
            raise
        what = "the value" if parcel.is_result else "the arguments"
        text = f"{what} of call #{parcel.call_id} cannot be read at {parcel.to}: {type(error).__name__}: {error}"
        at = parcel.sender if parcel.is_result else parcel.to
        result = m.Result(parcel.call_id, parcel.for_id, Outcome(error=CallError(text, instance=at)))
        return (result, None) if parcel.is_result else (None, result)


def _result(sender: str, message: m.Result, dumps: Dumps) -> bytes:
    outcome = message.outcome
    try:
        content = dumps(message)
        if outcome.error is not None:
            pickle.loads(content)  # noqa: S301 - an exception may pickle, and not come back
    except Exception as error:
        outcome = replace(outcome, value=None, error=_bare(sender, outcome.error, error))
        return dumps(m.Result(message.call_id, message.for_id, outcome))
    return content


def _bare(sender: str, failure: BaseException | None, why: Exception) -> CallError:
    """Return a call's error without the agent's own exception, whose text it has; or that its value cannot be sent."""
    if isinstance(failure, CallError):
        path, text = failure.path, failure.remote_traceback
        return type(failure)(failure.message, path=path, instance=failure.instance, remote_traceback=text)
    text = str(failure) if failure is not None else f"the value cannot be sent: {_said(why)}"
    return CallError(text, instance=sender)


def _refused(call: Call, to: str, error: Exception) -> tuple[str, m.Result]:
    text = f"the arguments of {call.agent}.{call.method} cannot be sent: {_said(error)}"
    text += f"; called by {' > '.join(call.chain) or 'the driver'}"
    failure = CallError(text, path=(*call.chain, to), instance=to)
    return call.origin, m.Result(call.call_id, 0, Outcome(error=failure))


def _sound(message: m.Transfer, dumps: Dumps) -> tuple[m.Transfer, list[tuple[str, m.Result]]]:
    """Return a session that moves without what cannot go with it, and what to tell those that wait for that."""
    state, calls, subscribers, refused = message.state, [], dict(message.subscribers), []
    try:
        pickle.loads(dumps(state))  # noqa: S301
    except Exception as error:
        state = SessionState(broken=f"it could not move to {message.to}: {_said(error)}")
    for call in message.calls:
        try:
            pickle.loads(dumps(call))  # noqa: S301
            calls.append(call)
        except Exception as error:
            origin, result = _refused(call, message.to, error)
            refused.append((origin, result))
            for location, for_id in subscribers.pop(call.call_id, ()):
                refused.append((location, replace(result, for_id=for_id)))
    return replace(message, state=state, calls=calls, subscribers=subscribers), refused


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
