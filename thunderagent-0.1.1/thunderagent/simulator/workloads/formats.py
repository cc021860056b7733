"""Load recorded programs: our own JSONL, Mooncake's and AIPerf's, and the traces of kv-cache-tester (WEKA).

Theory of operation
-------------------
Each loader reduces its file to calls: what the whole prompt had, what was generated, how much of the prompt was there
before, and how long the program was away afterwards. A plan only ever appends, so a call's new tokens are what its
prompt has more than the context that the replay has by then; where a recorded prompt shrank a little (an answer's
thinking was dropped), the replay is ahead for a while and the next results make up for it. A call that reuses less than
half of the previous prompt begins anew (the context was compacted): from there on it is a program of its own.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from thunderagent.errors import TraceError
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan
from thunderagent.simulator.workloads.traces import Limits, Trace

Count = Annotated[int, msgspec.Meta(ge=0)]
Prompt = Annotated[int, msgspec.Meta(ge=1)]
Duration = Annotated[float, msgspec.Meta(ge=0)]
Row = TypeVar("Row")

MOONCAKE_BLOCK_TOKENS = 512


def load_recorded(path: Path, limits: Limits | None = None) -> Trace:
    """Load our own JSONL, also compressed (`.gz`): one program a line, as `thunderagent record` writes it.

    `{"id", "turns": [[t_s, input_tokens, output_tokens, prefix_hit_tokens, api_s, gap_s, stop], ...]}` and optionally
    `start_s`, `prefix_group` and `shared_prefix_tokens`: programs of one group share their first tokens. `gap_s` is
    the tool's time, `api_s` is not replayed: the simulated engine says how long a turn takes. Raises `TraceError`.
    """
    maker = _Maker(limits or Limits())
    for row in _rows(path, _RecordedRow):
        calls = [
            _Call(
                turn.input_tokens, turn.output_tokens, turn.gap_s or 0.0, turn.prefix_hit_tokens, _TOOLS.get(turn.stop)
            )
            for turn in row.turns
        ]
        shared_tokens = row.shared_prefix_tokens if row.prefix_group is not None else 0
        maker.add(row.id, calls, f"group-{row.prefix_group}-{shared_tokens}", shared_tokens, arrival_s=row.start_s)
    return maker.trace()


def load_mooncake(path: Path, limits: Limits | None = None) -> Trace:
    """Load Mooncake's JSONL, one request a line, and what AIPerf makes of it.

    `{"timestamp": ms, "input_length", "output_length", "hash_ids": [an id for each 512 tokens and all before them]}`
    (kvcache-ai/Mooncake, FAST25-release/README.md). A request whose blocks begin with all full blocks of an earlier one
    is taken for its program's next turn; the time between their arrivals, in which the earlier one was also answered,
    for the tool's. Two programs share a prefix where the last block that a first prompt has in common with any other
    is the same.

    With AIPerf's `session_id` (ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md) programs are as named, each line
    appends `input_length` tokens, and `delay` (ms) passes before it. Raises `TraceError`.
    """
    rows = list(_rows(path, _MooncakeRow))
    maker = _Maker(limits or Limits())
    chains = _chains([row for row in rows if row.program_id is None])
    first_blocks = Counter(block for chain in chains for block in chain[0].full_blocks)
    for number, chain in enumerate(chains):
        shared = [block for block in chain[0].full_blocks if first_blocks[block] > 1]
        maker.add(
            f"request-{number}",
            [
                _Call(row.input_length, row.output_length, max(0.0, (after.timestamp - row.timestamp) / 1000))
                for row, after in zip(chain, [*chain[1:], chain[-1]], strict=True)
            ],
            f"block-{shared[-1]}" if shared else "",
            len(shared) * MOONCAKE_BLOCK_TOKENS,
            arrival_s=chain[0].timestamp / 1000,
        )
    named: dict[str, list[_MooncakeRow]] = {}
    for row in rows:
        if row.program_id is not None:
            named.setdefault(row.program_id, []).append(row)
    for program_id, turns in named.items():
        calls = []
        context_tokens = 0
        for row, after in zip(turns, [*turns[1:], None], strict=True):
            context_tokens += row.input_length
            calls.append(_Call(context_tokens, row.output_length, row.away_s(after)))
            context_tokens += row.output_length
        maker.add(program_id, calls, arrival_s=turns[0].timestamp / 1000)
    return maker.trace()


def load_weka(path: Path, limits: Limits | None = None) -> Trace:
    """Load traces of kv-cache-tester, one JSON object a line: a conversation each.

    `{"id", "block_size", "tool_tokens", "system_tokens", "requests": [{"t": s, "type": "n" | "s", "in", "out",
    "hash_ids", "stop", "api_time", "think_time"} | {"type": "subagent", "agent_id", "requests"}]}`
    (callanjfox/kv-cache-tester, docs/trace_replay_tester.md; AIPerf reads the same, docs/tutorials/weka-trace.md).
    The tool's time is the next request's `think_time`; without it the time between two requests less `api_time`, where
    that is known. A streamed request that was sent again with the same prompt counts once. A sub-agent is a program of
    its own, which nobody waits for. Conversations whose tools and system prompt have the same sizes are taken to share
    them. Raises `TraceError`.
    """
    maker = _Maker(limits or Limits())
    for row in _rows(path, _WekaRow):
        calls = [request for request in row.requests if isinstance(request, _WekaCall)]
        _add_weka(maker, row.id, row, calls, row.block_size)
        for agent in row.requests:
            if isinstance(agent, _WekaSubagent):
                _add_weka(maker, f"{row.id}.{agent.agent_id}", agent, agent.requests, row.block_size)
    return maker.trace()


FORMATS: dict[str, Callable[[Path, Limits | None], Trace]] = {
    "recorded": load_recorded,
    "mooncake": load_mooncake,
    "weka": load_weka,
}


# --- What the files hold --------------------------------------------------------------------------------------


class _RecordedTurn(msgspec.Struct, array_like=True):
    t_s: float
    input_tokens: Prompt
    output_tokens: Count
    prefix_hit_tokens: Count
    api_s: Duration | None
    gap_s: Duration | None
    stop: str = "unknown"


class _RecordedRow(msgspec.Struct):
    id: str
    turns: Annotated[list[_RecordedTurn], msgspec.Meta(min_length=1)]
    start_s: Duration | None = None
    prefix_group: int | None = None
    shared_prefix_tokens: Count = 0


class _MooncakeRow(msgspec.Struct):
    input_length: Prompt
    output_length: Count = 1
    timestamp: Duration = 0.0
    delay: Duration | None = None
    hash_ids: list[int] = []
    program_id: str | None = msgspec.field(default=None, name="session_id")

    @property
    def full_blocks(self) -> list[int]:
        return self.hash_ids[: self.input_length // MOONCAKE_BLOCK_TOKENS]

    def away_s(self, after: _MooncakeRow | None) -> float:
        if after is None:
            return 0.0
        return (after.delay if after.delay is not None else max(0.0, after.timestamp - self.timestamp)) / 1000


class _WekaCall(msgspec.Struct, tag_field="type", tag="n"):
    t: float
    input_tokens: Prompt = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    hash_ids: list[int] = []
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None


class _WekaStreamedCall(_WekaCall, tag_field="type", tag="s"):
    pass


class _WekaSubagent(msgspec.Struct, tag_field="type", tag="subagent"):
    agent_id: str
    requests: list[_WekaCall | _WekaStreamedCall]
    tool_tokens: Count = 0
    system_tokens: Count = 0


class _WekaRow(msgspec.Struct):
    id: str
    requests: list[_WekaCall | _WekaStreamedCall | _WekaSubagent]
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 64
    tool_tokens: Count = 0
    system_tokens: Count = 0


_TOOLS = {"tool_use": "tool", "end_turn": "person"}


def _rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Give the rows of a file, compressed or not; blank lines are skipped."""
    decoder = msgspec.json.Decoder(kind)
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - the errors below name it
                if line.strip():
                    yield decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: line {number}: {error}") from error
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: line {number + 1}: cannot be read: {error}") from error


