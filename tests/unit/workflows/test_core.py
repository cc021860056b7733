"""The pure core of the workflows under random interleavings, and at each step of a move."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workflows.model import Model
from thunderagent_workflows.core.moves import Moves

STEPS_COUNT = 60


def interleave(seed: int, *, may_crash: bool, steps_count: int = STEPS_COUNT) -> Model:
    rng = random.Random(seed)
    agents = tuple(rng.sample(("plain", "managed", "stateful", "both", "batch", "soft", "soft-managed"), 3))
    model = Model(rng.randrange, agents, instances=rng.randrange(1, 4))
    for _ in range(steps_count):
        model.step(may_crash=may_crash)
    model.settle()
    model.check_settled()
    return model


def interleave_many(count: int, *, may_crash: bool) -> None:
    base = random.randrange(10**9)
    for seed in range(base, base + count):
        try:
            interleave(seed, may_crash=may_crash)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("may_crash", [False, True], ids=["whole", "crashes"])
def test_random_interleavings_keep_the_invariants(may_crash: bool) -> None:
    interleave_many(300, may_crash=may_crash)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("may_crash", [False, True], ids=["whole", "crashes"])
def test_ten_thousand_interleavings_keep_the_invariants(may_crash: bool) -> None:
    interleave_many(10_000, may_crash=may_crash)


def test_the_model_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guards of a move the same interleavings fail, so they detect errors."""
    monkeypatch.setattr(Moves, "take_in", _forgetful(Moves.take_in))
    with pytest.raises(AssertionError):
        interleave_many(300, may_crash=False)


def _forgetful(take_in: Any) -> Any:
    def lossy(self: Moves, message: Any) -> None:
        message.calls[1:] = []
        take_in(self, message)

    return lossy


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_interleavings_that_hypothesis_finds(data: st.DataObject, may_crash: bool) -> None:
    """The same, but a failure is shrunk to its smallest form."""
    model = Model(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0, ("managed", "stateful", "plain"))
    for _ in range(data.draw(st.integers(0, 30))):
        model.step(may_crash=may_crash)
    model.settle()
    model.check_settled()
