"""Longest processing time first: sessions that had to go back in their graph of calls go first."""

from thunderagent_workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Give each session, as priority, how far it has gone back."""
    for session in view.changed:
        act.set_priority(session.session, session.returns_count)
