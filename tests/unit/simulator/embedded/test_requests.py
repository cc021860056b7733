"""What the simulated engine reads of a request."""

from __future__ import annotations

import pytest

from thunderagent.simulator.embedded.requests import ApiError, Message, parse


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"role":"user","content":' + b"[" * 100_000])
def test_a_body_that_cannot_be_read_is_the_clients_error(data: bytes) -> None:
    with pytest.raises(ApiError):
        parse(data, Message)
