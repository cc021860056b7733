"""What the scheduler learns from events: how long tools run, how programs grow, what a lost token costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.learned.capacity import CapacityCorrection
from thunderagent.programs.learned.goodput import Goodput
from thunderagent.programs.learned.histogram import LogHistogram, check_range, geometric_edges
from thunderagent.programs.learned.holding import (
    NOTHING_HELD,
    REFRESH_S,
    EngineCosts,
    HoldingPlan,
    Returns,
    plan_holding,
)
from thunderagent.programs.learned.price import Prices, SeenTurn
from thunderagent.programs.learned.sizes import Growth, MediaSizes, RoleOutputs, TurnMeans
from thunderagent.programs.learned.tier_price import TierPrices
from thunderagent.programs.learned.tool_times import ToolTimes
from thunderagent.programs.learned.trust import HintRecord, JudgeRecord
from thunderagent.programs.learned.waiting import RestorePace
from thunderagent.programs.messages import CapacityRecord, LearnedRecord, PriceRecord
from thunderagent.programs.policy import ClaimRules
from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.program import (
    LEAST_TOKENS_PER_BYTE_RATIO,
    MAIN_BRANCH,
    MOST_TOKENS_PER_BYTE_RATIO,
    Branch,
    Program,
    Turn,
    TurnEnded,
    usual_ratio,
)

FIRST_TOKENS_PER_BYTE_RATIO: Final = 0.25
"""English text in a common tokenizer: four bytes a token. Used until the first usage report."""

LEARNING_RATIO: Final = 0.05
"""Weight of the newest turn in the learned tokens per byte of new programs."""

UNKNOWN_GROWTH_RATIO: Final = 3.0
"""Until some programs ended, a program is expected to exceed its first prompt by this ratio of it."""

LEAST_IDLE_LIMIT_S: Final = 300.0
"""However quick its tool usually is, a program may take this long: a person may be asked, or a network is slow."""

LATE_RETURNS_RATIO: Final = 0.99
"""Ratio of a tool's returns that count as usual; the idle limit is `IDLE_LIMIT_FACTOR` times their longest time."""

IDLE_LIMIT_FACTOR: Final = 2.0

RESERVE_GUESS_WEIGHT: Final = 16.0
"""Weight of the first guess of what a turn adds, in turns: as many as are seen before anything is planned."""

TOOL_LEARNING_RATIO: Final = 0.05
"""Weight of the newest tool's time in the mean."""

RESIDENCE_EDGES_S: Final = geometric_edges(0.5, 2**0.5, 38)
"""Half a second to two days."""

RETURNS_S: Final = 1.0
"""How long it stays known when programs come back."""

SHORT_TOOLS_RATIO: Final = 0.1
"""Tools that may be shorter than what is expected of the tools of a program that was never seen."""

UNSEEN_REPLICAS_COUNT: Final = 256
"""How many absent replicas keep what was learned of them: pods come back under other names."""


