"""A deployment of the pure state machines alone, whose messages arrive in any order that a test chooses."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Maker, Outcome, Record, Rules
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.core.directory import Directory
from thunderagent_workflows.core.origin import DIRECTORY, Origin
from thunderagent_workflows.core.router import agent_of

if TYPE_CHECKING:
    from collections.abc import Callable

RULES = {
    "plain": Rules(),
    "managed": Rules(is_managed=True),
    "stateful": Rules(is_stateful=True),
    "both": Rules(is_stateful=True, is_managed=True),
    "batch": Rules(batch_count=3, mixes_sessions=True),
    "soft": Rules(is_preemptable=True),
    "soft-managed": Rules(is_preemptable=True, is_managed=True),
}
SESSIONS = ("s0", "s1", "s2")


class AgentError(Exception):
    """An agent's error."""


class Model:
    """Two nodes with an origin each, instances of some agents, and the directory.

    `choose(n)` returns a number below n: it makes all random choices. Messages are copied on their way, as between
    processes.
    """

    def __init__(
        self, choose: Callable[[int], int], agents: tuple[str, ...] = tuple(RULES), instances: int = 2
    ) -> None:
        self.choose = choose
        self.agents = agents
        self.machines: dict[str, Any] = {name: Origin(name, RULES) for name in ("n0", "n1")}
        self.machines[DIRECTORY] = Directory()
        self.node_of: dict[str, str] = {}
        self.channels: dict[tuple[str, str], deque[Any]] = defaultdict(deque)
        self.numbers: Counter[str] = Counter()
        self.records: list[Record] = []
        self.interrupting: dict[str, set[int]] = defaultdict(set)
        self.ran: Counter[int] = Counter()
        self.order: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.places: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.moves: list[m.Moved] = []
        self.crashed = False
        self.retired: set[str] = set()
        for agent in agents:
            for _ in range(instances):
                self.provision(agent)
        self.deliver_all()

    # --- message delivery

    def send(self, sender: str, to: str, message: Any) -> None:
        self.channels[sender, to].append(copy.deepcopy(message))

    def handle(self, name: str, message: Any) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        for each in machine.handle(message):
            if isinstance(each, m.Send):
                self.send(name, each.to, each.message)
            elif isinstance(each, m.Run):
                self.begin(name, each.calls)
            elif isinstance(each, m.Interrupt):
                self.interrupting[name] |= {call.call_id for call in each.calls}
            elif isinstance(each, m.Moved):
                self.moves.append(each)
            elif isinstance(each, m.Stays):
                self.broadcast("shell", m.Joined(name))
            elif isinstance(each, m.Ended) and name in self.machines:
                controller = self.machines.pop(name)
                assert not controller.states
                self.retired.add(name)
                self.broadcast(name, m.Gone(name, is_clean=True))
        if isinstance(machine, Controller):
            self.check_running(machine)

    def broadcast(self, sender: str, message: Any) -> None:
        for to in self.machines:
            self.send(sender, to, message)

    def deliver(self, channel: tuple[str, str]) -> None:
        sender, to = channel
        message = self.channels[channel].popleft()
        if to in self.machines:
            self.handle(to, message)
        elif sender in self.machines:  # its carrier reports that the receiver is gone
            self.send(to, sender, m.Gone(to, is_clean=to in self.retired))

    def waiting_channels(self) -> list[tuple[str, str]]:
        return [channel for channel, messages in self.channels.items() if messages]

    def deliver_all(self) -> None:
        while channels := self.waiting_channels():
            self.deliver(channels[self.choose(len(channels))])

    # --- the shell's work

    def provision(self, agent: str) -> str:
        location = f"{agent}/{self.numbers[agent]}"
        self.numbers[agent] += 1
        self.machines[location] = Controller(location, RULES[agent])
        self.node_of[location] = f"n{self.choose(2)}"
        for to in ("n0", "n1", DIRECTORY):
            if to in self.machines:
                self.send("shell", to, m.Joined(location))
        return location

    def controllers(self, agent: str = "") -> list[str]:
        return [
            name
            for name, machine in self.machines.items()
            if isinstance(machine, Controller) and agent in ("", machine.agent)
        ]

    def call(
        self, agent: str, session: str = "s0", needs: tuple[Record, ...] = (), node: str = "n0", chain: Any = ()
    ) -> Record:
        call = Call(len(self.records) + 1, Maker(session, node, chain), agent, f"m{self.choose(2)}")
        record = Record(call, needs)
        self.records.append(record)
        self.handle(node, m.Create(record))
        return record

    def begin(self, location: str, calls: list[Call]) -> None:
        rules = RULES[agent_of(location)]
        queue = self.machines[location].queue
        assert len(calls) <= rules.batch_count
        assert len({call.method for call in calls}) == 1
        assert rules.mixes_sessions or len({call.session for call in calls}) == 1
        mine = max(queue.priorities.get(call.session, 0.0) for call in calls)
        assert queue.top_priority is None or queue.top_priority <= mine or rules.mixes_sessions
        for call in calls:
            assert not call.missing
            key = (call.agent, call.session)
            if rules.is_pinned and not self.crashed:
                others = [
                    each.call_id
                    for other in self.controllers(call.agent)
                    for each in self.machines[other].running.values()
                    if each.session == call.session and other != location
                ]
                assert others == [], f"{key} runs at two places"

    def finish(self, location: str, call: Call, *, fails: bool = False) -> None:
        controller = self.machines[location]
        key = (call.agent, call.session)
        self.ran[call.call_id] += 1
        assert self.ran[call.call_id] == 1, f"call {call.call_id} ran twice"
        if call.values:
            assert call.values == {need: ("value", need) for need in call.values}
        self.places[key].add(location)
        if RULES[call.agent].is_managed:
            state = controller.states.setdefault(call.session, [])
            if not self.crashed:
                assert state == self.order[key], f"the state of {key} at {location}"
            state.append(call.call_id)
        self.order[key].append(call.call_id)
        self.interrupting[location].discard(call.call_id)
        outcome = Outcome(error=AgentError()) if fails else Outcome(("value", call.call_id))
        self.handle(location, m.Finished(call.call_id, outcome))

    def interrupt(self, location: str, call: Call) -> None:
        self.interrupting[location].discard(call.call_id)
        self.handle(location, m.Interrupted(call.call_id, ("checkpoint", call.call_id)))

    def crash(self, names: list[str]) -> None:
        """Lose machines, and the last messages that they sent; the others learn of it at some time."""
        self.crashed = True
        for name in names:
            self.machines.pop(name, None)
            for (sender, _), messages in self.channels.items():
                if sender == name:
                    for _ in range(self.choose(len(messages) + 1)):
                        messages.pop()
        for name in names:
            self.broadcast("shell", m.Gone(name))

    def crash_node(self, node: str) -> None:
        self.crash([node, *(each for each in self.controllers() if self.node_of[each] == node)])

    def retire(self, location: str) -> None:
        agent = agent_of(location)
        others = tuple(
            each for each in self.controllers(agent) if each != location and not self.machines[each].is_retiring
        )
        if not others or self.machines[location].is_retiring:
            return
        for to in ("n0", "n1", DIRECTORY):
            if to in self.machines:
                self.send("shell", to, m.Leaving(location))
        self.handle(location, m.Retire(others))

    # --- one random step

    def step(self, *, may_crash: bool = False) -> None:
        kind = self.choose(100)
        if kind < 25:
            self.some_call()
        elif kind < 65:
            channels = self.waiting_channels()
            if channels:
                self.deliver(channels[self.choose(len(channels))])
        elif kind < 82:
            self.some_end()
        elif kind < 92:
            names = self.controllers()
            name = names[self.choose(len(names))]
            others = self.controllers(agent_of(name))
            session = SESSIONS[self.choose(3)]
            self.handle(name, m.Migrate(session, others[self.choose(len(others))]))
        elif kind < 95:
            names = self.controllers()
            priority = float(self.choose(3))
            self.handle(names[self.choose(len(names))], m.SetPriorities({SESSIONS[self.choose(3)]: priority}))
        elif kind < 96:
            self.provision(self.agents[self.choose(len(self.agents))])
        elif kind < 98:
            names = self.controllers()
            self.retire(names[self.choose(len(names))])
        elif may_crash:
            self.some_loss(kind)

    def some_loss(self, kind: int) -> None:
        if not self.choose(4):
            self.crashed = True  # the checks of a session's whole life no longer apply
            ended = SESSIONS[self.choose(3)]
            self.handle(DIRECTORY, m.SessionEnded(ended))  # at once: it is where sessions end
            for to in [each for each in self.machines if each != DIRECTORY]:
                self.send("n0", to, m.SessionEnded(ended))
            return
        if kind == 98 or "n1" not in self.machines:
            names = self.controllers()
            self.crash([names[self.choose(len(names))]])
        else:
            self.crash_node("n1")
        self.refill()

    def refill(self) -> bool:
        """Provide instances for agents without any; return whether there was such an agent."""
        empty = [agent for agent in self.agents if not self.controllers(agent)]
        for agent in empty:
            self.provision(agent)
        return bool(empty)

    def some_call(self) -> None:
        nodes = [name for name in ("n0", "n1") if name in self.machines]
        node = nodes[self.choose(len(nodes))]
        mine = [record for record in self.records if record.call.origin == node][-6:]
        needs = tuple(dict.fromkeys(mine[self.choose(len(mine))] for _ in range(self.choose(3)) if mine))
        agent = self.agents[self.choose(len(self.agents))]
        chain: tuple[str, ...] = ()
        running = [name for name in self.controllers() if self.node_of[name] == node and self.machines[name].running]
        if running and self.choose(2):
            chain = (running[self.choose(len(running))],)
        self.call(agent, SESSIONS[self.choose(3)], needs, node, chain)

    def some_end(self) -> None:
        running = [(name, call) for name in self.controllers() for call in self.machines[name].running.values()]
        if not running:
            return
        name, call = running[self.choose(len(running))]
        if call.call_id in self.interrupting[name] and self.choose(3):
            self.interrupt(name, call)
        else:
            self.finish(name, call, fails=not self.choose(10))

    def settle(self) -> None:
        """Run everything in flight to its end."""
        while True:
            self.deliver_all()
            if self.refill():
                continue
            running = [(name, call) for name in self.controllers() for call in self.machines[name].running.values()]
            if not running:
                break
            name, call = running[self.choose(len(running))]
            if call.call_id in self.interrupting[name]:
                self.interrupt(name, call)
            else:
                self.finish(name, call)

    # --- invariants

    def check_running(self, controller: Controller) -> None:
        assert len(controller.running) <= controller.rules.batch_count

    def check_settled(self) -> None:
        """Check that every record has its outcome, and no machine holds anything finished."""
        for record in self.records:
            if record.call.origin not in self.machines:
                continue
            assert record.outcome is not None, (
                f"call {record.call.call_id} {record.call!r} at {record.executor!r} hangs"
            )
            if not self.crashed:
                assert record.outcome.error is None or isinstance(record.outcome.error, AgentError)
                if record.outcome.error is None:
                    assert record.outcome.value == ("value", record.call.call_id)
                    assert self.ran[record.call.call_id] == 1
        for machine in self.machines.values():
            if isinstance(machine, Origin):
                assert machine.records == {}
                assert not any(machine._unrouted.values())
            if isinstance(machine, Directory):
                assert {*machine._expected} <= {*machine.homes}
            if isinstance(machine, Controller):
                moves = machine.moves
                tables = (machine.here, machine.lacking, machine.subscribers, moves.under_way, moves.sent)
                left = [*tables, machine.queue, *moves.held.values()]
                assert not any(len(each) for each in left), f"{machine}: {left}"
        if not self.crashed:
            self.check_sessions()

    def check_sessions(self) -> None:
        """Check that stateful calls ran in order at one instance, and state moved with its session completely."""
        for (agent, session), ran in self.order.items():
            if RULES[agent].is_stateful:
                assert len(self.places[agent, session]) == 1, f"{agent} of {session} ran at two instances"
                for node in ("n0", "n1"):
                    of_node = [each for each in ran if self.records[each - 1].call.origin == node]
                    assert of_node == sorted(of_node), f"{agent} of {session} ran out of order"
            if RULES[agent].is_managed and ran:
                states = [self.machines[each].states.get(session) for each in self.controllers(agent)]
                assert [state for state in states if state] == [ran]
