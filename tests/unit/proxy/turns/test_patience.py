"""Clients' own statements about their waiting, and the number of turns that may be retried."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from thunderagent.errors import RequestError
from thunderagent.leases import TurnHint
from thunderagent.proxy.turns.forward import RetryBudget, RetrySettings
from thunderagent.proxy.turns.record import Patience, patience_of


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Patience(40.0)),
        ({"x-stainless-read-timeout": "600.0"}, Patience(600.0, counts_bytes=True)),
        ({"x-stainless-read-timeout": "1e2"}, Patience(100.0, counts_bytes=True)),
        ({"X-Stainless-Timeout": "60"}, Patience(60.0)),
        ({"X-Stainless-Timeout": "600", "X-Stainless-Runtime": "node"}, Patience(290.0, counts_bytes=True)),
        ({"X-Stainless-Timeout": "60", "X-Stainless-Runtime": "node"}, Patience(60.0)),
        ({"X-Stainless-Read-Timeout": "600", "X-Stainless-Runtime": "CPython"}, Patience(600.0, counts_bytes=True)),
        ({"User-Agent": "opencode/1.2 ai-sdk/5", "X-Program-Patience": "900"}, Patience(900.0)),
        ({"x-stainless-read-timeout": "NOT_GIVEN", "X-Stainless-Timeout": "60"}, Patience(60.0)),
        ({"x-stainless-read-timeout": "5", "X-Stainless-Timeout": "60"}, Patience(5.0, counts_bytes=True)),
        ({"X-Program-Patience": "7", "x-stainless-read-timeout": "5"}, Patience(7.0)),
        ({"x-stainless-read-timeout": "-1"}, Patience(40.0)),
        ({"x-stainless-read-timeout": "inf"}, Patience(40.0)),
        ({"x-stainless-retry-count": "2"}, Patience(40.0, retry_count=2)),
        ({"x-stainless-retry-count": "9" * 9}, Patience(40.0, retry_count=1000)),
        ({"x-stainless-retry-count": "9" * 5000}, Patience(40.0)),
        ({"x-stainless-retry-count": "-1"}, Patience(40.0)),
        ({"x-stainless-retry-count": "²"}, Patience(40.0)),
        ({"idempotency-key": "k"}, Patience(40.0, idempotency_key="k")),
    ],
)
def test_client_headers_say_how_long_it_waits(headers: dict[str, str], expected: Patience) -> None:
    """Our header is first; text that is no number in other headers is no error."""
    assert patience_of(CIMultiDict(headers), 40.0) == expected
    assert patience_of(CIMultiDict({})).patience_s is None


def test_a_transport_that_gives_up_by_itself_is_served_before() -> None:
    """OpenCode states nothing, and its transport stops after 300 s."""
    assert patience_of(CIMultiDict({"User-Agent": "opencode/1.2.0"})) == Patience(290.0, counts_bytes=True)
    assert patience_of(CIMultiDict({"User-Agent": "python-httpx/1"})).patience_s is None


@pytest.mark.parametrize("value", ["", "x", "0", "-3", "inf", "nan", "1 s", "1_0", "\u0664"])
def test_a_wrong_header_of_ours_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="X-Program-Patience is a number of seconds over 0"):
        patience_of(CIMultiDict({"X-Program-Patience": value}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("next_turn_in_s=12.5", TurnHint(12.5)),
        ("next_turn_in_s=0,confidence=0.25", TurnHint(0.0, 0.25)),
        (" confidence = 1 , next_turn_in_s = 3 ", TurnHint(3.0)),
        ("keep=offload", TurnHint(None, 1.0, "offload")),
        ("next_turn_in_s=3, keep=retain", TurnHint(3.0, 1.0, "retain")),
    ],
)
def test_client_headers_say_when_its_next_turn_comes(value: str, expected: TurnHint) -> None:
    """It is a dictionary of RFC 8941; without the header there is no hint."""
    assert patience_of(CIMultiDict({"x-program-hint": value})).hint == expected
    assert patience_of(CIMultiDict({})).hint is None


@pytest.mark.parametrize(
    "value",
    [
        *("", ",", "12.5", "next_turn_in_s=inf", "next_turn_in_s=1e308", "next_turn_in_s=-1", "keep=drop", "keep="),
        *(
            "next_turn_in_s=1, x=2",
            "next_turn_in_s=1_0",
            "next_turn_in_s=1, confidence=\u0661",
            "next_turn_in_s=x, keep=retain",
        ),
    ],
)
def test_a_hint_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="X-Program-Hint is like"):
        patience_of(CIMultiDict({"X-Program-Hint": value}))


@pytest.mark.parametrize(
    ("header", "value", "nearest"),
    [
        ("X-Program-Hint", "next_turn_s=1", "next_turn_in_s"),
        ("X-Program-Hint", "next_turn_in_s=1, confidense=0.5", "confidence"),
        ("X-Program-Limits", "max_turn=5", "max_turns"),
        ("X-Program-Limits", "turns=5, deadline=600", "deadline_s"),
    ],
)
def test_a_wrong_key_names_the_nearest_right_one(header: str, value: str, nearest: str) -> None:
    with pytest.raises(RequestError, match=f"{header} is like .*; there is no key .*; did you mean {nearest}\\?$"):
        patience_of(CIMultiDict({header: value}))


def test_a_turn_may_be_tried_again_as_often_as_its_client_did_not() -> None:
    budget = RetryBudget(RetrySettings(retries_count=2))
    for client_count, tries_count in ((0, 2), (1, 1), (2, 0), (9, 0)):
        made = [budget.may_retry(0.0, tries_count, client_count) for tries_count in (1, 2, 3)]
        assert sum(made) == tries_count
    assert budget.refused_count == 0


def test_all_together_may_be_tried_again_a_part_of_the_turns_of_two_windows() -> None:
    """Older turns do not count; few turns have the minimum."""
    settings = RetrySettings(retries_count=9, budget_ratio=0.2, budget_min_count=3, window_s=10.0)
    budget = RetryBudget(settings)

    def retries(now_s: float) -> int:
        return sum(budget.may_retry(now_s, 1, 0) for _ in range(1000))

    assert retries(0.0) == 3
    for _ in range(100):
        budget.turn_came(5.0)
    assert retries(9.0) == 20 - 3
    assert retries(12.0) == 0
    assert retries(21.0) == 3
    assert retries(1000.0) == 3
    assert budget.refused_count == 5000 - (3 + 17 + 3 + 3)
