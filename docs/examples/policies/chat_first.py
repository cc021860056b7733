# chat_first.py
from dataclasses import dataclass

from thunderagent.programs.policy import GlobalPolicy


@dataclass(frozen=True)
class ChatFirst(GlobalPolicy):
    waiting_count: int = 2  # so many may wait for each replica of theirs
    period_s: float = 1.0
    name: str = "chat_first"

    def decide(self, view):
        replicas = list(view.replicas)
        if len(replicas) < 2:
            return  # nothing to share out
        own = next((dict(route.targets) for route in view.routes() if route.name == "chat"), {})
        mine = [replica for replica in replicas if replica.replica_id in own] or replicas[:1]
        waiting_count = sum(view.waiting_count_for(replica) for replica in mine)
        if waiting_count >= self.waiting_count * len(mine) and len(mine) < len(replicas) - 1:
            mine.append(min((r for r in replicas if r not in mine), key=lambda r: r.account.demand_tokens))
        elif not waiting_count and len(mine) > 1 and not mine[-1].account.turn_count:
            mine.pop()
        wanted = {replica.replica_id: 1.0 for replica in mine}
        if wanted != own:
            view.propose_route("class", "chat", wanted)
            view.propose_route("all", "", {r.replica_id: 1.0 for r in replicas if r not in mine})
