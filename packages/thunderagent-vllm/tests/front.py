"""This proxy's scheduler between the agents and the engine of the plugin's harness; run in vLLM's environment.

The scheduler and its policy are the real ones and get the events that they get on a server; the engine's scheduler is
the real one, too. Only the clock is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import SHARED_TOKENS, Engine, Front, run_load

from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    Pause,
    ProgramReleased,
    Release,
    ReplicaPolled,
    ReplicaUp,
    Tick,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
    WorkPolled,
)
from thunderagent.programs.scheduler import Scheduler

REPLICA_ID = "replica"
BYTES_PER_TOKEN = 4
POLL_S = TICK_S = 1.0
HOLD_S = 30.0
"""The default of `--engine-hold-s`."""


@dataclass
class _Turn:
    turn_id: int
    tokens: list[int]
    output: int
    program_id: str


class Proxy(Front):
    """Lets turns in as the proxy does; an engine with the plugin is told what the proxy tells it."""

    def __init__(self, engine: Engine, *, policy: str = "breakeven", told_ratio: float = 1.0, **settings: Any) -> None:
        """`told_ratio` is the capacity that the engine tells beside the one that it has; others are the policy's."""
        super().__init__(engine, told=engine.settings is not None)
        self.scheduler = Scheduler(load_policy(policy, settings))
        self.turns: dict[str, _Turn] = {}
        self.request_ids: dict[int, str] = {}
        self.capacity_tokens = int(told_ratio * engine.blocks * engine.block_tokens)
        if self.told:  # `EnginePlugins.capacity_tokens`
            had_tokens = engine.scheduler.thunderagent_tell([])["blocks"]["tokens"]
            self.capacity_tokens = min(self.capacity_tokens, had_tokens)
        self.started: set[str] = set()
        self.next_s = 0.0
        self.last = (0, 0, 0, 0, 0, 0)
        self.dispatch(ReplicaPolled(0.0, REPLICA_ID, self.capacity_tokens))
        self.dispatch(ReplicaUp(0.0, REPLICA_ID))

    def dispatch(self, event: Event) -> None:
        """Give the scheduler an event, and carry out what it decides."""
        self.carry_out(self.scheduler.handle(event))

    def carry_out(self, decisions: list[Decision]) -> None:
        """Send granted turns, and tell the engine what it should know."""
        ops = []
        for decision in decisions:
            if isinstance(decision, Grant):
                request_id = self.request_ids[decision.turn_id]
                turn = self.turns[request_id]
                hold_s = HOLD_S if self.told else None
                priority = decision.engine_priority or 0
                self.engine.add(request_id, turn.tokens, turn.output, turn.program_id, priority, hold_s)
            elif isinstance(decision, (Pause, Release)):
                ops.append(["pause" if isinstance(decision, Pause) else "release", decision.program_id])
        if ops and self.told:
            self.engine.scheduler.thunderagent_tell(ops)

    def send(self, request_id: str, tokens: list[int], output: int, program_id: str) -> None:
        """Ask for a lease."""
        turn = _Turn(len(self.request_ids) + 1, tokens, output, program_id)
        self.turns[request_id], self.request_ids[turn.turn_id] = turn, request_id
        prompt_bytes, prefix = len(tokens) * BYTES_PER_TOKEN, ((1, SHARED_TOKENS * BYTES_PER_TOKEN),)
        now_s = self.engine.now_s
        self.dispatch(
            TurnAsk(now_s=now_s, turn_id=turn.turn_id, program_id=program_id, prompt_bytes=prompt_bytes, prefix=prefix)
        )

    def passed(self) -> None:
        """Report first tokens, poll, and tick."""
        engine = self.engine
        for request_id in engine.cached:
            if request_id in self.turns and request_id not in self.started:
                self.started.add(request_id)
                self.dispatch(TurnStarted(engine.now_s, self.turns[request_id].turn_id))
        if engine.now_s >= self.next_s:
            self.next_s = engine.now_s + POLL_S
            for request_id in self.started:
                made_count = len(engine.outputs.get(request_id, ()))
                self.dispatch(TurnProgressed(engine.now_s, self.turns[request_id].turn_id, made_count))
            self.poll()
            self.dispatch(Tick(engine.now_s))

    def poll(self) -> None:
        """Read the engine's metrics; blocks that are held for programs do not count as used."""
        engine = self.engine
        stats = engine.scheduler
        preemption_count = engine.preemption_count
        now = (
            engine.prompt_tokens,
            engine.hit_tokens,
            preemption_count,
            engine.computed_tokens,
            engine.generated_tokens,
            engine.step_count,
        )
        prompt, hit, preempted, computed, generated, steps = (a - b for a, b in zip(now, self.last, strict=True))
        self.last = now
        pinned_count = stats.agents.pins.block_count if self.told else 0
        used_ratio = 1.0 - (engine.free_blocks + pinned_count) / (engine.blocks - 1)
        self.dispatch(
            ReplicaPolled(
                engine.now_s,
                REPLICA_ID,
                self.capacity_tokens,
                hit / prompt if prompt else None,
                prompt,
                preempted,
                max(0.0, used_ratio),
                len(stats.waiting),
            )
        )
        self.dispatch(WorkPolled(engine.now_s, REPLICA_ID, computed, generated, steps, preempted))

    def ended(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        """Report a turn's usage."""
        turn = self.turns.pop(request_id)
        self.started.discard(request_id)
        cached_tokens = self.engine.cached.pop(request_id)
        now_s = self.engine.now_s
        self.dispatch(
            TurnEnd(
                now_s=now_s,
                turn_id=turn.turn_id,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
                tool="tool",
            )
        )

    def released(self, program_id: str) -> None:
        """Report the end of a program."""
        self.dispatch(ProgramReleased(self.engine.now_s, program_id))


def run_arm(model: str, arm: dict[str, Any], count: int, seed: int) -> dict[str, float]:
    """Return the figures of an arm: `plugin` has the plugin's settings, `proxy` those of the proxy."""
    engine = Engine(model, arm.get("plugin"), policy="priority" if "proxy" in arm else "fcfs")
    front = Proxy(engine, **arm["proxy"]) if "proxy" in arm else Front(engine, told=arm.get("told", False))
    return run_load(engine, count, seed, front=front, strangers_s=arm.get("strangers_s", 0.0))
