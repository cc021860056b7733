"""Which attempts belong to the same turn, and what is remembered of ended ones."""

from __future__ import annotations

from itertools import count as count_from

import pytest

from thunderagent.proxy.reading.dialects import CHAT
from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns import record as module
from thunderagent.proxy.turns.record import LEAST_OBSERVED_S, REMEMBER_S, Attempts, Patience, Record, told_key

IDS = count_from(1)


def attempt(
    program_id: str | None = "p",
    *,
    body: bytes = b"{}",
    count: int = 0,
    key: str = "",
    path: str = "/v1/chat/completions",
    branch_id: str = "",
    since_s: float = 0.0,
    tenant: str = "",
) -> Record:
    turn = TurnRequest(program_id, "body", branch_id, body, usage_added=False, prefix=(), tenant=tenant)
    patience = Patience(retry_count=count, idempotency_key=key)
    target = Target.parse(path)
    return Record(turn, patience, "POST", target, CHAT, body, since_s, since_s, next(IDS), None)


def test_an_attempt_takes_the_age_of_the_one_before_and_hands_it_on() -> None:
    """Of three in a row the third waits since the first arrived."""
    attempts, chain = Attempts(), [attempt(count=count, since_s=float(count)) for count in range(3)]
    for number, each in enumerate(chain):
        attempts.begin(each, float(number))
    assert [each.supersedes_id for each in chain] == [None, chain[0].turn_id, chain[1].turn_id]
    assert [each.superseded for each in chain] == [True, True, False]
    assert [each.since_s for each in chain] == [0.0, 0.0, 0.0]
    for each in chain:
        attempts.end(each, 3.0, answered=each is chain[2])
    assert len(attempts) == 0
    again = attempt(count=1, since_s=4.0)
    attempts.begin(again, 4.0)
    assert again.since_s == 4.0, "a turn that was answered left its age"


@pytest.mark.parametrize(
    "other",
    [{"body": b"[]"}, {"path": "/v1/completions"}, {"branch_id": "b"}, {"program_id": "q"}, {"body": b"{ }"}],
)
def test_changed_body_path_branch_or_program_is_a_new_turn(other: dict[str, str]) -> None:
    attempts, first, second = Attempts(), attempt(), attempt(count=1, **other)  # type: ignore[arg-type]
    attempts.begin(first, 0.0)
    attempts.begin(second, 0.0)
    assert not first.superseded
    assert second.supersedes_id is None


def test_a_retry_of_the_same_count_is_no_retry_of_that_attempt() -> None:
    """Two that are both second attempts are samples."""
    attempts, one, other = Attempts(), attempt(count=1), attempt(count=1)
    attempts.begin(one, 0.0)
    attempts.begin(other, 0.0)
    assert not one.superseded
    assert one.is_sample
    assert other.is_sample


def test_samples_stay_samples_when_the_others_are_gone() -> None:
    """Which of them is retried cannot be known; the age of the one that left goes to its retry."""
    attempts, one, other = Attempts(), attempt(since_s=1.0), attempt(since_s=2.0)
    attempts.begin(one, 1.0)
    attempts.begin(other, 2.0)
    attempts.end(one, 3.0, answered=False)
    again = attempt(count=1, since_s=4.0)
    attempts.begin(again, 4.0)
    assert not other.superseded
    assert (again.supersedes_id, again.since_s) == (one.turn_id, 1.0)
    third = attempt(count=1, since_s=5.0)
    attempts.begin(third, 5.0)
    assert third.since_s == 5.0, "one age went to two"


def test_with_keys_it_can_be_told() -> None:
    attempts, one, other = Attempts(), attempt(key="a"), attempt(key="b")
    attempts.begin(one, 0.0)
    attempts.begin(other, 0.0)
    again = attempt(key="b", count=1)
    attempts.begin(again, 1.0)
    assert (one.superseded, other.superseded, again.supersedes_id) == (False, True, other.turn_id)


def test_an_ended_attempt_leaves_its_age_to_the_same_body_though_unmarked() -> None:
    """A transport that gives up by itself does not say that it tries again."""
    attempts, first = Attempts(), attempt(body=b"{1}")
    attempts.begin(first, 0.0)
    attempts.end(first, 30.0, answered=False)
    other, again = attempt(body=b"{2}", since_s=31.0), attempt(body=b"{1}", since_s=31.0)
    for each in (other, again):
        attempts.begin(each, 31.0)
    assert (other.since_s, again.since_s) == (31.0, 0.0)
    assert not attempts._ended_of


def test_an_age_is_forgotten_after_a_while() -> None:
    attempts, first = Attempts(), attempt(since_s=1.0)
    attempts.begin(first, 1.0)
    attempts.end(first, 2.0, answered=False)
    late = attempt(count=1, since_s=3.0 + REMEMBER_S)
    attempts.begin(late, 3.0 + REMEMBER_S)
    assert late.since_s == 3.0 + REMEMBER_S


