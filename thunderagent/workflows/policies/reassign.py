"""Reassign: instances of an agent with little to do make room for those of one with much."""

from thunderagent.workflows.view import Act, View

HIGH_COUNT, LOW_COUNT = 2.0, 0.5
"""Calls an instance over and under which an agent has too few and too many instances."""


def step(view: View, act: Act) -> None:
    """Start an instance of the busiest agent, in the place of one of the least busy if nothing else is free."""
    loads = {}
    for agent in view.directives:
        instances = view.of(agent)
        loads[agent] = sum(each.load_count for each in instances) / max(1, len(instances))
    busy = max(loads, key=loads.__getitem__)
    if loads[busy] <= HIGH_COUNT or len(view.of(busy)) >= view.directives[busy].max_instances:
        return
    act.provision(busy)
    if act.provisions:
        return
    for agent in sorted(loads, key=loads.__getitem__):
        idle = [each for each in view.of(agent) if not each.load_count]
        shares = view.directives[agent].resources.keys() & view.directives[busy].resources.keys()
        if loads[agent] < LOW_COUNT and idle and shares:
            act.kill(idle[-1].location)
            return
