"""Shortest remaining time first: whoever is furthest in its graph of calls has least left to do."""

from thunderagent.workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Give each session the furthest stage of its calls as priority."""
    for session in view.changed:
        act.set_priority(session.session, session.stage_count)