def _chains(rows: Sequence[_MooncakeRow]) -> list[list[_MooncakeRow]]:
    """Join requests to programs: each follows the one with the longest prompt that it begins with."""
    chains: list[list[_MooncakeRow]] = []
    chain_by_last_block: dict[int, list[_MooncakeRow]] = {}
    for row in sorted(rows, key=lambda row: row.timestamp):
        blocks = row.full_blocks
        chain = next(
            (chain_by_last_block.pop(block) for block in reversed(blocks) if block in chain_by_last_block), None
        )
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(row)
        if blocks:
            chain_by_last_block[blocks[-1]] = chain
    return chains


def _add_weka(
    maker: _Maker, program_id: str, sizes: _WekaRow | _WekaSubagent, requests: Sequence[_WekaCall], block_tokens: int
) -> None:
    shared_id = f"tools-{sizes.tool_tokens}-system-{sizes.system_tokens}"
    calls = _weka_calls(requests, block_tokens)
    maker.add(program_id, calls, shared_id, sizes.tool_tokens + sizes.system_tokens)


def _weka_calls(requests: Sequence[_WekaCall], block_tokens: int) -> list[_Call]:
    once = [
        request
        for request, after in zip(requests, [*requests[1:], None], strict=True)
        if not (
            isinstance(request, _WekaStreamedCall)
            and after is not None
            and not isinstance(after, _WekaStreamedCall)
            and (after.input_tokens, after.hash_ids) == (request.input_tokens, request.hash_ids)
        )
    ]
    calls = []
    known: set[int] = set()
    for request, after in zip(once, [*once[1:], None], strict=True):
        hit_count = next((n for n, block in enumerate(request.hash_ids) if block not in known), len(request.hash_ids))
        known.update(request.hash_ids)
        away_s = 0.0
        if after is not None and after.think_time is not None:
            away_s = after.think_time
        elif after is not None:
            away_s = after.t - request.t - (request.api_time or 0.0)
        hit_tokens = hit_count * block_tokens if request.hash_ids else None
        tool_name = _TOOLS.get(request.stop)
        calls.append(_Call(request.input_tokens, request.output_tokens, max(0.0, away_s), hit_tokens, tool_name))
    return calls


