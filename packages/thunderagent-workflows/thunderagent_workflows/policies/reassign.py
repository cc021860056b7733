"""Reassign: idle instances make room for busy agents."""

from thunderagent_workflows.view import Act, View

HIGH_COUNT, TIMES_RATIO = 2.0, 2.0
"""Calls an instance over which an agent has too few; how many times as many they must be as where one is taken away."""


def step(view: View, act: Act) -> None:
    """Start an instance of the busiest agent, in the place of one of a calm agent if nothing is free; one at a time."""
    calls = {agent: sum(each.load_count for each in view.of(agent)) for agent in view.directives}
    loads = {agent: count / max(1, len(view.of(agent))) for agent, count in calls.items()}
    busy = max(loads, key=loads.__getitem__)
    if loads[busy] <= HIGH_COUNT or len(view.of(busy)) >= view.directives[busy].max_instances:
        return
    act.provision(busy)
    if act.provisions or any(each.is_retiring for each in view.instances.values()):
        return
    for agent in sorted(loads, key=loads.__getitem__):
        instances, shares = view.of(agent), view.directives[agent].resources.keys() & view.directives[busy].resources
        keeps_count = len(instances) - 1
        if shares and keeps_count >= max(1, view.directives[agent].min_instances):
            if TIMES_RATIO * calls[agent] / keeps_count < loads[busy]:
                act.kill(min(reversed(instances), key=lambda each: each.load_count).location)
            return
