"""Priority: sessions with a priority are moved away from busy instances."""

from thunderagent_workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Move what has a priority over 0 and waits where something runs to an instance that is idle."""
    first = sorted((each for each in view.sessions.values() if each.priority > 0), key=lambda each: -each.priority)
    for session in first:
        for location in session.at:
            blocked = view.instances[location]
            idle = [each for each in view.of(blocked.agent) if not each.load_count]
            if blocked.running and idle and not view.directives[blocked.agent].stateful:
                idle[0].queued_count += 1  # so that the next session sees it taken
                act.migrate(session.session, location, idle[0].location)