# --- From calls to plans --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded call; `hit_tokens` None is not known."""

    input_tokens: int
    output_tokens: int
    away_s: float
    hit_tokens: int | None = None
    tool_name: str | None = None


class _Maker:
    """Makes plans from calls within the limits, and counts what was cut."""

    def __init__(self, limits: Limits) -> None:
        self._context_limit_tokens = math.inf if limits.context_tokens is None else limits.context_tokens
        self._away_limit_s = math.inf if limits.away_s is None else limits.away_s
        self._programs: dict[str, ProgramPlan] = {}
        self._again_counts: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def trace(self) -> Trace:
        return Trace(tuple(self._programs.values()), **self._counts)

    def add(
        self,
        program_id: str,
        calls: Sequence[_Call],
        shared_id: str = "",
        shared_tokens: int = 0,
        *,
        arrival_s: float | None = None,
    ) -> None:
        """Add one program; after each reset of its context another one, `ID+1` and so on.

        If an id is there again, that is another program, `ID#2`, as in a recording (`record.py`). A later part arrives
        when the absences before it are over; what the turns took is not known here.
        """
        away_s = 0.0
        for part, part_calls in enumerate(_between_resets(calls)):
            # A first prompt that is shorter than its group's shared part must share something else.
            prefix_tokens = shared_tokens if shared_tokens < part_calls[0].input_tokens else 0
            turns = self._turns_of(part_calls, prefix_tokens)
            self._counts["dropped_turns_count"] += len(part_calls) - len(turns)
            self._counts["dropped_programs_count"] += not turns
            self._counts["reset_count"] += part > 0
            if turns:
                part_id = self._unused_id(f"{program_id}+{part}" if part else program_id)
                self._programs[part_id] = ProgramPlan(
                    program_id=part_id,
                    turns=turns,
                    shared_prefix_id=shared_id if prefix_tokens else "",
                    shared_prefix_tokens=prefix_tokens,
                    arrival_s=None if arrival_s is None else arrival_s + away_s,
                )
            away_s += sum(call.away_s for call in part_calls)

    def _unused_id(self, program_id: str) -> str:
        unused_id = program_id
        while unused_id in self._programs:
            self._again_counts[program_id] += 1
            unused_id = f"{program_id}#{self._again_counts[program_id] + 1}"
        return unused_id

    def _turns_of(self, calls: Sequence[_Call], prefix_tokens: int) -> tuple[TurnPlan, ...]:
        turns = []
        context_tokens = prefix_tokens
        for call in calls:
            new_tokens = max(1, call.input_tokens - context_tokens)
            output_tokens = max(1, call.output_tokens)
            context_tokens += new_tokens + output_tokens
            if context_tokens > self._context_limit_tokens:
                break
            self._counts["shortened_count"] += call.away_s > self._away_limit_s
            tool_s = min(call.away_s, self._away_limit_s)
            turns.append(TurnPlan(new_tokens, output_tokens, tool_s, call.tool_name or "unknown"))
        return tuple(turns)


def _between_resets(calls: Sequence[_Call]) -> Iterator[Sequence[_Call]]:
    start = 0
    for index in range(1, len(calls)):
        hit_tokens, previous_tokens = calls[index].hit_tokens, calls[index - 1].input_tokens
        reused_tokens = calls[index].input_tokens if hit_tokens is None else hit_tokens
        if reused_tokens < previous_tokens / 2:
            yield calls[start:index]
            start = index
    if calls:
        yield calls[start:]
