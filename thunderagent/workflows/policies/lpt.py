"""Longest processing time first: whoever had to go back in its graph of calls has most left to do."""

from thunderagent.workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Give each session, as priority, how far it has gone back."""
    for session in view.changed:
        act.set_priority(session.session, session.returns_count)