def test_memory_of_attempts_is_bounded() -> None:
    attempts = Attempts()
    for number in range(module.REMEMBER_COUNT + 50):
        each = attempt(f"p{number}")
        attempts.begin(each, 0.0)
        attempts.end(each, 0.0, answered=False)
    assert len(attempts._ended) == module.REMEMBER_COUNT


def test_anonymous_attempts_without_a_key_are_nobodys() -> None:
    attempts, first, second = Attempts(), attempt(None), attempt(None, count=1)
    attempts.begin(first, 0.0)
    attempts.begin(second, 0.0)
    assert not first.superseded
    assert len(attempts) == 0
    attempts.end(first, 1.0, answered=False)
    attempts.end(second, 1.0, answered=True)


def test_an_idempotency_key_ends_no_attempt_of_another_tenants() -> None:
    """Its age does not pass over, either."""
    attempts, first = Attempts(), attempt(None, key="k", tenant="red")
    stranger, own = (attempt(None, key="k", count=1, since_s=2.0, tenant=tenant) for tenant in ("blue", "red"))
    attempts.begin(first, 0.0)
    attempts.begin(stranger, 1.0)
    assert not first.superseded
    attempts.end(first, 1.0, answered=False)
    attempts.end(stranger, 1.0, answered=True)
    again = attempt(None, key="k", count=1, since_s=2.0, tenant="blue")
    attempts.begin(again, 2.0)
    attempts.begin(own, 2.0)
    assert (again.since_s, own.since_s) == (2.0, 0.0)


def test_abandoned_attempt_is_forgotten_in_time() -> None:
    """The next one that ends without an answer removes those that are too old, and keeps renewed ones."""
    attempts = Attempts()

    def ends(program_id: str, now_s: float) -> None:
        each = attempt(program_id)
        attempts.begin(each, now_s)
        attempts.end(each, now_s, answered=False)

    for number in range(50):
        ends(f"p{number}", 0.0)
    ends("p7", REMEMBER_S)
    assert len(attempts._ended) == 50
    ends("q", REMEMBER_S + 1.0)
    assert [place[0] for place in attempts._ended] == ["p7", "q"]


def test_gateways_know_attempts_at_a_turn_by_what_their_client_and_their_body_say() -> None:
    """They end the one that was retried elsewhere, whatever other turns its program has."""
    first = attempt(key="k", body=b"a" * 10_000)
    assert told_key(first) == told_key(attempt(key="k", body=b"a" * 10_000, count=1))
    others = [attempt(key="l", body=b"a" * 10_000), attempt(key="k", body=b"a" * 9_999 + b"b"), attempt("q", key="k")]
    others.append(attempt(key="k", body=b"a" * 10_000, tenant="t"))
    assert len({told_key(each) for each in (first, *others)}) == 5
    assert told_key(attempt()) == told_key(attempt(None, key="k")) == ""
    assert told_key(attempt(key="\udcff")) != told_key(attempt(key="\udcfe")), "bytes of a header that are not UTF-8"
    attempts, beside = Attempts(), attempt(key="k", body=b"b")
    for each in (first, beside):
        attempts.begin(each, 0.0)
    attempts.revoke("p", first.turn_id)
    attempts.revoke("nobody", 0)
    assert (first.superseded, beside.superseded) == (True, False)


def given_up(*waits_s: float, gave_up: bool = True) -> Record:
    """Return the attempt after those that were given up after these times, each a second after the one before."""
    attempts, now_s = Attempts(), 0.0
    for wait_s in waits_s:
        each = attempt(since_s=now_s)
        attempts.begin(each, now_s)
        now_s += wait_s
        attempts.end(each, now_s, answered=False, gave_up=gave_up)
        now_s += 1.0
    last = attempt(since_s=now_s)
    attempts.begin(last, now_s)
    return last


@pytest.mark.parametrize(
    ("waits_s", "observed_s"),
    [
        ((300.0, 300.2), 300.0),
        ((300.0, 304.0), 300.0),
        ((20.0, 300.0, 299.0), 299.0),
        ((300.0, 300.0, 20.0), None),
        ((300.0,), None),
        ((300.0, 310.0), None),
        ((30.0, 32.0), None),
        ((LEAST_OBSERVED_S - 0.1, LEAST_OBSERVED_S - 0.1), None),
        ((), None),
    ],
)
def test_a_client_that_twice_gives_up_after_the_same_time_has_a_timer(
    waits_s: tuple[float, ...], observed_s: float | None
) -> None:
    """Other times, and a single one, tell nothing: somebody may have ended it."""
    assert given_up(*waits_s).observed_s == observed_s


def test_an_attempt_that_failed_or_had_begun_its_answer_tells_no_patience() -> None:
    """Its client did not tire of waiting."""
    assert given_up(300.0, 300.0, gave_up=False).observed_s is None
