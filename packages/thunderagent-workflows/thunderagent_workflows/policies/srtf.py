"""Shortest remaining time first: sessions that are furthest in their graph of calls go first."""

from thunderagent_workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Give each session the furthest stage of its calls as priority."""
    for session in view.changed:
        act.set_priority(session.session, session.stage_count)
