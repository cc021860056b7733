"""ThunderAgent, Fig. 7b: nodes that only prefill and nodes that only decode, beside nodes that do both.

    scripts/bench papers fig7b  # four nodes with GLM-4.6, by how many of them only prefill

Theory of operation
-------------------
There is no scheduler, as in the paper. A program keeps the node that prefills for it (as vLLM's KV-aware router does),
the one with the fewest programs when it began. A turn is computed there up to its first token; then its context goes to
the decoding node that has the fewest requests, which generates the answer. **The transfer is free**: it takes no
bandwidth, and a context that arrives is there at once. So what is lost here is lost by the split alone, as the paper
says it: a prompt finds what the prefilling nodes kept, whose pools are a part of all pools.

A node that does both is the same engine with the turn given to it whole; one such node makes the very turns of
`passthrough` in the simulator (a test holds that).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from thunderagent.simulator.engine.records import EngineConfig, EngineRequest, FinishedRequest
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.clients import RunningProgram, Supplied, Supply
from thunderagent.simulator.runs.replicas import SimulatedReplica
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tools import ToolHost
from thunderagent.simulator.workloads.contexts import TokenSpace
from thunderagent.simulator.workloads.plans import Workload

TRANSFERRED_TOKENS = 2**24
"""The budget of an iteration of a decoding node: any context arrives in one."""


@dataclass
class Found:
    """What a run found after its warm-up."""

    turns_s: list[float] = field(default_factory=list)
    programs_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def turn_mean_s(self) -> float:
        """The mean time of a turn, from its arrival on."""
        return sum(self.turns_s) / max(1, len(self.turns_s))

    @property
    def program_mean_s(self) -> float:
        """The mean time of the programs that ended."""
        return sum(self.programs_s) / max(1, len(self.programs_s))

    @property
    def hit_ratio(self) -> float:
        """The part of the prompts' tokens that was not computed."""
        return self.cached_tokens / max(1, self.prompt_tokens)


class SplitRun:
    """A closed loop of programs on nodes with roles; `run` it once."""

    def __init__(self, scenario: Scenario, programs: Workload, prefilling_count: int) -> None:
        """Prepare a run on the scenario's replicas, of which so many only prefill, and the others only decode."""
        self._scenario = scenario
        self._prefilling_count = prefilling_count
        self._supply = Supply(scenario, programs)
        self._agenda = Agenda()
        self._tokens = TokenSpace(scenario.engine.block_size)
        self._tools = ToolHost(scenario.tools, self._agenda, seed=scenario.seed, needs=lambda: lambda _: 0.0)
        nodes = [
            SimulatedReplica(name, self._engine_of(number), self._agenda, self)
            for number, name in enumerate(scenario.replica_ids)
        ]
        self._entries = nodes[:prefilling_count] or nodes
        """Where turns begin."""
        self._decoding = nodes[prefilling_count:]
        self._programs_on = [0] * len(self._entries)
        self._entry_of: dict[str, int] = {}
        self._turn_count = 0
        self._turns: dict[str, RunningProgram] = {}  # where they begin
        self._answers: dict[str, RunningProgram] = {}  # at a decoding node
        self.found = Found()

    def _engine_of(self, number: int) -> EngineConfig:
        """Return a node's engine: one that only decodes computes no prompt."""
        engine = self._scenario.engine
        if not 0 < self._prefilling_count <= number:
            return engine
        timing = replace(engine.timing, prefill_token_s=0.0, attention_pair_s=0.0, prefill_base_s=0.0)
        return replace(engine, timing=timing, max_num_batched_tokens=TRANSFERRED_TOKENS)

    def run(self) -> Found:
        """Run to the horizon."""
        for _ in range(self._scenario.programs_count):
            self._start_next()
        while self._agenda.advance(self._scenario.horizon_s):
            pass
        return self.found

    def _start_next(self) -> None:
        supplied = self._supply.next()
        if supplied is not None:
            self._start(supplied)

    def _start(self, supplied: Supplied) -> None:
        program_id = supplied.plan.program_id
        sandbox = self._tools.open(program_id, supplied.serial_id, supplied.sandbox_s)
        program = RunningProgram(supplied, self._tokens, sandbox, self._agenda.now_s, self._scenario.bytes_per_token)
        entry = min(range(len(self._entries)), key=self._programs_on.__getitem__)
        self._entry_of[program_id] = entry
        self._programs_on[entry] += 1
        self._turn_arrives(program)

    def _turn_arrives(self, program: RunningProgram) -> None:
        program.begin_turn(self._agenda.now_s)
        self._turn_count += 1
        program.turn_id = self._turn_count
        request = program.request()
        self._turns[request.request_id] = program
        self._entries[self._entry_of[program.plan.program_id]].submit(
            self._to_first_token(request) if self._prefilling_count else request
        )

    def _to_first_token(self, request: EngineRequest) -> EngineRequest:
        """Return the part of a turn that a prefilling node computes: it keeps nothing of the answer."""
        assert request.keys is not None
        blocks_count = (len(request.prompt_token_ids) + 1) // self._scenario.engine.block_size
        return replace(request, output_token_ids=request.output_token_ids[:1], keys=request.keys[:blocks_count])

    def first_token(self, request_id: str) -> None:
        """Nobody listens."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """Hand a prefilled turn on to a decoding node, or go on with its program."""
        program = self._answers.pop(finished.request_id, None)
        if program is None:
            program = self._turns.pop(finished.request_id)
            if self._is_counted:
                self.found.prompt_tokens += finished.prompt_tokens
                self.found.cached_tokens += finished.cached_tokens
            if self._prefilling_count:
                self._answers[finished.request_id] = program
                least = min(self._decoding, key=lambda node: node.stats.running_count + node.stats.waiting_count)
                least.submit(program.request())
                return
        if self._is_counted:
            self.found.turns_s.append(self._agenda.now_s - program.arrived_s)
        tool_s = program.turn.tool_s
        if program.end_turn():
            self._tools.run(tool_s, program.sandbox, partial(self._turn_arrives, program))
        else:
            self._end(program)

    @property
    def _is_counted(self) -> bool:
        return self._agenda.now_s >= self._scenario.warmup_s

    def _end(self, program: RunningProgram) -> None:
        if self._is_counted:
            self.found.programs_s.append(self._agenda.now_s - program.started_s)
        self._programs_on[self._entry_of.pop(program.plan.program_id)] -= 1
        self._tools.close(program.sandbox)
        self._start_next()
