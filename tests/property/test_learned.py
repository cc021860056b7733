"""What was learned is saved and loaded: guesses are the same, now and after whatever is learned next."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import ended, grew, kept, prefilled
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.messages import LearnedRecord
from thunderagent.programs.policy import ClaimRules
from thunderagent.programs.state.program import Program, Turn
from thunderagent.runtime.learned_state import PoolRecord, decode_state, encode_state


def program_named(name: str) -> Program:
    return Program(name, 1, 0.0)


NAMES = st.sampled_from(["bash", "search", "", "édit"])
SECONDS = st.floats(0.001, 20_000.0)
TOKENS = st.integers(0, 200_000)
RULES = ClaimRules(adapt_capacity=True, growth_quantile=0.75, reserve_tokens=100)

LESSONS = st.lists(
    st.one_of(
        st.tuples(st.just("returned"), NAMES, SECONDS),
        st.tuples(st.just("censored"), NAMES, SECONDS),
        st.tuples(st.just("came_back_late"), NAMES, SECONDS, SECONDS),
        st.tuples(st.just("grown"), st.one_of(st.none(), TOKENS), TOKENS, SECONDS),
        st.tuples(st.just("ended"), TOKENS, st.integers(1, 60)),
        st.tuples(st.just("prefill"), st.one_of(st.none(), SECONDS), SECONDS, TOKENS, TOKENS),
        st.tuples(st.just("role"), NAMES, TOKENS),
        st.tuples(st.just("media"), NAMES, st.integers(1, 5000), TOKENS),
        st.tuples(st.just("hint"), NAMES, st.booleans()),
        st.tuples(st.just("restored"), SECONDS),
        st.tuples(st.just("lost"), st.sampled_from(["r0", "r1"]), st.floats(0.0, 1.0)),
        st.tuples(st.just("tier"), st.sampled_from(["r0", "r1"]), TOKENS, TOKENS, SECONDS),
        st.tuples(st.just("bytes"), st.integers(1, 100_000), st.integers(1, 100_000)),
        st.tuples(st.just("asked"), NAMES),
    ),
    max_size=60,
)


class Learner:
    """The knowledge about two replicas, and the time."""

    def __init__(self, learned: LearnedRecord | None = None, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.knowledge = Knowledge(RULES)
        self.hinted = program_named("hinted")
        if learned is not None:
            self.knowledge.adopt(learned)
        for replica_id in ("r0", "r1"):
            self.knowledge.replica_opened(replica_id, now_s)
            self.knowledge.tiers.polled(replica_id, 0, 0, tells_cached=True)

    def learn(self, lesson: tuple[Any, ...]) -> None:
        what, *given = lesson
        known = self.knowledge
        if what in ("returned", "censored", "came_back_late"):
            getattr(known.tool_times, what)(*given)
        elif what == "grown":
            known.growth.turn_ended(grew(*given))
            known._measure_reserves()
        elif what == "ended":
            known.growth.program_ended(*given)
            known.residences_s.add(given[0])
        elif what == "prefill":
            told = prefilled(*given)
            known.turn_left_engine(told, 0)
            known.goodput.turn_ended(told, known.prices.token_s)
        elif what == "role":
            known.role_outputs.turn_ended(ended(role=given[0], output=given[1]))
        elif what == "media":
            known.media_sizes.learn(((given[0], given[1]),), given[2])
        elif what == "hint":
            self.hinted.tenant = given[0]
            known.hints.learn(self.hinted, 1.0, 0.0 if given[1] else 2.0, 3.0)
        elif what == "restored":
            known.restore_pace.restored(self.now_s)
            known.restore_pace.accrue(self.now_s, waiting=True)
            self.now_s += given[0]
            known.restore_pace.accrue(self.now_s, waiting=False)
        elif what == "lost":
            self.lose(*given)
        elif what == "tier":
            replica_id, missing_tokens, found_tokens, token_s = given
            known.tiers.by_replica[replica_id].found(missing_tokens, min(missing_tokens, found_tokens))
            known.tiers.by_replica[replica_id].loaded(600 * token_s, 600)
        elif what == "bytes":
            program = program_named("p")
            known.learn_size(Turn(1, program, "", given[0], self.now_s), None, given[1])
        else:
            self.guesses()  # rates are refreshed, quantiles looked up

    def lose(self, replica_id: str, ratio: float) -> None:
        correction = self.knowledge.corrections[replica_id]
        for _ in range(30):
            correction.turn_ended(kept(1000, int(1000 * (1 - ratio)), self.now_s))
        self.now_s += 10.0
        correction.step(self.now_s, active_count=1, wanted=True)

    def guesses(self) -> list[Any]:
        known = self.knowledge
        found: list[Any] = [known.median_residence_s, known.mean_tool_s]
        found += [known.break_even_s(replica_id, 1000) for replica_id in ("r0", "r1")]
        for name in ("bash", "search", "", "édit", "never"):
            times = known.tool_times
            found += [times.hold_s(name, 20.0), times.return_rate_per_s(name, 3.0), known.idle_limit_s(name)]
            found += [known.role_outputs.expected_tokens(name), known.media_sizes.tokens(((name, 100),))]
            other = program_named("other")
            other.tenant = name
            found.append(known.hints.confidence_ratio(other, 1.0))
        found += [known.growth.tokens_per_s, known.growth.whole_tokens, known._turn_tokens, known._output_tokens]
        found += [known.goodput.decode_token_s, known.tokens_per_byte_ratio, known.restore_pace.interval_s]
        return [*found, *(known.corrections[replica_id].ratio for replica_id in ("r0", "r1"))]


@given(before=LESSONS, after=LESSONS)
def test_adopter_guesses_and_learns_like_the_first_learner(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    first = Learner()
    for lesson in before:
        first.learn(lesson)
    (record,) = decode_state(encode_state([PoolRecord(("m",), first.knowledge.export())]))
    second = Learner(record.learned, first.now_s)
    assert second.guesses() == first.guesses()
    assert msgspec.to_builtins(second.knowledge.export()) == msgspec.to_builtins(first.knowledge.export())
    for lesson in (each for each in after if each[0] not in ("lost", "hint")):  # these need more than is kept
        first.learn(lesson)
        second.learn(lesson)
    assert second.guesses() == first.guesses()


def test_kept_state_is_bounded() -> None:
    """This holds whatever names clients give to tools, roles and tenants."""
    learner = Learner()
    for number in range(3000):
        learner.learn(("returned", f"tool-{number}", 1.0))
        learner.learn(("role", f"role-{number}", 5))
        learner.learn(("media", f"media-{number}", 5, 5))
        learner.learn(("hint", f"tenant-{number}", True))
    assert len(encode_state([PoolRecord(("m",), learner.knowledge.export())])) < 600_000
