"""The replica that made an answer: found by the paths that name the answer, forgotten in the order of making."""

from __future__ import annotations

import tracemalloc

import pytest

from thunderagent.errors import OtherTenantError
from thunderagent.proxy.fleet.made_answers import PARTS_COUNT, MadeAnswers


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/resp%5F1",
    ],
)
def test_every_path_of_an_answer_leads_to_its_maker(path: str) -> None:
    made = MadeAnswers(10)
    made.keep("resp_1", "r0")
    assert made.maker_of(path) == "r0"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/", "/v1/responses/resp_2", "/v1/files/resp_1", "/"])
def test_unrelated_paths_have_no_maker(path: str) -> None:
    made = MadeAnswers(10)
    made.keep("resp_1", "r0")
    assert made.maker_of(path) is None


def test_an_answer_is_its_tenants() -> None:
    """Who made another tenant's is not said, so it is neither read, ended nor continued; None is an operator."""
    made = MadeAnswers(10)
    made.keep("resp_1", "r0", "red")
    made.keep("resp_2", "r1")
    assert made.maker("resp_1", "red") == made.maker("resp_1") == made.maker_of("/v1/responses/resp_1", "red") == "r0"
    for answer_id in ("resp_1", "resp_2"):
        with pytest.raises(OtherTenantError):
            made.maker(answer_id, "blue")
        with pytest.raises(OtherTenantError):
            made.maker_of(f"/v1/responses/{answer_id}/cancel", "blue")
    assert made.maker("resp_3", "blue") is None
    made.keep("resp_1", "r2", "blue")
    assert made.maker("resp_1", "red") == "r0", "an id that a client chose takes no answer from its tenant"


def test_the_oldest_are_forgotten_first() -> None:
    """An answer that is made again counts as new, and belongs to its last maker."""
    made = MadeAnswers(PARTS_COUNT)
    last = PARTS_COUNT + 2
    for number in (1, 2, 3, 1, *range(4, last + 1)):
        made.keep(f"resp_{number}", f"r{number}")
    made.keep(f"resp_{last}", "another")
    known = {number: made.maker(f"resp_{number}") for number in range(1, last + 1)}
    assert known == {1: "r1", 2: None, 3: None, **{n: f"r{n}" for n in range(4, last)}, last: "another"}


@pytest.mark.parametrize("limit_count", [1, 3, 7, 8, 100, 1001])
def test_known_answers_are_bounded(limit_count: int) -> None:
    made = MadeAnswers(limit_count)
    for number in range(4 * limit_count):
        made.keep(f"resp_{number}", "r0")
        last = range(max(0, number - limit_count + 1), number + 1)
        assert all(made.maker(f"resp_{each}") for each in (last[0], last[len(last) // 2], last[-1]))
        assert len(made) <= (PARTS_COUNT + 1) * -(-limit_count // PARTS_COUNT)


def test_memory_of_answers_stops_growing() -> None:
    """Even the empty places of forgotten answers are not kept."""
    made = MadeAnswers(8_000)
    sizes_bytes = []
    tracemalloc.start()
    try:
        for number in range(64_000):
            made.keep(f"resp_{number}", "r0")
            if number % 1_000 == 999:
                sizes_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes_bytes[10:]) < 1.05 * max(sizes_bytes[:10])
