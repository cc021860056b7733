"""Head of line: a session that waits behind a long call goes to an idle instance."""

from thunderagent_workflows.view import Act, View

LONG_RATIO = 2.0
"""How many times as long as its agent's calls do on average what runs must have run to count as long."""


def step(view: View, act: Act) -> None:
    """Give each idle instance a session that waits where something has run for long."""
    for agent, directives in view.directives.items():
        instances = view.of(agent)
        idle = [each for each in instances if not each.load_count]
        if directives.stateful or not idle:
            continue
        mean_s = view.mean_s(agent)
        for blocked in sorted(instances, key=lambda each: each.running_since_s):
            has_run_s = view.now_s - blocked.running_since_s
            runs_here = {session for session, _ in blocked.running}
            waiting = sorted((line.oldest_s, session) for session, line in blocked.waiting.items())
            for _, session in waiting if blocked.running and has_run_s >= LONG_RATIO * mean_s else ():
                if idle and not (directives.managed and session in runs_here):
                    act.migrate(session, blocked.location, idle.pop().location)
