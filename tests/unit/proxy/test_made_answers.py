"""Which replica made an answer: found by the paths that name it, forgotten in the order of their making."""

from __future__ import annotations

import pytest

from thunderagent.proxy.made_answers import MadeAnswers


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/resp_1?stream=true",
        "/v1/responses/resp%5F1",
    ],
)
def test_every_path_of_an_answer_leads_to_its_maker(path: str) -> None:
    made = MadeAnswers(10)
    made.keep("resp_1", "r0")
    assert made.maker_of(path) == "r0"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/", "/v1/responses/resp_2", "/v1/files/resp_1", "/"])
def test_other_paths_lead_nowhere(path: str) -> None:
    made = MadeAnswers(10)
    made.keep("resp_1", "r0")
    assert made.maker_of(path) is None


def test_the_oldest_is_forgotten_first() -> None:
    """The memory that is used has a bound; an answer that is made again is new."""
    made = MadeAnswers(3)
    for number in (1, 2, 3, 1, 4, 5):
        made.keep(f"resp_{number}", f"r{number}")
    assert len(made) == 3
    known = [number for number in range(1, 6) if made.maker_of(f"/v1/responses/resp_{number}")]
    assert known == [1, 4, 5]
