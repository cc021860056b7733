"""A turn goes on and ends: book what it used, learn from it, and give its room to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from thunderagent.programs.handlers.lives import Lives
from thunderagent.programs.messages import Outcome, TurnEnd
from thunderagent.programs.model.events import TurnJudged, TurnProgressed, TurnStarted, TurnUnverified
from thunderagent.programs.model.turn import Turn, TurnEnded
from thunderagent.programs.model.verdict import KEEPING_USED_RATIO, TURN_VERDICTS, TurnVerdict
from thunderagent.programs.policy import Moment
from thunderagent.programs.transitions import Core

_TURN_ENDED: Final = Moment.TURN_ENDED


class Turns:
    """Handles what happens to turns that have a lease, or wait for one."""

    def __init__(self, core: Core, lives: Lives) -> None:
        """Work on the parts of `core`; `lives` ends programs at their limits."""
        self._core = core
        self._lives = lives

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            TurnUnverified: self._turn_unverified,
            TurnStarted: self._turn_started,
            TurnProgressed: self._turn_progressed,
            TurnEnd: self._turn_ended,
            TurnJudged: self._turn_judged,
        }

    def _turn_unverified(self, event: TurnUnverified) -> None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is not None:
            turn.unverified = turn.unrepresentative = True

    def _turn_started(self, event: TurnStarted) -> None:
        core, turn = self._core, self._core.book.turns.get(event.turn_id)
        if turn is not None and turn.account_id is not None:
            core.book.replicas[turn.account_id].account.heard_s = core.book.now_s
        if turn is not None and turn.account_id is not None and turn.started_s is None:
            turn.started_s = core.book.now_s
            self._engine_began(turn)
            if core.stream.flows_whole:
                core.stream.began(turn)

    def _engine_began(self, turn: Turn) -> None:
        """Note, when its engine began a turn, what should have been cached of it."""
        if self._core.claim_rules.adapt_capacity and not turn.unrepresentative:
            self._core.knowledge.correction(turn.account_id or "").turn_seen(
                turn.kept_tokens,
                max(0, turn.resident_tokens - turn.kept_tokens),
                granted_s=turn.granted_s,
                kept_since_s=turn.kept_since_s,
                now_s=self._core.book.now_s,
            )

    def _turn_progressed(self, event: TurnProgressed) -> None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is None or turn.account_id is None:
            return
        self._core.book.replicas[turn.account_id].account.heard_s = self._core.book.now_s
        if turn.program is None:
            return
        if event.output_tokens > turn.output_tokens:
            turn.output_tokens = event.output_tokens
        self._core.book.resize(turn.program)

    def _turn_ended(self, event: TurnEnd) -> Moment | None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is None:
            return None
        if event.outcome == "finished":
            return self._turn_finished(turn, event)
        self._turn_lost(turn, event.outcome)
        return _TURN_ENDED

    def _turn_finished(self, turn: Turn, event: TurnEnd) -> Moment:
        core, book = self._core, self._core.book
        prompt_tokens = turn.prompt_tokens if event.prompt_tokens is None else event.prompt_tokens
        output_tokens = turn.output_tokens if event.output_tokens is None else event.output_tokens
        program = turn.program
        branch = program.branches.get(turn.branch_id) if program is not None else None
        if turn.account_id is not None:
            ended = TurnEnded(turn, branch, book.now_s, prompt_tokens, output_tokens, event.cached_tokens)
            knowledge, account = core.knowledge, book.replicas[turn.account_id].account
            account.heard_s = book.now_s
            loaded_tokens = knowledge.loading_tokens(ended) if knowledge.tiers.by_replica else 0
            price = knowledge.prices.of(turn.account_id)
            prefill_token_s = price.token_s if price.is_measured else None
            book.ledger.charge_turn(account, ended, prefill_token_s=prefill_token_s, loaded_tokens=loaded_tokens)
            knowledge.turn_left_engine(ended, account.turn_count - 1)
            if not turn.unrepresentative:
                self._learn_from(ended)
        if event.prompt_tokens is not None and turn.prompt_bytes:
            core.knowledge.learn_size(turn, branch, event.prompt_tokens)
        if program is None:
            del book.turns[turn.turn_id]
            core.turn_ends.end_anonymous(turn)
            return _TURN_ENDED
        if core.stream.flows:
            cached_tokens = turn.resident_tokens if event.cached_tokens is None else event.cached_tokens
            whole_tokens = prompt_tokens + output_tokens
            core.stream.ended(turn, whole_tokens, whole_tokens - min(prompt_tokens, cached_tokens), finished=True)
        if branch is not None:
            is_believed = branch.learn(prompt_tokens, output_tokens)
            branch.turn_finished(event.tool)
            if is_believed and turn.account_id is not None:  # its replica was not lost meanwhile
                branch.kept_since_s = book.now_s
        if program.verdict.verdict is not TurnVerdict.OK:
            program.verdict.ended(TurnVerdict.OK, "", None, turn.branch_id, turn.prompt_bytes)
        program.prompt_tokens_total += prompt_tokens
        program.output_tokens_total += output_tokens
        program.cached_tokens_total += event.cached_tokens or 0
        program.tool, program.tool_named = event.tool, bool(event.tool)
        del book.turns[turn.turn_id]
        core.turn_ends.end_turn(program, turn)
        if len(program.branches) > 1:
            core.turn_ends.forget_branches(program, turn, finished=True)
        core.turn_ends.after_turn(program, turn, "finished", tool_begins=not turn.unrepresentative)
        if program.program_limits is not None:
            limit = core.program_limits.why_ended(program, book.now_s)
            if limit is not None:
                self._lives.end_for_good(program, limit)
                return Moment.PROGRAM_ENDED
        return _TURN_ENDED

    def _learn_from(self, ended: TurnEnded) -> None:
        """Learn from a finished turn, and from what was lost of it."""
        core, turn = self._core, ended.turn
        tells_cached, has_tier = ended.cached_tokens is not None, turn.account_id in core.knowledge.tiers.by_replica
        if tells_cached:
            replica = core.book.replicas[turn.account_id or ""]
            replica.tells_cached = True
            account = replica.account
            if account.demand_tokens > account.limit_tokens or (account.kv_used_ratio or 0.0) >= KEEPING_USED_RATIO:
                replica.keeping.pressed(core.book.now_s)
            elif not has_tier and account.capacity_tokens is not None:
                expected_tokens = min(turn.kept_tokens, ended.prompt_tokens)
                replica.keeping.turn_ended(expected_tokens, ended.cached_tokens or 0, turn.kept_since_s)
        if not tells_cached or has_tier:
            if turn.started_s is None:
                self._engine_began(turn)
        elif core.claim_rules.adapt_capacity:
            core.knowledge.correction(turn.account_id or "").turn_ended(ended)
        if ended.branch is not None:
            core.knowledge.turn_ended(ended)

    def _turn_judged(self, event: TurnJudged) -> None:
        turn, verdict = self._core.book.turns.get(event.turn_id), TURN_VERDICTS.get(event.verdict)
        if turn is not None and turn.program is not None and verdict is not None:
            turn.verdict_cause = f"{event.verdict}: {event.cause}" if event.cause else event.verdict
            replica_id = turn.account_id or turn.program.replica_id
            turn.program.verdict.ended(verdict, event.cause, replica_id, turn.branch_id, turn.prompt_bytes)

    def _turn_lost(self, turn: Turn, outcome: Outcome) -> None:
        """End a turn without learning from it: held or in flight, failed, refused or left by its client."""
        if outcome == "abandoned" and turn.program is not None and not turn.verdict_cause:
            turn.program.verdict.ended(TurnVerdict.CLIENT_LEFT, "", None, turn.branch_id, turn.prompt_bytes)
        self._core.turn_ends.drop(turn, outcome)
