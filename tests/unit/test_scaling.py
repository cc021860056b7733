"""Refusals before several processes start."""

from __future__ import annotations

import pytest

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.one_machine import serve_with_gateways
from thunderagent.scaling import check_gateways


async def test_one_command_with_gateways_shares_no_store() -> None:
    """Another scheduler would take over, and these gateways would not know it."""
    config = ServeConfig.load(gateways=2, port=0, store="redis://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="thunderagent scheduler"):
        await serve_with_gateways(config, (), ready=lambda _url, _name: pytest.fail("it serves"))
    check_gateways(config)  # then `scheduler` may be given the same file
