"""What headers tell the scheduler goes into its message by the name of the field."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import RequestError
from thunderagent.leases import TurnAsk
from thunderagent.proxy.reading.header_words import _TOLD, said_in, words_in


def test_told_words_are_fields_of_the_ask() -> None:
    """A row of the table is enough for a header to reach the scheduler."""
    headers = CIMultiDict({header: field for field, (header, _) in _TOLD.items()})
    told = words_in(said_in(CIMultiDictProxy(headers)), "", None).told
    assert told == {field: field for field in _TOLD}
    assert set(told) <= set(TurnAsk.__struct_fields__)


@pytest.mark.parametrize("name", ["X-Program-Limit", "X-ProgramID", "x-program_id", "X-Program-Deadline"])
def test_a_misspelt_header_of_ours_is_refused(name: str) -> None:
    """What it says would be lost in silence."""
    with pytest.raises(RequestError, match="did you mean X-Program-"):
        said_in(CIMultiDictProxy(CIMultiDict({name: "1"})))


@pytest.mark.parametrize(
    "name",
    [
        "X-Program",
        "X-Program-Name",
        "X-Program-Key",
        "X-Program-Type",
        "X-Program-Context",
        "X-Program-Area",
        "X-Progress",
    ],
)
def test_headers_that_others_send_are_let_through(name: str) -> None:
    """Seen in public clients of other services, some of which share a gateway with engines."""
    assert said_in(CIMultiDictProxy(CIMultiDict({name: "1"}))) == {}
