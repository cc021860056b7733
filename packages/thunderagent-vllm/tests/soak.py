"""Hours of load with faults on vLLM's real scheduler; run in vLLM's environment: `python soak.py MODEL_FOLDER SECONDS`.

Programs send turn after turn. Clients leave, strangers come, messages between turns are lost, the prefix cache is reset,
a decision of the plugin raises, and the engine starts anew: then what was in it is sent again, as a proxy does. Each
request must end with its tokens; pins stay within their bound at each step; and what the plugin knows is gone when
nobody is there. It prints a line of JSON for each life of an engine, and one for all.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import logging
import random
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Engine, token_of

PROGRAMS_COUNT = 16
LIFE_S = 900.0
"""How long an engine lives: every second one with a plugin that fails after a while."""

FAILING_HOOKS = ("ended", "waiting_key", "pins_to_take", "chunk_tokens", "read", "tell")


@dataclass
class _Turn:
    program_id: str
    request_id: str
    tokens: list[int]
    output: int


@dataclass
class Soak:
    """One run; `seconds` of virtual time in all."""

    model: str
    seconds: float
    rng: random.Random = field(default_factory=lambda: random.Random(42))
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "lives",
                "ended",
                "aborted",
                "sent_again",
                "resets",
                "messages",
                "lost_messages",
                "failed_plugins",
                "wrong",
            ),
            0,
        )
    )

    objects: list[int] = field(default_factory=list)
    sizes_kib: list[int] = field(default_factory=list)
    """At the end of each life."""

    def __post_init__(self) -> None:
        self.numbers = itertools.count()
        self.due: list[tuple[float, int, str, list[int], int]] = []  # at, number, program, context, turns left
        self.turns: dict[str, _Turn] = {}
        self.programs: dict[str, tuple[list[int], int]] = {}
        self.now_s = 0.0
        for _ in range(PROGRAMS_COUNT):
            self.begin()

    def begin(self) -> None:
        """Let a new program come."""
        tokens = [self.rng.randrange(50, 1950) for _ in range(self.rng.randint(300, 900))]
        number = next(self.numbers)
        heapq.heappush(
            self.due, (self.now_s + self.rng.random(), number, f"p{number}", tokens, self.rng.randint(1, 12))
        )

    def tell(self, engine: Engine, *ops: Any) -> None:
        """Send a message, which may be lost."""
        self.counts["messages"] += 1
        if self.rng.random() < 0.2:
            self.counts["lost_messages"] += 1
        else:
            engine.scheduler.thunderagent_tell(list(ops))

    def send(self, engine: Engine, turn: _Turn) -> None:
        """Send a turn, with or without a hold."""
        hold_s = self.rng.choice([None, None, 30.0, 600.0, 0.0])
        engine.add(turn.request_id, list(turn.tokens), turn.output, turn.program_id or None, hold_s=hold_s)

    def ended(self, engine: Engine, request_id: str) -> None:
        """Check a request that ended, and plan its program's next turn."""
        turn = self.turns.pop(request_id)
        got = engine.outputs.pop(request_id)
        self.counts["ended"] += 1
        self.counts["wrong"] += got != [token_of(request_id, place) for place in range(turn.output)]
        if turn.program_id not in self.programs:
            return
        tokens, left = self.programs.pop(turn.program_id)
        if left <= 1 or len(tokens) > 4500:
            self.tell(engine, ["release", turn.program_id])
            self.begin()
            return
        tokens = [*tokens, *got, *(self.rng.randrange(50, 1950) for _ in range(self.rng.randint(100, 400)))]
        gap_s = self.rng.expovariate(1.0) if self.rng.random() < 0.95 else self.rng.uniform(20, 90)
        heapq.heappush(self.due, (self.now_s + gap_s, next(self.numbers), turn.program_id, tokens, left - 1))

    def fault(self, engine: Engine) -> None:
        """Have something go wrong now and then."""
        rng, now_count = self.rng, len(self.turns)
        if now_count and rng.random() < 0.002:  # a client leaves, and its program with it
            request_id = rng.choice(list(self.turns))
            turn = self.turns.pop(request_id)
            engine.abort(request_id)
            engine.outputs.pop(request_id, None)
            self.counts["aborted"] += 1
            if self.programs.pop(turn.program_id, None) is not None:
                self.begin()
        if rng.random() < 0.002:  # a stranger
            number = next(self.numbers)
            tokens = [rng.randrange(50, 1950) for _ in range(rng.randint(400, 1200))]
            self.turns[f"s{number}"] = stranger = _Turn("", f"s{number}", tokens, 32)
            self.send(engine, stranger)
        if rng.random() < 0.0003:
            engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            self.counts["resets"] += 1
        if rng.random() < 0.005 and self.due:
            self.tell(engine, [rng.choice(["pause", "hold", "release", "unknown"]), rng.choice(self.due)[2], 60])

    def live(self, end_s: float, *, breaks: bool) -> None:
        """Run one engine, and send what is left in it again to the next one."""
        engine = Engine(self.model, {}, now_s=self.now_s)
        agents = engine.scheduler.agents
        for turn in self.turns.values():
            self.send(engine, turn)
            self.counts["sent_again"] += 1
        if breaks:
            breaks_s = self.now_s + self.rng.uniform(0.3, 0.8) * (end_s - self.now_s)
            hook = self.rng.choice(FAILING_HOOKS)
            stock = getattr(agents, hook)

            def broken(*args: Any, **kwargs: Any) -> Any:
                if engine.now_s >= breaks_s:
                    raise RuntimeError(f"fault in {hook}")
                return stock(*args, **kwargs)

            setattr(agents, hook, broken)
        most_pinned = most_calls = 0
        while engine.now_s < end_s:
            self.now_s = engine.now_s
            while self.due and self.due[0][0] <= self.now_s:
                _, number, program_id, tokens, left = heapq.heappop(self.due)
                turn = _Turn(program_id, f"r{number}", tokens, self.rng.randint(8, 64))
                self.programs[program_id] = (tokens, left)
                self.turns[turn.request_id] = turn
                self.send(engine, turn)
            self.fault(engine)
            if not engine.scheduler.requests:
                engine.now_s = max(engine.now_s, self.due[0][0])
                engine.scheduler.schedule()  # lets deadlines pass
                continue
            for request_id in engine.step():
                self.ended(engine, request_id)
            engine.cached.clear()
            pinned_count = agents.pins.block_count
            most_pinned, most_calls = max(most_pinned, pinned_count), max(most_calls, len(agents.calls))
            assert pinned_count <= 0.9 * engine.blocks, pinned_count
            if engine.scheduler._on:
                assert len(agents.calls) == len(engine.scheduler.requests)
        self.now_s = engine.now_s
        report = engine.scheduler.thunderagent_tell([])
        self.counts["failed_plugins"] += not report["on"]
        assert report["on"] or report["blocks"]["pinned"] == 0, report
        assert report["on"] or breaks, "a plugin failed that was not made to"
        gc.collect()
        found = {
            "most_pinned": most_pinned,
            "most_calls": most_calls,
            "programs": agents.program_count,
            "objects": len(gc.get_objects()),
            "resident_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "on": report["on"],
            "pins_total": report["pins_total"],
        }
        print(json.dumps({"life": self.counts["lives"], "virtual_s": round(engine.now_s), **found}), flush=True)
        self.counts["lives"] += 1
        self.objects.append(found["objects"])
        self.sizes_kib.append(found["resident_kib"])
        if self.now_s >= self.seconds:
            self.drain(engine)

    def drain(self, engine: Engine) -> None:
        """Let what is there end; nobody may be left, nor any block be held."""
        for _ in range(100_000):
            if not engine.scheduler.requests:
                break
            for request_id in engine.step():
                self.ended(engine, request_id)
        assert not self.turns, self.turns
        engine.now_s += 700.0
        engine.scheduler.schedule()
        agents = engine.scheduler.agents
        assert not agents.calls or not engine.scheduler._on
        assert len(agents.pins) == 0, agents.pins.items()
        assert engine.free_blocks == engine.blocks - 1

    def run(self) -> dict[str, Any]:
        """Run all lives; return what happened."""
        logging.getLogger("vllm.thunderagent").setLevel(logging.CRITICAL)
        life_s = min(LIFE_S, self.seconds / 2)
        while self.now_s < self.seconds:
            self.live(min(self.seconds, self.now_s + life_s), breaks=self.counts["lives"] % 2 == 1)
        lost_count = sum(turn.request_id in self.turns for turn in self.turns.values())
        return {
            "ok": lost_count == 0 and self.counts["wrong"] == 0,
            "lost": lost_count,
            **self.counts,
            "objects": self.objects,
            "resident_kib": self.sizes_kib,
        }


def main() -> None:
    """Run it, and print what happened."""
    print(json.dumps({"soak": float(sys.argv[2]), **Soak(sys.argv[1], float(sys.argv[2])).run()}), flush=True)


if __name__ == "__main__":
    main()
