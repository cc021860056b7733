"""Models one vLLM engine, iteration by iteration, in the caller's time.

Theory of operation
-------------------
An engine works in *iterations*. `Engine.step` is one: it chooses what to compute, says how long that takes, and does
it. The caller owns time: a simulator jumps to the end of the iteration, a server sleeps until then. There is no clock
here, no randomness, no I/O; the same calls always give the same results.

**Scheduling** is vLLM's (V1). An iteration has a budget of tokens. The running requests come first, in the order of
their admission: a decoding one takes one token, one with an unfinished prompt takes what is left (a *chunk*). A chunk
is always at the end of that order, because nothing is admitted behind a prompt that exhausted the budget: so decodes
come first. Then waiting requests are admitted by *rank*, while budget and places last and the whole prompt fits in the
free blocks. The rank is the arrival, or under the `priority` policy (priority, arrival) with the lower number first.
Nobody overtakes the head of the queue. A `Discipline` (`records.py`) changes that: such an engine orders what runs in
each iteration, and lets chunks shrink.

**Memory** is a pool of blocks (see `blocks.py`). A request's blocks are freed tail first, so that its head, which
others are more likely to share, is lost last.

**Thrashing** follows. The engine never knows that a program will come back: while its tool runs, its blocks are free,
and age. If the programs' contexts do not fit in the pool together, each finds its own gone when it returns, and
computing it again takes the blocks of the next one to return.

**Preemption.** A running request that needs a block when none is free takes it from the request of the highest rank
(the newest, or least important), perhaps itself. The victim loses its blocks and its progress, keeps the tokens it
generated, and waits at its rank, which is ahead of everything that arrived later. Re-admitted, it hits what is left of
its blocks and computes the rest again.

**A tier.** Evicted blocks may be kept behind the pool (`tier.py`). What follows a prompt's hits in the pool and is
found there is copied back into blocks of its own, which lengthens the iteration, and counts as cached.

**The last token.** A fully cached prompt still has one token computed, because the next token comes from it. The last
generated token is never computed, because nothing follows it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from thunderagent.simulator.engine.blocks import ROOT_HASH, BlockPool, count_free, hash_blocks
from thunderagent.simulator.engine.decoding import DecodeBatch
from thunderagent.simulator.engine.records import (
    Admission,
    EngineConfig,
    EngineRequest,
    EngineSequence,
    EngineStats,
    FinishedRequest,
    Plan,
    StepResult,
    rank_of,
)
from thunderagent.simulator.engine.retained import RetainedBlocks
from thunderagent.simulator.engine.tier import Tier
from thunderagent.simulator.engine.timing import IterationWork


class Engine:
    """Serves requests by continuous batching over a pool of KV blocks (see the module's theory of operation).

    A step costs O(requests that prefill, need a block or end); a request without keys is hashed when it is submitted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._discipline = None if config.discipline is None else config.discipline()
        self._tier = Tier(config.tier_block_count) if config.tier_block_count else None
        self._pool = BlockPool(config.block_count, self._tier)
        self._retained = RetainedBlocks(self._pool)
        self._sequences: dict[str, EngineSequence] = {}
        self._running: list[EngineSequence] = []  # in the order of admission; those of the batch are the first
        self._batch = DecodeBatch(config.block_size)
        self._waiting: list[EngineSequence] = []  # in the order of rank
        self._arrival_count = 0
        self._prompt_tokens = self._generated_tokens = 0
        self._computed_tokens = self._iteration_count = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = 0
        self._tier_query_tokens = self._tier_hit_tokens = 0
        self._preemption_count = self._aborted_count = 0

    def __repr__(self) -> str:
        return f"<Engine {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    @property
    def has_work(self) -> bool:
        """Return whether a step would compute anything."""
        return bool(self._sequences)

    @property
    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        return EngineStats(
            running_count=len(self._running),
            waiting_count=len(self._waiting),
            used_block_count=self._pool.used_count,
            block_count=self.config.block_count,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            computed_tokens=self._computed_tokens,
            iteration_count=self._iteration_count,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemption_count=self._preemption_count,
            aborted_count=self._aborted_count,
            tier_query_tokens=self._tier_query_tokens,
            tier_hit_tokens=self._tier_hit_tokens,
            tier_block_count=self.config.tier_block_count,
            lost_block_count=self._pool.lost_count,
        )

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request; ValueError if it can never run or its id is in use. Costs O(its tokens)."""
        prompt_tokens, output_tokens = len(request.prompt_token_ids), len(request.output_token_ids)
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is already in the engine")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.config.context_limit_tokens:
            raise ValueError(
                f"{prompt_tokens} prompt tokens and {output_tokens} output tokens are over the limit of "
                f"{self.config.context_limit_tokens}"
            )
        priority = 0 if self.config.scheduling_policy == "fcfs" else request.priority
        sequence = EngineSequence(
            request=request,
            rank=(priority, self._arrival_count),
            keys=self._keys_of(request),
            arrival_s=now_s,
            prompt_tokens=prompt_tokens,
            end_tokens=prompt_tokens + output_tokens,
            known_tokens=prompt_tokens,
        )
        self._arrival_count += 1
        self._sequences[request.request_id] = sequence
        insort(self._waiting, sequence, key=rank_of)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; return False if it is not here (finished, or never came)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.blocks.count:
            self._batch.dissolve()
            self._running.remove(sequence)
            self._pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)
        self._aborted_count += 1
        return True

    def step(self, now_s: float) -> StepResult:
        """Run the iteration that begins now; the next may begin at `now_s + duration_s`.

        Without work nothing happens, in no time.
        """
        if not self._sequences:
            return StepResult(0.0, IterationWork())
        plan = Plan(self.config.max_num_batched_tokens, now_s)
        batch = self._batch
        if batch.count and not self._fits(batch, plan):
            batch.dissolve()
        self._schedule_running(plan)
        if self._waiting and not plan.preempted:  # a just preempted request would only come back and preempt again
            self._admit_waiting(plan)
        work = plan.work(batch.count, batch.context_tokens)
        duration_s = self.config.timing.iteration_s(work, self._pool.used_count / self.config.block_count)
        if plan.restored_tokens:
            duration_s += self.config.restore_token_s * plan.restored_tokens
        generated, finished = self._compute(plan, now_s + duration_s)
        self._gather()
        return StepResult(duration_s, work, generated, finished, tuple(plan.admitted), tuple(plan.preempted))

    def decode(self) -> float | None:
        """Run the iteration that begins now if each running request gets a token in it, and nothing else happens.

        Return its duration. Return None, doing nothing, if `step` is needed: a prompt is computed, or a request may be
        admitted, ends, or lacks a block. Most iterations are of this kind, and cost almost nothing here.
        """
        batch, config = self._batch, self.config
        count = batch.count
        if not count or count != len(self._running) or count > config.max_num_batched_tokens:
            return None
        if self._waiting and count < min(config.max_num_batched_tokens, config.max_num_seqs):
            refused_at = self._waiting[0].refused_at
            if refused_at is None or not self._pool.offers_no_more(*refused_at) or batch.fills(refused_at[1]):
                return None
        context_tokens = batch.context_tokens
        if not batch.step_alone(self._pool):
            return None
        self._generated_tokens += count
        self._iteration_count += 1
        return config.timing.decode_s(count, context_tokens, self._pool.used_count / config.block_count)

    def retract_all(self) -> int:
        """Take the blocks of all running requests and let them wait, ahead of later ones; return their number."""
        self._batch.dissolve()
        running = tuple(self._running)
        for sequence in running:
            self._preempt(sequence, Plan(0))
        return len(running)

    @property
    def waiting_tokens(self) -> int:
        """Return the tokens of the waiting requests; costs O(those)."""
        return sum(sequence.known_tokens for sequence in self._waiting)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the requests inside, in order of arrival."""
        return tuple(self._sequences)

    def generated_tokens(self, request_id: str) -> int | None:
        """Return how many tokens a request has generated; None if it is not here."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._batch.known_tokens(sequence) - sequence.prompt_tokens

    def cached_tokens(self, request_id: str) -> int | None:
        """Return how many tokens of a request were found in the cache; None before it ran, or if it is not here."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.cached_tokens

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; return False, doing nothing, while a request holds blocks."""
        return self._pool.reset()

    def expire(self, keys: Sequence[int]) -> None:
        """Take the free blocks with these keys before all others; no real engine has this."""
        self._pool.expire(keys)

    def drop_retained(self, retain_id: str) -> None:
        """Stop retaining the blocks of that id, if there are any."""
        self._retained.drop(retain_id)

    def check_invariants(self) -> None:
        """Assert that blocks, queues and requests agree (for tests; costs O(blocks))."""
        self._pool.check_invariants([*(sequence.blocks for sequence in self._running), *self._retained.holdings])
        assert all(sequence.blocks.count for sequence in self._running), "running without blocks"
        assert not any(sequence.blocks.count for sequence in self._waiting), "waiting with blocks"
        assert {*self._running, *self._waiting} == set(self._sequences.values()), "lost or doubled request"
        assert self._waiting == sorted(self._waiting, key=rank_of), "queue out of order"
        batch = self._running[: self._batch.count]
        assert tuple(sequence.request_id for sequence in batch) == self._batch.request_ids, "the batch runs first"
        for number, sequence in enumerate(self._running):
            is_member = number < len(batch)
            computed_tokens = self._batch.known_tokens(sequence) - 1 if is_member else sequence.computed_tokens
            fitting = self._block_count(computed_tokens)
            assert sequence.blocks.count == fitting, f"{sequence.request_id} holds more or less than its tokens"

    def _keys_of(self, request: EngineRequest) -> Sequence[int]:
        """Return the keys of prompt and output: those of the output are published only as its tokens are computed."""
        if request.keys is not None:
            return request.keys
        return hash_blocks([*request.prompt_token_ids, *request.output_token_ids], self.config.block_size)

    def _fits(self, batch: DecodeBatch, plan: Plan) -> bool:
        """Return whether budget and free blocks suffice for the batch and the others: nobody is preempted then."""
        budget_tokens = plan.budget_tokens - batch.count
        missing = batch.missing_count
        for sequence in self._running[batch.count :]:
            tokens = min(sequence.known_tokens - sequence.computed_tokens, max(0, budget_tokens))
            missing += self._missing_blocks(sequence, tokens)
            budget_tokens -= tokens
        return budget_tokens >= 0 and missing <= self._pool.free_count

    def _schedule_running(self, plan: Plan) -> None:
        batch, pool = self._batch, self._pool
        plan.budget_tokens -= batch.count
        batch.allocate(pool)
        for sequence in self._in_order(plan.now_s):
            if plan.budget_tokens == 0:
                break
            if not sequence.blocks.count:  # just preempted, for an earlier one
                continue
            tokens = min(sequence.known_tokens - sequence.computed_tokens, plan.budget_tokens)
            if self._discipline is not None and not sequence.is_decoding:
                tokens = self._shrunk(sequence, self._bounded(sequence, tokens, plan.now_s))
            if self._make_room(sequence, tokens, plan):
                plan.add(sequence, tokens)
        batch.publish(pool)
        for sequence, tokens in plan.chunks.items():
            self._publish(sequence, tokens)

    def _in_order(self, now_s: float) -> Sequence[EngineSequence]:
        """Return what runs besides the batch, in serving order."""
        if self._discipline is None:
            return self._running[self._batch.count :]
        return self._discipline.in_order(self._running, now_s)

    def _bounded(self, sequence: EngineSequence, tokens: int, now_s: float) -> int:
        """Return how many tokens of a prompt are computed now; one that is alone gets what it can."""
        if self._discipline is None or len(self._sequences) == 1:
            return tokens
        return min(tokens, self._discipline.most_tokens(sequence, now_s))

    def _shrunk(self, sequence: EngineSequence, tokens: int) -> int:
        """Return how many tokens of a prompt fit without a preemption, halving repeatedly, at least a block."""
        while self._retained.count and self._missing_blocks(sequence, tokens) > self._pool.free_count:
            self._retained.drop_least(sequence)
        while tokens > self.config.block_size and self._missing_blocks(sequence, tokens) > self._pool.free_count:
            tokens = max(self.config.block_size, tokens // 2)
        return tokens

    def _make_room(self, sequence: EngineSequence, tokens: int, plan: Plan) -> bool:
        """Give a running sequence the blocks for its next tokens, by preemption if needed; False if it was it."""
        missing = self._missing_blocks(sequence, tokens)
        if missing == 0:  # as for most tokens
            return True
        while self._retained.count and missing > self._pool.free_count:
            self._retained.drop_least(sequence)
        while missing > self._pool.free_count:
            victim = self._victim(plan.now_s)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self._pool.allocate(missing, sequence.blocks)
        return True

    def _victim(self, now_s: float) -> EngineSequence:
        """Return the sequence to preempt."""
        if self._discipline is None:
            return max(self._running, key=rank_of)
        return self._discipline.victim(self._running, now_s)

    def _preempt(self, sequence: EngineSequence, plan: Plan) -> None:
        if self._discipline is not None:
            self._discipline.preempted(sequence)
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        plan.remove(sequence)
        sequence.computed_tokens = 0
        sequence.preemption_count += 1
        self._preemption_count += 1
        insort(self._waiting, sequence, key=rank_of)
        plan.preempted.append(sequence.request_id)

    def _admit_waiting(self, plan: Plan) -> None:
        while self._waiting and plan.budget_tokens and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            sequence.served_s = plan.now_s
            if not self._admit(sequence, plan):
                return
            del self._waiting[0]
            self._running.append(sequence)

    def _admit(self, sequence: EngineSequence, plan: Plan) -> bool:
        """Start a waiting sequence on its cached part, if all of its tokens fit; its first chunk is planned."""
        if sequence.refused_at is not None and self._pool.offers_no_more(*sequence.refused_at):
            return False
        pool, size = self._pool, self.config.block_size
        wanted_count = (sequence.known_tokens - 1) // size
        hits = pool.find(sequence.keys, wanted_count)
        hit_count = sum([len(run.keys) for run in hits])
        missing = self._block_count(sequence.known_tokens) - hit_count
        if self._discipline is not None:
            missing += self._promised_count()
        if missing <= pool.free_count - count_free(hits) + self._retained.block_count:  # otherwise it would be in vain
            while self._retained.count and missing > pool.free_count - count_free(hits):
                self._retained.drop_least(sequence)
        if missing > pool.free_count - count_free(hits):
            sequence.refused_at = pool.version, sequence.keys[hit_count] if hit_count < wanted_count else ROOT_HASH
            return False
        sequence.refused_at = None
        pool.acquire(sequence.blocks, hits)
        sequence.published_count = hit_count
        self.drop_retained(sequence.request.retain_id)
        restored_count = self._restored_count(sequence, hit_count, wanted_count)
        plan.restored_tokens += restored_count * size
        cached_tokens = sequence.computed_tokens = (hit_count + restored_count) * size
        tokens = min(sequence.known_tokens - cached_tokens, plan.budget_tokens)
        tokens = self._bounded(sequence, tokens, plan.now_s)
        pool.allocate(self._missing_blocks(sequence, tokens), sequence.blocks)
        self._publish(sequence, tokens)
        plan.add(sequence, tokens)
        is_readmission = sequence.cached_tokens is not None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached_tokens
            self._prefix_query_tokens += sequence.known_tokens
            self._prefix_hit_tokens += hit_count * size
            if self._tier is not None:
                self._tier_query_tokens += sequence.known_tokens - hit_count * size
                self._tier_hit_tokens += restored_count * size
        plan.admitted.append(Admission(sequence.request_id, sequence.known_tokens, cached_tokens, is_readmission))
        return True

    def _restored_count(self, sequence: EngineSequence, hit_count: int, wanted_count: int) -> int:
        """Return how many blocks come from the tier, after those in the pool."""
        if self._tier is None:
            return 0
        count = self._tier.find(sequence.keys, hit_count, wanted_count)
        self._tier.use(sequence.keys[hit_count : hit_count + count])
        return count

    def _promised_count(self) -> int:
        """Return how many blocks the running prompts still need: with bounded chunks several run at a time."""
        return sum(
            self._block_count(sequence.known_tokens) - sequence.blocks.count
            for sequence in self._running
            if not sequence.is_decoding
        )

    def _missing_blocks(self, sequence: EngineSequence, tokens: int) -> int:
        return self._block_count(sequence.computed_tokens + tokens) - sequence.blocks.count

    def _block_count(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _publish(self, sequence: EngineSequence, tokens: int) -> None:
        """Make blocks findable that this iteration fills: later admissions in it share them, as in vLLM."""
        full_count = (sequence.computed_tokens + tokens) // self.config.block_size
        if full_count == sequence.published_count:
            return
        sequence.publish(self._pool, full_count)
        if not sequence.is_decoding:  # a prompt that others may wait to share
            self._pool.version += 1

    def _compute(self, plan: Plan, end_s: float) -> tuple[tuple[str, ...], tuple[FinishedRequest, ...]]:
        """Carry the plan out: a sequence whose tokens are all computed gets its next one."""
        generated = self._batch.request_ids
        finished = [self._finish(sequence, end_s) for sequence in self._batch.step()]
        last: list[str] = []
        for sequence, tokens in plan.chunks.items():
            if self._discipline is not None:
                self._discipline.served(sequence, tokens, end_s)
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.known_tokens:
                continue
            if sequence.known_tokens == sequence.prompt_tokens:
                sequence.first_token_s = end_s
                self._prompt_tokens += sequence.prompt_tokens
                self._computed_tokens += sequence.prompt_tokens - (sequence.cached_tokens or 0)
            sequence.known_tokens += 1
            last.append(sequence.request.request_id)
            if sequence.known_tokens == sequence.end_tokens:
                finished.append(self._finish(sequence, end_s))
        if last:
            generated += tuple(last)
        self._generated_tokens += len(generated)
        self._iteration_count += 1
        return generated, tuple(finished)

    def _gather(self) -> None:
        """Let the first running requests decode together, as far as they decode; never if a discipline orders them."""
        running, batch = self._running, self._batch
        while self._discipline is None and batch.count < len(running) and running[batch.count].is_decoding:
            batch.join(running[batch.count])

    def _finish(self, sequence: EngineSequence, end_s: float) -> FinishedRequest:
        del self._sequences[sequence.request_id]
        self._running.remove(sequence)
        if sequence.request.retain_id:
            self._retained.keep(sequence)
        else:
            self._pool.release(sequence.blocks)
        return FinishedRequest(
            request_id=sequence.request_id,
            prompt_tokens=sequence.prompt_tokens,
            generated_tokens=sequence.generated_tokens,
            cached_tokens=sequence.cached_tokens or 0,
            preemption_count=sequence.preemption_count,
            arrival_s=sequence.arrival_s,
            first_token_s=sequence.first_token_s,
            finished_s=end_s,
        )
