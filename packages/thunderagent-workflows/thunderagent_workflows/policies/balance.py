"""Balance: slower instances, and those with more waiting, get fewer of the new calls."""

from thunderagent_workflows.view import Act, View


def step(view: View, act: Act) -> None:
    """Weigh each agent's instances by how soon each would begin one more call; leave alike ones alone."""
    for agent in view.directives:
        instances = view.of(agent)
        if len(instances) < 2:
            continue
        mean_s = view.mean_s(agent) or 1.0  # for those that have ended no call
        due_s = {each.location: (each.load_count + 1) * (each.mean_s or mean_s) for each in instances}
        if max(due_s.values()) < 2 * min(due_s.values()):
            act.route(agent=agent)
        else:
            # In coarse steps, so that a route changes when the load does and not in every period.
            act.route(agent=agent, to={each: round(4 * min(due_s.values()) / s) / 4 for each, s in due_s.items()})
