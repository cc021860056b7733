"""Calls that wait for themselves: a running one waits for another, which waits at an instance for that one's end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from thunderagent_workflows.core.call import Record
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.future import Handle, Waiting


def find_circle(waiting: Mapping[int, Collection[Waiting]], controllers: Mapping[str, Controller]) -> Handle | None:
    """Return a call for which a running one waits in vain, because it, or a call that it needs, waits for that one.

    `waiting` has the waits of running calls, and `controllers` are all of this node.
    """
    for start in list(waiting):
        seen, todo, looked_at = {start}, [start], set[Record]()
        while todo:
            waits = set(waiting.get(todo.pop(), ()))  # copied at once: a garbage collection may end some
            for waited in [handle for wait in waits for handle in wait.handles]:
                for record in _unresolved(waited, looked_at):
                    controller = controllers.get(record.executor)
                    if controller is None:
                        continue
                    running, call_id = controller.running, record.call.call_id
                    if call_id not in running and start in running:
                        return waited
                    for each in running:  # one, or a batch: the first one's code waits for all
                        if each not in seen:
                            seen.add(each)
                            todo.append(each)
    return None


def _unresolved(record: Record, looked_at: set[Record]) -> Iterator[Record]:
    """Yield a call without an outcome, and all that it needs, unless they have been `looked_at`."""
    todo = [record]
    while todo:
        each = todo.pop()
        if each.outcome is None and each not in looked_at:
            looked_at.add(each)
            yield each
            todo += each.needs
