"""Which instance of an agent a call goes to: by a policy's route, otherwise the one with fewest outstanding calls."""

from __future__ import annotations


class Router:
    """An origin's known instances, its calls at each, and the routes that policies set."""

    def __init__(self) -> None:
        self.instances: dict[str, list[str]] = {}
        self.outstanding: dict[str, int] = {}
        """By location, the calls of this origin that are there."""
        self._session_routes: dict[tuple[str, str], str] = {}
        self._weights: dict[str, dict[str, float]] = {}
        self._credits: dict[str, dict[str, float]] = {}

    def add(self, location: str) -> None:
        """Add an instance."""
        known = self.instances.setdefault(agent_of(location), [])
        if location not in known:
            known.append(location)
        self.outstanding.setdefault(location, 0)

    def remove(self, location: str, *, is_gone: bool) -> None:
        """Stop sending there. An instance that `is_gone` is forgotten."""
        known = self.instances.get(agent_of(location), [])
        if location in known:
            known.remove(location)
        if is_gone:
            self.outstanding.pop(location, None)

    def count(self, location: str, change_count: int) -> None:
        """Count calls that went to a location, or came back."""
        if location in self.outstanding:
            self.outstanding[location] += change_count

    def set_route(self, agent: str, session: str, weights: tuple[tuple[str, float], ...]) -> None:
        """Set a policy's route: of one session, or of an agent by weight."""
        if session:
            if weights:
                self._session_routes[session, agent] = weights[0][0]
            else:
                self._session_routes.pop((session, agent), None)
            return
        self._credits.pop(agent, None)
        if weights:
            self._weights[agent] = dict(weights)
        else:
            self._weights.pop(agent, None)

    def end_session(self, session: str) -> None:
        """Forget a session's routes."""
        for key in [key for key in self._session_routes if key[0] == session]:
            del self._session_routes[key]

    def pick(self, session: str, agent: str, avoid: tuple[str, ...] = ()) -> str:
        """Return a location; "" if there is none. `avoid`: those that wait for this call, if there is another."""
        known = self.instances.get(agent)
        if not known:
            return ""
        if self._session_routes:
            routed = self._session_routes.get((session, agent))
            if routed is not None and routed in known and routed not in avoid:
                return routed
        if len(known) == 1:
            return known[0]
        if avoid:
            known = [each for each in known if each not in avoid] or known
        if (weights := self._weights.get(agent)) is not None:
            weighted = [each for each in known if weights.get(each, 0) > 0]
            if weighted:
                return self._pick_by_weight(agent, weighted, weights)
        return min(known, key=self.outstanding.__getitem__)

    def _pick_by_weight(self, agent: str, known: list[str], weights: dict[str, float]) -> str:
        """Give each its share of the calls, evenly over time: all earn their weight, the richest pays for all."""
        earned = self._credits.setdefault(agent, {})
        for each in known:
            earned[each] = earned.get(each, 0.0) + weights[each]
        best = max(known, key=earned.__getitem__)
        earned[best] -= sum(weights[each] for each in known)
        return best


def agent_of(location: str) -> str:
    """Return the agent of a location: `developer` of `developer/3`."""
    return location.rpartition("/")[0]
