"""What headers tell the scheduler goes into its message by the name of the field."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.leases import TurnAsk
from thunderagent.proxy.reading.header_words import _TOLD, said_in, words_in


def test_told_words_are_fields_of_the_ask() -> None:
    """A row of the table is enough for a header to reach the scheduler."""
    headers = CIMultiDict({header: field for field, (header, _) in _TOLD.items()})
    told = words_in(said_in(CIMultiDictProxy(headers)), "", None).told
    assert told == {field: field for field in _TOLD}
    assert set(told) <= set(TurnAsk.__struct_fields__)