class Knowledge:
    """Everything that is learned, over all programs and replicas."""

    __slots__ = (
        "_at_tools",
        "_known_capacities",
        "_known_returns",
        "_learns_quantile",
        "_output_tokens",
        "_plans",
        "_rules",
        "_turn_tokens",
        "corrections",
        "goodput",
        "growth",
        "hints",
        "judge_record",
        "mean_tool_s",
        "media_sizes",
        "prices",
        "residences_s",
        "restore_pace",
        "role_outputs",
        "shortened_ids",
        "tiers",
        "tokens_per_byte_ratio",
        "tool_times",
        "turn_means",
    )

    def __init__(self, rules: ClaimRules | None = None) -> None:
        """Start with first guesses; `rules` say how claims are measured."""
        self._rules = rules or ClaimRules()
        self._learns_quantile = self._rules.growth_quantile > 0
        self._turn_tokens = self._output_tokens = self._rules.reserve_tokens
        """What claims hold beyond contexts: for a whole turn, and for an answer alone."""
        self.tool_times = ToolTimes()
        self.prices = Prices()
        self.growth = Growth()
        self.media_sizes = MediaSizes()
        self.goodput = Goodput()
        self.restore_pace = RestorePace()
        self.role_outputs = RoleOutputs()
        self.judge_record = JudgeRecord()
        self.hints = HintRecord()
        self._at_tools: dict[Program, None] = {}
        """Programs whose tool runs."""
        self.mean_tool_s = 0.0
        """How long tools took lately, the last one weighing `TOOL_LEARNING_RATIO`; 0 until one came back."""
        self.tokens_per_byte_ratio = FIRST_TOKENS_PER_BYTE_RATIO
        """For new programs."""
        self.residences_s = LogHistogram(RESIDENCE_EDGES_S)
        """Time that programs stay: from the first turn to the end of the last one, whenever they were released."""
        self.corrections: dict[str, CapacityCorrection] = {}
        """How much of each replica's capacity may be claimed."""
        self._known_capacities: dict[str, CapacityRecord] = {}
        """Of replicas not heard of since their records were adopted."""
        self.tiers = TierPrices()
        self.turn_means = TurnMeans()
        self._plans: dict[str, tuple[float, HoldingPlan]] = {}
        """By replica, with the time from which they are outdated."""
        self._known_returns: tuple[float, Returns | None] = (-inf, None)
        """The same of `_returns`."""
        self.shortened_ids: dict[str, None] = {}
        """Replicas for which less holding was planned than before, until somebody applied that to who is held there."""

    def replica_opened(self, replica_id: str, now_s: float) -> None:
        """Start to learn of a replica, or resume it."""
        correction = self.corrections[replica_id] = CapacityCorrection(now_s)
        if (known := self._known_capacities.pop(replica_id, None)) is not None:
            correction.adopt(known)

    def replica_removed(self, replica_id: str) -> None:
        """Forget a replica."""
        self.corrections.pop(replica_id, None)
        self.prices.replica_removed(replica_id)
        self.tiers.replica_removed(replica_id)
        self._plans.pop(replica_id, None)
        self.shortened_ids.pop(replica_id, None)

    def export(self) -> LearnedRecord:
        """Return all that was learned. Cost: O(all of it), half a millisecond at most."""
        corrections = self.corrections.items()
        capacities = [record for each_id, each in corrections if (record := each.export(each_id)) is not None]
        unseen = list(self._known_capacities.values())[-UNSEEN_REPLICAS_COUNT:]
        decode, decode_token_s, since_refresh = self.goodput.export()
        all_tools, tools = self.tool_times.export()
        all_roles, roles = self.role_outputs.export()
        return LearnedRecord(
            all_tools=all_tools,
            tools=tools,
            mean_tool_s=self.mean_tool_s,
            growth=self.growth.export(),
            prices=PriceRecord(
                decode,
                decode_token_s,
                since_refresh,
                self.tokens_per_byte_ratio,
            ),
            residences_s=self.residences_s.export(),
            all_roles=all_roles,
            roles=roles,
            media_factors=self.media_sizes.export(),
            hints=self.hints.export(),
            restores=self.restore_pace.export(),
            capacities=(*unseen, *capacities),
            tiers=self.tiers.export(),
            turn_means=self.turn_means.export(),
            replica_prices=self.prices.export(),
        )

    def adopt(self, learned: LearnedRecord) -> None:
        """Replace what was learned here by what another process learned. Raises ValueError for impossible values."""
        ratio = learned.prices.tokens_per_byte_ratio
        check_range("mean time of tools", learned.mean_tool_s, (0.0, inf))
        check_range("tokens a byte", ratio, (LEAST_TOKENS_PER_BYTE_RATIO, MOST_TOKENS_PER_BYTE_RATIO))
        self.tool_times.adopt(learned.all_tools, learned.tools)
        self.mean_tool_s = learned.mean_tool_s
        self._known_returns = (-inf, None)
        self.growth.adopt(learned.growth)
        self.prices.adopt(learned.replica_prices)
        self.goodput.adopt(learned.prices)
        self.tokens_per_byte_ratio = ratio
        self.residences_s.adopt(learned.residences_s)
        self.role_outputs.adopt(learned.all_roles, learned.roles)
        self.media_sizes.adopt(learned.media_factors)
        self.hints.adopt(learned.hints)
        self.restore_pace.adopt(learned.restores)
        for known in learned.capacities if self._rules.adapt_capacity else ():
            if (correction := self.corrections.get(known.replica_id)) is not None:
                correction.adopt(known)
            else:
                CapacityCorrection(0.0).adopt(known)  # raises if it is impossible
                self._known_capacities[known.replica_id] = known
        self.tiers.adopt(learned.tiers)
        if learned.turn_means is not None:
            self.turn_means.adopt(learned.turn_means)
        self._measure_reserves()

    def _measure_reserves(self) -> None:
        """Compute what claims hold beyond contexts, if that is learned.

        It runs after each turn: every 16 turns would let claims lag behind what turns add, to save a fiftieth of an
        event's time.
        """
        growth, rules = self.growth, self._rules
        if rules.learns_reserve:
            means = self.turn_means
            all_tokens = RESERVE_GUESS_WEIGHT * rules.reserve_tokens + means.count * means.grown_tokens
            self._turn_tokens = int(all_tokens / (RESERVE_GUESS_WEIGHT + means.count))
        elif self._learns_quantile:
            self._turn_tokens = growth.turn_tokens(rules.growth_quantile, rules.reserve_tokens)
            self._output_tokens = growth.output_tokens(rules.growth_quantile, rules.reserve_tokens)

    def learn_size(self, turn: Turn, branch: Branch | None, prompt_tokens: int) -> None:
        """Learn how many tokens a prompt's bytes are, or, with media, what the media add to its text.

        If nobody vouches for the turn's numbers, only its own branch learns.
        """
        if turn.unverified:
            if branch is not None and not turn.media:
                branch.tokens_per_byte_ratio = prompt_tokens / turn.prompt_bytes
            return
        if turn.media:
            known_ratio = branch.tokens_per_byte_ratio if branch is not None else None
            text_tokens = turn.prompt_bytes * (known_ratio or self.tokens_per_byte_ratio)
            self.media_sizes.learn(turn.media, prompt_tokens - text_tokens)
            return
        ratio = prompt_tokens / turn.prompt_bytes
        is_usual = LEAST_TOKENS_PER_BYTE_RATIO <= ratio <= MOST_TOKENS_PER_BYTE_RATIO
        usual = ratio if is_usual else usual_ratio(ratio)
        self.tokens_per_byte_ratio += LEARNING_RATIO * (usual - self.tokens_per_byte_ratio)
        if branch is not None:
            branch.tokens_per_byte_ratio = ratio

    def lost_token_s(self, replica_id: str | None) -> float:
        """Return what it surely costs a replica to regain a token that its memory lost: by computing or loading it.

        That is the lower end of the price: what is held for a guess is missing for everybody else.
        """
        prefill_token_s = self.prices.of(replica_id).least_token_s
        return self.tiers.lost_token_s(replica_id, prefill_token_s) if self.tiers.by_replica else prefill_token_s

    def break_even_s(self, replica_id: str | None, memory_tokens: float) -> float:
        """Return how long a replica takes to fill its whole memory, by prefill or from the tier behind it.

        Holding tokens pays at most for that long, compared with regaining them later: memory of C tokens that takes b·C
        seconds to fill does nothing else meanwhile.
        """
        return self.lost_token_s(replica_id) * memory_tokens

    def holding(self, replica_id: str, account: Account, now_s: float) -> HoldingPlan:
        """Return for how long a replica's programs are held through their tools: planned anew every `REFRESH_S`.

        Nothing is held where the size of its memory is unknown.
        """
        capacity_tokens = account.assumed_tokens
        if capacity_tokens is None:
            return NOTHING_HELD
        outdated_s, before = self._plans.get(replica_id, (-inf, NOTHING_HELD))
        plan = before
        if now_s >= outdated_s:
            price, correction = self.prices.of(replica_id), self.corrections.get(replica_id)
            token_s = price.cautious_token_s
            if self.tiers.by_replica:
                token_s = self.tiers.lost_token_s(replica_id, token_s)
            plan = plan_holding(
                EngineCosts(token_s, price.iteration_s, price.sequence_s),
                self.turn_means,
                self._returns(now_s),
                memory_tokens=capacity_tokens,
                corrected_ratio=1.0 if correction is None else correction.ratio,
                own_ratio=account.own_ratio,
                reserve_tokens=self._turn_tokens,
                least_token_s=price.least_token_s,
                most_token_s=price.most_token_s if self._rules.adapt_capacity else inf,
                was_filled=before.may_overfill,
            )
            if plan.threshold_s < before.threshold_s:
                self.shortened_ids[replica_id] = None
            self._plans[replica_id] = (now_s + REFRESH_S, plan)
        return plan

    def _returns(self, now_s: float) -> Returns:
        """Return when programs come back from their tools. Those that are not back yet were at risk until now.

        Without them, programs that are over and did not say so would count as if they had never been there. Cost:
        O(tools that run), at most once in `RETURNS_S`.
        """
        outdated_s, returns = self._known_returns
        if returns is None or now_s >= outdated_s:
            away_s = [now_s - program.acting_since_s for program in self._at_tools]
            censored = [program.censored_after_s for program in self._at_tools]
            returns = self.tool_times.returns(away_s, [each for each in censored if each is not None])
            self._known_returns = (now_s + RETURNS_S, returns)
        return returns

    @property
    def tools_running_count(self) -> int:
        """Programs whose tool runs."""
        return len(self._at_tools)

    def last_plan(self, replica_id: str) -> HoldingPlan:
        """Return what was planned last for a replica."""
        return self._plans.get(replica_id, (0.0, NOTHING_HELD))[1]

    def loading_tokens(self, ended: TurnEnded) -> int:
        """Return how many tokens could have been computed in the time that a turn loaded from its replica's tier."""
        return int(self.tiers.loading_s(ended) / self.prices.of(ended.turn.account_id).decided_token_s)

    @property
    def median_residence_s(self) -> float:
        """How long half of the programs stay; infinite until one ended."""
        return self.residences_s.quantile(0.5, inf)

    def idle_limit_s(self, tool: str) -> float:
        """Return the time in a tool after which a program will most likely not come back. Cost: O(intervals)."""
        usual_s = self.tool_times.returned_within_s(tool, LATE_RETURNS_RATIO)
        return max(LEAST_IDLE_LIMIT_S, IDLE_LIMIT_FACTOR * usual_s)

    def ideal_turn_s(self, role: str) -> float:
        """Return how long an idle engine generates for a turn of that role; 0 if unknown."""
        return self.role_outputs.expected_tokens(role) * self.goodput.decode_token_s

    def shortest_tool_s(self) -> float:
        """Return what all but few tools take at least; 0 if unknown."""
        return self.tool_times.shortest_s(SHORT_TOOLS_RATIO)

    def turn_ended(self, ended: TurnEnded) -> None:
        """Learn from a turn of a live program, on one of its branches."""
        program = ended.turn.program
        assert program is not None
        if not program.first_prompt_tokens:
            program.first_prompt_tokens = ended.prompt_tokens
        larger_tokens = ended.prompt_tokens + ended.output_tokens - program.first_prompt_tokens
        if larger_tokens > 0:
            program.larger_tokens_total += larger_tokens
        program.learned_count += 1
        self.growth.turn_ended(ended)
        self.turn_means.turn_ended(ended)
        self._measure_reserves()
        self.role_outputs.turn_ended(ended)
        program.ideal_s_total += self.goodput.turn_ended(ended, self.prices.of(ended.turn.account_id).decided_token_s)
        program.last_ended_s = ended.now_s

    def turn_left_engine(self, ended: TurnEnded, others_count: int) -> None:
        """Learn from any finished turn what its replica's time is spent on; `others_count` are still in flight there.

        One that was not left alone, or may have loaded from a tier, tells only what the engine computed.
        """
        turn, is_row, loaded_tokens = ended.turn, not ended.turn.unrepresentative, 0
        if self.tiers.by_replica and is_row and ended.branch is not None:
            price = self.prices.of(turn.account_id)
            loaded = self.tiers.turn_ended(ended, price.answered_s(ended, others_count), price.decided_token_s)
            is_row, loaded_tokens = loaded is not None, loaded or 0
        least_tokens = ended.uncached_tokens
        if ended.cached_tokens is None:
            least_tokens = min(least_tokens, ended.prompt_tokens - ended.known_tokens)
        seen = SeenTurn(
            turn.granted_s,
            None if ended.first_token_s is None else turn.granted_s + ended.first_token_s,
            ended.now_s,
            ended.uncached_tokens,
            least_tokens,
            ended.output_tokens,
            context_tokens=ended.prompt_tokens + ended.output_tokens // 2,
            loaded_tokens=loaded_tokens,
            is_row=is_row,
        )
        self.prices.turn_ended(turn.account_id or "", seen, others_count)

    def turn_lost(self, turn: Turn, now_s: float, others_count: int) -> None:
        """Note what an engine computed for a turn in flight that left no usage."""
        if turn.started_s is not None and turn.account_id is not None:
            tokens = max(0, turn.prompt_tokens - turn.resident_tokens)
            output_tokens, context_tokens = turn.output_tokens, turn.prompt_tokens + turn.output_tokens // 2
            seen = SeenTurn(
                turn.granted_s,
                turn.started_s,
                now_s,
                tokens,
                tokens,
                output_tokens,
                context_tokens=context_tokens,
                is_row=False,
            )
            self.prices.turn_ended(turn.account_id, seen, others_count)

    def tool_began(self, program: Program) -> None:
        """Note that a program's tool runs from now on."""
        program.tool_runs = True
        program.censored_after_s = None
        self._at_tools[program] = None

    def tool_returned(self, program: Program, now_s: float) -> None:
        """Learn how long a program was away when its turn arrives."""
        program.away_s = now_s - program.acting_since_s
        del self._at_tools[program]
        program.ideal_s_total += program.away_s
        learning_ratio = TOOL_LEARNING_RATIO if self.mean_tool_s else 1.0
        self.mean_tool_s += learning_ratio * (program.away_s - self.mean_tool_s)
        if program.censored_after_s is None:
            self.tool_times.returned(program.tool, program.away_s)
        else:
            self.tool_times.came_back_late(program.tool, program.censored_after_s, program.away_s)
        program.tool_runs = False

    def tool_is_another(self, program: Program) -> None:
        """Learn nothing from a tool that turned out to be another one, or to have begun later."""
        program.tool_runs = False
        del self._at_tools[program]

    def tool_censored(self, program: Program, now_s: float) -> None:
        """Learn that a program whose claim is taken is not back yet."""
        if program.tool_runs and program.censored_after_s is None:
            program.censored_after_s = away_s = now_s - program.acting_since_s
            self.tool_times.censored(program.tool, away_s)

    def tools_censored(self, programs: Sequence[Program], now_s: float) -> None:
        """Learn the same of many programs."""
        by_tool: dict[str, list[float]] = {}
        for program in programs:
            if program.tool_runs and program.censored_after_s is None:
                program.censored_after_s = away_s = now_s - program.acting_since_s
                by_tool.setdefault(program.tool, []).append(away_s)
        for tool, of_tool_s in by_tool.items():
            self.tool_times.all_censored(tool, of_tool_s)

    def program_ended(self, program: Program, now_s: float) -> None:
        """Learn from a program that ended."""
        if program.tool_runs and program.censored_after_s is None:
            self.tool_times.censored(program.tool, now_s - program.acting_since_s)
        self._at_tools.pop(program, None)
        program.tool_runs = False
        if program.turn_count:
            if program.last_ended_s is not None:
                self.residences_s.add(program.last_ended_s - program.opened_s)
                self.goodput.program_ended(program.last_ended_s - program.opened_s, program.ideal_s_total)
            self.turn_means.program_ended(program.turn_count)
            if program.learned_count:
                self.growth.program_ended(program.larger_tokens_total, program.learned_count)

    def measure_claim(self, program: Program) -> None:
        """Measure what a program claims: its context and what its next turn adds; separately its further growth."""
        reserve_tokens = self._turn_tokens
        if self._learns_quantile and (here := program.in_flight or program.held):
            generated_tokens = max([turn.output_tokens for turn in here.values()])
            reserve_tokens = max(0, self._output_tokens - generated_tokens)
        program.reserve_tokens = reserve_tokens
        if len(program.branches) == 1:  # as most have: what `Program.measure_claim` would say
            whole_tokens, output_tokens = program.branches[MAIN_BRANCH].context_tokens, 0
            for turns in (program.in_flight, program.held):
                for turn in turns.values():
                    output_tokens += turn.output_tokens
                    if turn.prompt_tokens > whole_tokens:
                        whole_tokens = turn.prompt_tokens
            whole_tokens += output_tokens
        else:
            whole_tokens = program.measure_claim()
        program.claim_tokens = claim_tokens = whole_tokens + reserve_tokens
        first_tokens = program.first_prompt_tokens or claim_tokens
        larger_tokens = self.growth.whole_tokens
        if larger_tokens == inf:
            larger_tokens = UNKNOWN_GROWTH_RATIO * first_tokens
        growth_tokens = first_tokens + larger_tokens - claim_tokens
        program.growth_tokens = int(growth_tokens) if growth_tokens > 0 else 0
